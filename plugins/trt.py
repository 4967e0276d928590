"""Import seam of TensorRT: the only module that names `tensorrt` or `tensorrt_rtx`.

Importing this module loads nothing; `load()` does, once. Objects of TensorRT carry no type
information and are `Any` here. Other modules call the loaded module `api`.
"""

from __future__ import annotations

import collections
import enum
import functools
import importlib
import importlib.util
import logging
import os
from typing import Any, Final, Literal, Protocol, cast

import onnx

from paged_trt.plugins.dtypes import DType
from paged_trt.plugins.elf_stub import load_stub
from paged_trt.plugins.errors import ConfigError, TensorRtMissingError, UnsupportedError
from paged_trt.plugins.fields import OP_DOMAIN, OP_VERSION

FLAVOR_VARIABLE: Final = "PAGED_TRT_FLAVOR"
FLAVORS: Final = ("tensorrt", "tensorrt_rtx")
Flavor = Literal["tensorrt", "tensorrt_rtx"]
_LOG: Final = logging.getLogger("paged_trt.tensorrt")
# A program that configures no logging hears of warnings in error messages only.
_LOG.addHandler(logging.NullHandler())
_LAST_LINES: Final = 40
_LOGGERS: Final[list[Any]] = []
_DTYPE_NAMES: Final = {
    DType.FLOAT32: "FLOAT",
    DType.FLOAT16: "HALF",
    DType.BFLOAT16: "BF16",
    DType.FLOAT8: "FP8",
    DType.INT8: "INT8",
    DType.INT32: "INT32",
    DType.INT64: "INT64",
}


class Route(enum.Enum):
    """How the ONNX parser of a version hands a node to a plugin."""

    PLUGIN = "plugin"
    """A node of any domain becomes the plugin of that name (RTX from 1.7, full TensorRT)."""
    GQA = "gqa"
    """Only a `GroupQueryAttention` node becomes a plugin (RTX 1.4 to 1.6)."""


@functools.cache
def flavor() -> Flavor:
    """The TensorRT in use: PAGED_TRT_FLAVOR, else the first of FLAVORS that is installed.

    Raises:
        ConfigError: PAGED_TRT_FLAVOR names no flavour.
        UnsupportedError: it, or every flavour, is missing.
    """
    wanted = os.environ.get(FLAVOR_VARIABLE)
    if wanted and wanted not in FLAVORS:
        raise ConfigError(
            f"{FLAVOR_VARIABLE} must be `{FLAVORS[0]}` or `{FLAVORS[1]}`, got `{wanted}`"
        )
    for name in (wanted,) if wanted else FLAVORS:
        if importlib.util.find_spec(name) is not None:
            return cast(Flavor, name)
    missing = f"`{wanted}`" if wanted else "TensorRT"
    extra = "tensorrt" if wanted == "tensorrt" else "rtx"
    raise TensorRtMissingError(
        f'{missing} is not installed; install it with `pip install "paged-trt[{extra}]"`'
    )


@functools.cache
def load() -> Any:
    """The TensorRT module.

    Raises:
        ConfigError: PAGED_TRT_FLAVOR names no flavour.
        UnsupportedError: no TensorRT is installed, or it cannot be loaded.
    """
    name = flavor()
    try:
        api = importlib.import_module(name)
        if name == "tensorrt_rtx" and os.name == "posix":
            load_stub("libtensorrt_rtx.so", "libtensorrt_rtx.so.1")
    except (ImportError, OSError) as error:
        raise TensorRtMissingError(
            f"`{name}` is installed and does not load ({error}); reinstall it"
        ) from error
    return api


def version() -> str:
    """Version of the TensorRT in use."""
    return str(load().__version__)


def to_api_dtype(dtype: DType) -> Any:
    """Data type of TensorRT."""
    return getattr(load().DataType, _DTYPE_NAMES[dtype])


def from_api_dtype(value: Any) -> DType:
    """Inverse of `to_api_dtype`.

    Raises:
        UnsupportedError: no tensor of Paged TRT has this type.
    """
    for dtype, name in _DTYPE_NAMES.items():
        if value == getattr(load().DataType, name):
            return dtype
    raise UnsupportedError(f"tensors of TensorRT type {value} are not used by Paged TRT")


class LogLines:
    """What TensorRT logged: every warning and error, and the last lines of any level."""

    def __init__(self) -> None:
        self.last: collections.deque[str] = collections.deque(maxlen=_LAST_LINES)
        self.warnings: list[str] = []

    def add(self, level: int, message: str) -> None:
        """Keep one message and forward it to Python's logging.

        Args:
            level: level of Python's logging; DEBUG is forwarded only, it is a flood.
            message: text without a final newline.
        """
        if level > logging.DEBUG:
            self.last.append(message)
        if level >= logging.WARNING:
            self.warnings.append(message)
        if _LOG.isEnabledFor(level):
            _LOG.log(level, "%s", message)

    def tail(self, count: int = 8) -> str:
        """The newest warnings and errors, or the newest lines where there is none."""
        lines = self.warnings or list(self.last)
        return "\n".join(lines[-count:])


def logger(lines: LogLines) -> Any:
    """A TensorRT logger that adds to `lines`.

    TensorRT goes on with the first logger of a process as long as any of its objects is there,
    also of another engine: loggers stay.
    """
    made = _logger_class()(lines)
    _LOGGERS.append(made)
    return made


@functools.cache
def _logger_class() -> Any:
    api = load()
    severity = api.ILogger
    levels = {
        severity.INTERNAL_ERROR: logging.ERROR,
        severity.ERROR: logging.ERROR,
        severity.WARNING: logging.WARNING,
        severity.INFO: logging.INFO,
        severity.VERBOSE: logging.DEBUG,
    }

    class Logger(api.ILogger):  # type: ignore[misc,name-defined]
        def __init__(self, lines: LogLines) -> None:
            api.ILogger.__init__(self)
            self._lines = lines

        def log(self, severity: Any, message: str) -> None:
            level = levels[severity]
            # Said of every int64 input of every model, and the runtime binds int64.
            if "has Int64 binding" in message:
                level = logging.DEBUG
            self._lines.add(level, message)

    return Logger


class BuildListener(Protocol):
    """Receiver of a build's progress; phases nest, and steps count from 0."""

    def phase_start(self, phase: str, parent: str | None, num_steps: int) -> None:
        """A phase of `num_steps` steps begins inside `parent`."""

    def step_complete(self, phase: str, step: int) -> bool:
        """A step ended; False stops the build."""

    def phase_finish(self, phase: str) -> None:
        """A phase ended."""


def progress_monitor(listener: BuildListener) -> Any:
    """A TensorRT progress monitor that forwards to `listener`."""
    return _monitor_class()(listener)


@functools.cache
def _monitor_class() -> Any:
    api = load()

    class Monitor(api.IProgressMonitor):  # type: ignore[misc,name-defined]
        def __init__(self, listener: BuildListener) -> None:
            api.IProgressMonitor.__init__(self)
            self._listener = listener

        def phase_start(self, phase_name: str, parent_phase: str | None, num_steps: int) -> None:
            self._listener.phase_start(phase_name, parent_phase, num_steps)

        def step_complete(self, phase_name: str, step: int) -> bool:
            return self._listener.step_complete(phase_name, step)

        def phase_finish(self, phase_name: str) -> None:
            self._listener.phase_finish(phase_name)

    return Monitor


def create_network(builder: Any) -> Any:
    """An empty strongly typed network; RTX knows no other kind and no flag for it."""
    if flavor() == "tensorrt_rtx":
        return builder.create_network(0)
    api = load()
    # TensorRT 11 has only strongly typed networks; there the flag exists and does nothing.
    return builder.create_network(1 << int(api.NetworkDefinitionCreationFlag.STRONGLY_TYPED))


@functools.cache
def route() -> Route:
    """How this version's ONNX parser finds a plugin, by what it can do.

    The probe is a node whose plugin does not exist: a parser of the plugin route says that it
    looked for one. No creator is registered for it, because a parser that finds a creator
    goes on into code that ends the process where the library fix does not apply.

    Raises:
        UnsupportedError: the parser reaches a plugin in neither way.
    """
    api = load()
    lines = LogLines()
    log = logger(lines)
    builder = api.Builder(log)
    network = create_network(builder)
    parser = api.OnnxParser(network, log)
    # Expected errors of the probe do not belong in the user's log.
    was_disabled, _LOG.disabled = _LOG.disabled, True
    try:
        parser.parse(_probe_model())
        finds_gqa = bool(parser.supports_operator("GroupQueryAttention"))
    finally:
        _LOG.disabled = was_disabled
    errors = [parser.get_error(index).desc() for index in range(parser.num_errors)]
    if any("Plugin not found" in error for error in errors):
        return Route.PLUGIN
    if finds_gqa and flavor() == "tensorrt_rtx":
        return Route.GQA
    raise UnsupportedError(
        f"the ONNX parser of {flavor()} {version()} hands no node to a plugin; "
        'install another version with `pip install "paged-trt[rtx]"`'
    )


def _probe_model() -> bytes:
    helper = onnx.helper
    value = [
        helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, [1]) for name in ("x", "y")
    ]
    node = helper.make_node(
        "PluginProbe",
        ["x"],
        ["y"],
        name="probe",
        domain=OP_DOMAIN,
        plugin_namespace=OP_DOMAIN,
        plugin_version=OP_VERSION,
    )
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid(OP_DOMAIN, 1)]
    graph = helper.make_graph([node], "probe", value[:1], value[1:])
    return helper.make_model(graph, opset_imports=opsets, ir_version=9).SerializeToString()

"""The page of every error code: what it means, an example, the remedy.

Pages come from the classes of `errors`, from the table of `tensorrt_messages`, and from what
the command line itself can meet. `errors.md` beside this module is written from them.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
from typing import Final

from paged_trt.plugins import errors
from paged_trt.plugins.errors import PagedTrtError
from paged_trt.plugins.tensorrt_messages import TRANSLATIONS, Translation

USAGE_CODE: Final = "PTRT-X001"
INPUT_OUTPUT_CODE: Final = "PTRT-X002"
MEMORY_CODE: Final = "PTRT-X003"
INTERRUPTED_CODE: Final = "PTRT-X004"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ErrorPage:
    """One kind of error.

    Attributes:
        code: stable code.
        name: class, or the kind in a few words.
        exit_code: of the command line; None where it is that of the step that failed.
        meaning: what it says.
        example: a message.
        remedy: what to do.
        asks_doctor: whether `paged-trt doctor` shows what is missing on this machine.
    """

    code: str
    name: str
    exit_code: int | None
    meaning: str
    example: str
    remedy: str
    asks_doctor: bool = False


_ENGINE_REMEDY: Final = (
    "Build the engine directory again with `paged-trt build`, or copy it again, all files of it; "
    "`paged-trt inspect ENGINE_DIR` names the file or the hop."
)
_MACHINE: Final = frozenset(
    {
        errors.DeviceMissingError,
        errors.TensorRtMissingError,
        errors.PackageMissingError,
        errors.PlanVersionError,
        errors.ComputeCapabilityError,
        errors.KernelError,
        errors.KernelCompileError,
    }
)
"""Errors that a look at the machine explains."""
_TEXTS: Final[dict[type[PagedTrtError], tuple[object, str]]] = {
    errors.ConfigError: (
        "`-o ENGINE_DIR` is missing; pass it, or `--dry-run` to build nothing",
        "Change the option that the message names; `paged-trt COMMAND --help` has an example.",
    ),
    errors.KvPoolError: (
        "num_pages=3 cannot hold max_batch_size=2 sequences of max_kv_cache_capacity=200 tokens; "
        "raise it to at least 4: `--kv-pool-pages 4`",
        "Use the page count that the message asks for. The minimum is max_batch_size * "
        "ceil(max_kv_cache_capacity / 128); `paged-trt build ... --dry-run` shows it.",
    ),
    errors.UnsupportedError: (
        "manifest.json lists no model.onnx, which the reference executor runs; rebuild without "
        "`--no-reference`",
        "Do what the message says, or use another executor, flavour or machine.",
    ),
    errors.DeviceMissingError: (
        "there is no CUDA device 1, this machine has 1; pass `--device` with a smaller number",
        "Run on a machine with an NVIDIA GPU and driver, or pass `--executor reference`, which "
        "needs none.",
    ),
    errors.TensorRtMissingError: (
        'TensorRT is not installed; install it with `pip install "paged-trt[rtx]"`',
        "Install one flavour: `paged-trt[rtx]`, `paged-trt[rtx-hopper]` or `paged-trt[tensorrt]`. "
        "`--dry-run`, `explain` and `inspect` work without.",
    ),
    errors.PackageMissingError: (
        'onnxruntime is not installed; run `pip install "paged-trt[compare]"`',
        "Install the extra that the message names.",
    ),
    errors.PlanVersionError: (
        "the plan was built by tensorrt_rtx 1.7.1.116 and tensorrt_rtx 1.6.1.120 is installed; "
        "install the first, or rebuild the engine with `paged-trt build`",
        "Install the version that built the plan, or rebuild it.",
    ),
    errors.ComputeCapabilityError: (
        "the plan was built for compute capability 8.9 and device 0 has 9.0; rebuild the engine "
        "on this machine",
        "Rebuild on this machine. TensorRT-RTX 1.7 refuses Hopper: there, install "
        '`pip install "paged-trt[rtx-hopper]"` or NVIDIA\'s full TensorRT.',
    ),
    errors.OnnxRewriteError: (
        errors.OnnxRewriteError(
            "/layers.1/attn",
            "attribute `smooth_softmax` is set",
            "export the model without smooth softmax",
        ),
        "Export the model as the message says; `paged-trt explain MODEL` lists all nodes at once.",
    ),
    errors.SequenceError: (
        "the prompt has 101 tokens and the engine takes max_input_len=100; shorten it, or rebuild "
        "with a larger `--max-input-len`",
        "Shorten the prompt or ask for fewer tokens, or rebuild with larger limits.",
    ),
    errors.QueueFullError: (
        "4096 sequences wait and max_queue is 4096; try again later",
        "Try again later, send fewer requests at once, or raise the limit of the session.",
    ),
    errors.BuildError: (
        "TensorRT built no engine; last lines of its log: ...",
        "Read the last lines of TensorRT's log in the message; `--verbose` shows all of it, and "
        "`paged-trt explain MODEL` what the model's attention becomes.",
    ),
    errors.BuildCancelledError: (
        "the build was stopped; nothing was written",
        "Start the build again; an engine directory that was there is as it was.",
    ),
    errors.ManifestError: (
        "engine/model.plan: the manifest says size 141252, found 100; the file is truncated or "
        "belongs to another engine: rebuild with `paged-trt build`",
        _ENGINE_REMEDY,
    ),
    errors.SpecMismatchError: (
        errors.SpecMismatchError("num_pages", 16, 17, where="model.onnx, `key_pool.0`"),
        _ENGINE_REMEDY,
    ),
    errors.KernelError: (
        "kernel `append` cannot be loaded: cuModuleLoadData failed: CUDA_ERROR_NO_BINARY_FOR_GPU",
        "Delete the kernel cache that `paged-trt doctor` names, and update the driver.",
    ),
    errors.KernelCompileError: (
        "NVRTC refused a kernel for sm_90a: ...",
        'Install the compiler and headers of one CUDA version: `pip install "paged-trt[cuda]"`.',
    ),
    errors.KernelLaunchError: (
        "no kernel for decode_direct float16 -> float16, head_dim 64, value_head_dim 64, "
        "group_size 1, sm_90: kernels are loaded with the engine and never while it runs; load "
        "the engine with `paged_trt.runtime.engine.load_engine`",
        "Open engines with `load_engine` or `paged-trt run`; where the driver refused a launch, "
        "the device is lost: end the process.",
    ),
    errors.ExecutionError: (
        "the device has no 4,294,967,296 bytes for the KV pools of layer 7 "
        "(CUDA_ERROR_OUT_OF_MEMORY), 1,073,741,824 are free; end other processes, or build with "
        "fewer pages",
        "Free memory of the device, or compare with `--executor reference` to see whether the "
        "model itself is at fault.",
    ),
    errors.PagesExhausted: (
        errors.PagesExhausted(3, 1),
        "Release a sequence and try the step again, or build with `--retained-pages` or "
        "`--kv-pool-pages`.",
    ),
}
"""Example and remedy of each class."""
_COMMAND_LINE: Final = (
    ErrorPage(
        code=USAGE_CODE,
        name="usage",
        exit_code=2,
        meaning="The command line cannot be understood: an unknown command or option, a missing "
        "argument, or a value of the wrong type.",
        example="No such command 'biuld'. Did you mean 'build'?",
        remedy="`paged-trt --help` lists the commands, `paged-trt COMMAND --help` has an example.",
    ),
    ErrorPage(
        code=INPUT_OUTPUT_CODE,
        name="input or output",
        exit_code=3,
        meaning="The system refused to read or write a file.",
        example="`engine`: No space left on device; free space, or pass another place; nothing is "
        "left half-written",
        remedy="Free space or pass another place; nothing is left half-written.",
    ),
    ErrorPage(
        code=MEMORY_CODE,
        name="out of host memory",
        exit_code=3,
        meaning="The process could not get the memory that it needs.",
        example="out of host memory; use a smaller model or pool",
        remedy="Use a smaller model or pool, or a machine with more memory.",
    ),
    ErrorPage(
        code=INTERRUPTED_CODE,
        name="interrupted",
        exit_code=130,
        meaning="Ctrl-C or a signal ended the command.",
        example="interrupted",
        remedy="Start it again; nothing is left half-written.",
    ),
)


def error_classes() -> tuple[type[PagedTrtError], ...]:
    """Every class of `errors` below PagedTrtError, parents first."""
    found: list[type[PagedTrtError]] = []
    pending = [PagedTrtError]
    while pending:
        children = pending.pop(0).__subclasses__()
        found += [each for each in children if each.__module__ == errors.__name__]
        pending += children
    return tuple(found)


@functools.cache
def pages() -> dict[str, ErrorPage]:
    """Page of every code, in the order of the codes.

    Raises:
        KeyError: a class has no example and remedy here.
    """
    made = [*map(_class_page, error_classes()), *_COMMAND_LINE]
    taken = {page.code for page in made}
    made += [_message_page(each) for each in TRANSLATIONS if each.code not in taken]
    return {page.code: page for page in sorted(made, key=lambda page: page.code)}


def _class_page(kind: type[PagedTrtError]) -> ErrorPage:
    example, remedy = _TEXTS[kind]
    meaning = inspect.cleandoc(kind.__doc__ or "").split("\n\nArgs:")[0]
    return ErrorPage(
        code=kind.code,
        name=kind.__name__,
        exit_code=kind.exit_code,
        meaning=meaning,
        example=str(example),
        remedy=remedy,
        asks_doctor=kind in _MACHINE,
    )


def _message_page(translation: Translation) -> ErrorPage:
    return ErrorPage(
        code=translation.code,
        name=translation.name,
        exit_code=None,
        meaning=f"{_sentence(translation.meaning)} TensorRT says it in its own words, which the "
        "message ends with.",
        example=translation.example,
        remedy=_sentence(translation.remedy),
        asks_doctor=True,
    )


def _sentence(text: str) -> str:
    return f"{text[0].upper()}{text[1:]}."

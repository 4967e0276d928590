"""Runs `model.onnx` of an engine directory in onnxruntime on a CPU: same pages, no plugin."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from paged_trt.plugins.dtypes import DType
from paged_trt.plugins.errors import ExecutionError, PackageMissingError, UnsupportedError
from paged_trt.plugins.tensors import (
    INPUT_IDS,
    LOGITS,
    NEXT_TOKENS,
    PAGE_TABLE,
    PAST_LENS,
    POSITION_IDS,
    QUERY_START_OFFSETS,
    EngineSpec,
    Role,
    pool_output_name,
)
from paged_trt.runtime.dense import EXACT_PRODUCTS
from paged_trt.runtime.executor import StepInputs, require_next_tokens
from paged_trt.runtime.kv_scales import checked_scales
from paged_trt.runtime.reference_model import ReferenceModel, open_reference_model
from paged_trt.runtime.sampler import Sampling
from paged_trt.runtime.step_sampling import Sampled, sampled_on_host

Array = npt.NDArray[Any]
_RAW: Final[dict[int, type[np.unsignedinteger[Any]]]] = {1: np.uint8, 2: np.uint16}
BFLOAT16_NOTE: Final = (
    "onnxruntime multiplies no bfloat16 on a CPU: the model runs as its float32 upcast, "
    "with bfloat16 pools as they are"
)


class ReferenceExecutor:
    """The rewritten model with its executable specification, in onnxruntime.

    Each pool exists twice: a step reads one copy and writes the other, and then the two
    change places. onnxruntime promises nothing about an output bound to the memory of an
    input.

    Args:
        model_path: the rewritten model; its weights lie in the same directory.
        spec: interface that the model must have.
        kv_scales: scales input name -> `[2, num_kv_heads]` float32; needed where the pools
            are quantised.
        notes: what a report must say besides, such as why this executor was chosen.
        keeps_layers: keep the attention output of each layer after a step, as for an engine
            that was built with `--layer-outputs`.

    Raises:
        UnsupportedError: onnxruntime is not installed or cannot run the model.
        SpecMismatchError: a tensor of the model differs from the tensor table.
        ManifestError: the model cannot be read, weights lie outside its directory, or
            scales are missing, unknown, misshapen or no positive numbers.
    """

    def __init__(
        self,
        model_path: Path,
        spec: EngineSpec,
        *,
        kv_scales: Mapping[str, npt.NDArray[np.float32]] | None = None,
        notes: tuple[str, ...] = (),
        keeps_layers: bool = False,
    ) -> None:
        self._spec = spec
        runtime = _import_onnxruntime()
        self._scales = checked_scales(spec, kv_scales or {})
        model = open_reference_model(
            model_path, spec, keeps_layers=keeps_layers or spec.layer_outputs
        )
        self._layer_names = model.layer_names
        self._layer_outputs: list[Array] = []
        self._notes = (*notes, BFLOAT16_NOTE) if model.is_upcast else notes
        self._session: Any = _make_session(runtime, model, model_path)
        # onnxruntime reads and writes these arrays in place.
        self._pools = [_zero_pools(spec), _zero_pools(spec)]
        self._current = 0
        self._bindings = [self._bind(runtime, index) for index in (0, 1)]

    @property
    def name(self) -> str:
        """`reference`."""
        return "reference"

    @property
    def spec(self) -> EngineSpec:
        """The interface of the model."""
        return self._spec

    @property
    def notes(self) -> tuple[str, ...]:
        """Why this executor was chosen, and whether the model is a float32 upcast."""
        return self._notes

    @property
    def bucketed_shapes(self) -> bool:
        """False: padding rows would cost time and change nothing."""
        return False

    @property
    def samples_on_device(self) -> bool:
        """False: the logits are on the host."""
        return False

    @property
    def kv_scales(self) -> Mapping[str, npt.NDArray[np.float32]]:
        """Scales input name -> `[2, num_kv_heads]`; empty unless the pools are quantised."""
        return self._scales

    def read_pages(self, name: str, pages: Sequence[int]) -> Array:
        """A copy of pages of a pool, `[len(pages), num_kv_heads, 128, head_dim]`.

        Raises:
            ExecutionError: the executor is closed.
        """
        return self.pool(name)[list(pages)]

    @property
    def gives_layer_outputs(self) -> bool:
        """Whether attention outputs are kept."""
        return bool(self._layer_names)

    def read_layer_outputs(self) -> list[Array]:
        """Attention outputs of the last step, `[T, num_q_heads, value_head_dim]` by layer.

        Returns:
            Empty where none are kept, and before the first step; float32 where bfloat16 is upcast.
        """
        return self._layer_outputs

    def fill_pools(self, byte: int) -> None:
        """Set every byte of every pool.

        Raises:
            ExecutionError: the executor is closed.
        """
        self._check_open()
        for pools in self._pools:
            for array in pools.values():
                array.view(np.uint8)[:] = byte

    def pool(self, name: str) -> Array:
        """A pool by its input name, as the next step reads it; valid until then.

        Returns:
            `[num_pages, num_kv_heads, 128, head_dim]` in the pool's type, writable.

        Raises:
            ExecutionError: the executor is closed.
        """
        self._check_open()
        return self._pools[self._current][name]

    def step(self, inputs: StepInputs) -> Array:
        """Append keys and values of T tokens to the pools, attend, and return logits.

        Returns:
            `[N, vocab_size]` or `[T, vocab_size]`; float16 or float32 (bfloat16 is upcast).

        Raises:
            ExecutionError: onnxruntime failed, or the executor is closed.
        """
        return self._run(inputs)[LOGITS].reshape(-1, self._spec.vocab_size)

    def step_tokens(self, inputs: StepInputs) -> npt.NDArray[np.int64]:
        """As `step`, for the greedy choices of the model instead of the logits.

        Returns:
            `[N]`; an id outside the vocabulary where a row has no largest logit.

        Raises:
            ExecutionError: onnxruntime failed, or the executor is closed.
            UnsupportedError: the model has no `next_tokens`.
        """
        require_next_tokens(self._spec)
        return self._run(inputs)[NEXT_TOKENS]

    def step_sampled(
        self,
        inputs: StepInputs,
        rows: Sequence[int],
        specs: Sequence[Sampling],
        steps: Sequence[int],
        *,
        with_logprobs: bool = False,
    ) -> Sampled:
        """As `step`, for tokens that are drawn from the logits, in NumPy.

        Returns:
            Tokens and logprobs of `rows`, an id outside the vocabulary where one has no largest
            logit.

        Raises:
            ExecutionError: onnxruntime failed, or the executor is closed.
            ConfigError: a row draws and has no seed.
        """
        return sampled_on_host(self, inputs, rows, specs, steps, with_logprobs=with_logprobs)

    def _run(self, inputs: StepInputs) -> dict[str, Array]:
        """One step; its results by name."""
        self._check_open()
        binding = self._bindings[self._current]
        for name, array in self._feeds(inputs).items():
            binding.bind_cpu_input(name, array)
        results = [each.name for each in self._spec.tensors() if each.role is Role.RESULT]
        for name in (*results, *self._layer_names):
            binding.bind_output(name, "cpu")
        try:
            self._session.run_with_iobinding(binding)
        except Exception as error:  # onnxruntime has no base class of its own
            raise ExecutionError(
                f"onnxruntime failed in a step of {len(inputs.input_ids)} tokens and "
                f"{len(inputs.past_lens)} sequences: {error}"
            ) from error
        self._current = 1 - self._current
        # The pools were bound first.
        found = [value.numpy() for value in binding.get_outputs()[len(self._spec.pools()) :]]
        self._layer_outputs = found[len(results) :]
        return dict(zip(results, found, strict=False))

    def during_next_step(self, work: Callable[[], None]) -> None:
        """Do some work at once: the host runs the model too."""
        work()

    def copy_pages(self, pages: Sequence[tuple[int, int]]) -> None:
        """Copy keys and values of whole pages, `(source, target)`, in every layer.

        Raises:
            ExecutionError: the executor is closed.
        """
        self._check_open()
        for array in self._pools[self._current].values():
            for source, target in pages:
                array[target] = array[source]

    def poison_pages(self, page_ids: Sequence[int]) -> None:
        """Fill pages with bytes of 0xFF, NaN in every float type.

        Raises:
            ExecutionError: the executor is closed.
        """
        self._check_open()
        for array in self._pools[self._current].values():
            array.view(np.uint8)[list(page_ids)] = 0xFF

    def warm_up(self) -> None:
        """Nothing is left to make: onnxruntime prepared the model when it was loaded."""
        self._check_open()

    def close(self) -> None:
        """Release the pools and the model; a second call does nothing."""
        self._bindings = []
        self._session = None
        self._pools = []

    def _check_open(self) -> None:
        if self._session is None:
            raise ExecutionError("the reference executor is closed; load the engine again")

    def _feeds(self, inputs: StepInputs) -> dict[str, Array]:
        feeds: dict[str, Array] = {
            INPUT_IDS: inputs.input_ids[None],
            PAGE_TABLE: inputs.page_table,
            QUERY_START_OFFSETS: inputs.query_start_offsets,
            PAST_LENS: inputs.past_lens,
        }
        if self._spec.reads_position_ids:
            feeds[POSITION_IDS] = inputs.position_ids[None]
        return feeds

    def _bind(self, runtime: ModuleType, index: int) -> Any:
        """Binding that reads the pools of `index` and writes the others."""
        binding = self._session.io_binding()
        for name, array in self._scales.items():
            binding.bind_cpu_input(name, array)
        for name, array in self._pools[index].items():
            binding.bind_ortvalue_input(name, _ort_value(runtime, array))
        for name, array in self._pools[1 - index].items():
            binding.bind_ortvalue_output(pool_output_name(name), _ort_value(runtime, array))
        return binding


def _import_onnxruntime() -> ModuleType:
    try:
        import onnxruntime
    except ImportError as error:
        raise PackageMissingError(
            "the reference executor needs onnxruntime, which is not installed; "
            '`pip install "paged-trt[compare]"`'
        ) from error
    module: ModuleType = onnxruntime
    return module


def _make_session(runtime: ModuleType, model: ReferenceModel, model_path: Path) -> Any:
    options = runtime.SessionOptions()
    options.use_deterministic_compute = True
    # Errors are raised: onnxruntime need not print them as well.
    options.log_severity_level = 4
    options.add_session_config_entry(*EXACT_PRODUCTS)
    try:
        with model.file() as path:
            return runtime.InferenceSession(
                str(path), sess_options=options, providers=["CPUExecutionProvider"]
            )
    except Exception as error:  # onnxruntime has no base class of its own
        raise UnsupportedError(
            f"onnxruntime {runtime.__version__} cannot load {model_path}: {error}; "
            'try `pip install --upgrade "paged-trt[compare]"`'
        ) from error


def _zero_pools(spec: EngineSpec) -> dict[str, Array]:
    return {
        pool.name: np.zeros([int(dim) for dim in pool.dims], pool.dtype.numpy)
        for pool in spec.pools()
    }


def _ort_value(runtime: ModuleType, array: Array) -> Any:
    """The array as an OrtValue on the same memory; onnxruntime knows no type of ml_dtypes."""
    element_type = next(each for each in DType if np.dtype(each.numpy) == array.dtype)
    raw = array.view(_RAW[array.itemsize])
    return runtime.OrtValue.ortvalue_from_numpy_with_onnx_type(raw, element_type.onnx)

"""Random inputs for PagedAttention and a way to run the reference function on them."""

from __future__ import annotations

import ctypes
import dataclasses
import functools
import math
from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import numpy_attention
import onnx
import onnx.helper
import onnxruntime

from paged_trt.plugins import reference
from paged_trt.plugins.dtypes import DType
from paged_trt.plugins.fields import OP_DOMAIN, OP_TYPE

Array = npt.NDArray[Any]
PAGE = 128
KV_CACHE_DTYPES = (DType.FLOAT16, DType.BFLOAT16, DType.FLOAT8, DType.INT8)

# Three rows that append over a page edge, decode in a fresh page, and prefill two pages.
RAGGED: Final[dict[str, Any]] = {"lengths": [3, 1, 130], "pasts": [126, 256, 0]}

# The tolerance rule. The reference computes in float32 and rounds once, to the type of its
# output; NumPy computes in float64. So they differ by half a unit in the last place of the
# output (a relative 2^-11 or 2^-8, or half the smallest subnormal) and by the float32 error
# of some hundred products and sums, taken here as 2^-19 of the largest output.
OUTPUT_ROUNDING = {DType.FLOAT16: 2.0**-11, DType.BFLOAT16: 2.0**-8, DType.FLOAT32: 2.0**-24}
FLOAT32_ERROR = 2.0**-19
SMALLEST_HALF_STEP = 2.0**-25


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """Shapes, lengths and attributes of one step.

    Attributes:
        lengths: new tokens of each sequence row, 0 for a padding row.
        pasts: tokens of each row that the pool already holds.
        padding_tokens: token rows after the last sequence.
        table_padding: unused page-table columns.
        rotary_dim: rotated lanes, 0 for all of `head_dim`.
    """

    lengths: Sequence[int]
    pasts: Sequence[int]
    kv: DType = DType.FLOAT16
    activation: DType = DType.FLOAT16
    num_kv_heads: int = 2
    group: int = 2
    head_dim: int = 16
    value_head_dim: int = 16
    window: int = -1
    softcap: float = 0.0
    rope: int = 0
    rotary_dim: int = 0
    has_sinks: bool = False
    padding_tokens: int = 0
    table_padding: int = 1
    seed: int = 0

    @property
    def num_q_heads(self) -> int:
        return self.num_kv_heads * self.group

    @property
    def settings(self) -> numpy_attention.Settings:
        return numpy_attention.Settings(
            softmax_scale=self.head_dim**-0.5,
            window=self.window,
            softcap=self.softcap,
            rope=self.rope,
        )


def make_inputs(case: Case) -> dict[str, Array]:
    """Inputs whose pools hold poison wherever no past token lies, and scrambled page ids."""
    random = np.random.default_rng(case.seed)
    tokens = sum(case.lengths) + case.padding_tokens
    totals = [past + length for past, length in zip(case.pasts, case.lengths, strict=True)]
    pages_of_row = [-(-total // PAGE) for total in totals]
    num_pages = sum(pages_of_row) + 2
    free_pages = iter(random.permutation(num_pages))
    table = np.full((len(totals), max([*pages_of_row, 1]) + case.table_padding), -1, np.int32)
    for row, pages in enumerate(pages_of_row):
        table[row, :pages] = [next(free_pages) for _ in range(pages)]

    def activation(heads: int, dim: int) -> Array:
        return random.standard_normal((tokens, heads, dim)).astype(case.activation.numpy)

    inputs = {
        "query": activation(case.num_q_heads, case.head_dim),
        "key": activation(case.num_kv_heads, case.head_dim),
        "value": activation(case.num_kv_heads, case.value_head_dim),
        "key_pool": poisoned_pool(case, num_pages, case.head_dim),
        "value_pool": poisoned_pool(case, num_pages, case.value_head_dim),
        "page_table": table,
        "query_start_offsets": np.cumsum([0, *case.lengths]).astype(np.int32),
        "past_lens": np.array(case.pasts, np.int32),
        "rope_cos_sin": _rope_table(case, max(totals, default=0) + 1),
        "kv_scales": _scales(case, random),
        "sinks": np.full(case.num_q_heads, -np.inf, np.float32),
    }
    if case.has_sinks:
        inputs["sinks"] = random.uniform(-1, 4, case.num_q_heads).astype(np.float32)
    _fill_past(inputs, case, random)
    return inputs


def poisoned_pool(case: Case, num_pages: int, dim: int) -> Array:
    """A pool `[num_pages, num_kv_heads, 128, dim]` of NaN, or of 127 where the type has none."""
    poison = 127 if case.kv is DType.INT8 else np.nan
    return np.full((num_pages, case.num_kv_heads, PAGE, dim), poison).astype(case.kv.numpy)


def _fill_past(inputs: Mapping[str, Array], case: Case, random: np.random.Generator) -> None:
    for row, past in enumerate(case.pasts):
        for position in range(past):
            page = inputs["page_table"][row, position // PAGE]
            for pool in (inputs["key_pool"], inputs["value_pool"]):
                numbers = random.standard_normal(pool[page, :, position % PAGE].shape)
                if case.kv is DType.INT8:
                    numbers = np.clip(np.rint(numbers * 40), -127, 127)
                pool[page, :, position % PAGE] = numbers.astype(pool.dtype)


def _rope_table(case: Case, positions: int) -> Array:
    if case.rope == 0:
        return np.zeros((1, 2, 1), np.float32)
    half = (case.rotary_dim or case.head_dim) // 2
    angles = np.outer(np.arange(positions), 1000.0 ** (-np.arange(half) / half))
    return np.stack([np.cos(angles), np.sin(angles)], axis=1).astype(np.float32)


def _scales(case: Case, random: np.random.Generator) -> Array:
    if case.kv is DType.INT8:
        return random.uniform(0.02, 0.04, (2, case.num_kv_heads)).astype(np.float32)
    if case.kv is DType.FLOAT8:
        return random.uniform(0.005, 1.5, (2, case.num_kv_heads)).astype(np.float32)
    return np.ones((2, case.num_kv_heads), np.float32)


def make_model(case: Case, function: onnx.FunctionProto | None = None) -> onnx.ModelProto:
    """A model of one PagedAttention node; T, N, M and the page count are symbolic."""
    function = function or reference.paged_attention_function(case.kv)
    node = onnx.helper.make_node(
        OP_TYPE,
        reference.INPUT_NAMES,
        reference.OUTPUT_NAMES,
        name="attention",
        domain=OP_DOMAIN,
        overload=function.overload,
        **node_attributes(case),
    )
    types = {**_input_types(case), **_output_types(case)}
    values = {
        name: onnx.helper.make_tensor_value_info(name, dtype.onnx, shape)
        for name, (dtype, shape) in types.items()
    }
    graph = onnx.helper.make_graph(
        [node],
        "attention",
        [values[name] for name in reference.INPUT_NAMES],
        [values[name] for name in reference.OUTPUT_NAMES],
    )
    opsets = [("", 23), (OP_DOMAIN, reference.OPSET)]
    return onnx.helper.make_model(
        graph,
        functions=[function],
        opset_imports=[onnx.helper.make_opsetid(*opset) for opset in opsets],
        ir_version=11,
    )


def node_attributes(case: Case) -> dict[str, Any]:
    """Attributes of a node; the pool limits are those of no particular pool."""
    return {
        "num_q_heads": case.num_q_heads,
        "num_kv_heads": case.num_kv_heads,
        "head_dim": case.head_dim,
        "value_head_dim": case.value_head_dim,
        "num_pages": 1,
        "max_pages_per_seq": 1,
        "max_batch_size": 1,
        "window": case.window,
        "rope": case.rope,
        "rotary_dim": case.rotary_dim or case.head_dim,
        "softmax_scale": case.settings.softmax_scale,
        "softcap": case.softcap,
        "plugin_version": "1",
        "plugin_namespace": OP_DOMAIN,
    }


_Types = dict[str, tuple[DType, list[str | int]]]


def _input_types(case: Case) -> _Types:
    heads, key_dim, value_dim = case.num_kv_heads, case.head_dim, case.value_head_dim
    return {
        "query": (case.activation, ["T", case.num_q_heads, key_dim]),
        "key": (case.activation, ["T", heads, key_dim]),
        "value": (case.activation, ["T", heads, value_dim]),
        "key_pool": (case.kv, ["num_pages", heads, PAGE, key_dim]),
        "value_pool": (case.kv, ["num_pages", heads, PAGE, value_dim]),
        "page_table": (DType.INT32, ["N", "M"]),
        "query_start_offsets": (DType.INT32, ["N_plus_1"]),
        "past_lens": (DType.INT32, ["N"]),
        "rope_cos_sin": (DType.FLOAT32, ["max_positions", 2, "half_rotary_dim"]),
        "kv_scales": (DType.FLOAT32, [2, heads]),
        "sinks": (DType.FLOAT32, [case.num_q_heads]),
    }


def _output_types(case: Case) -> _Types:
    inputs = _input_types(case)
    return {
        "output": (case.activation, ["T", case.num_q_heads, case.value_head_dim]),
        "key_pool_out": inputs["key_pool"],
        "value_pool_out": inputs["value_pool"],
    }


def make_session(model: onnx.ModelProto) -> onnxruntime.InferenceSession:
    """An onnxruntime session on the CPU."""
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    return onnxruntime.InferenceSession(
        model.SerializeToString(), options, providers=["CPUExecutionProvider"]
    )


@functools.lru_cache(maxsize=256)
def _session_of_model(serialized: bytes) -> onnxruntime.InferenceSession:
    return make_session(onnx.load_model_from_string(serialized))


def run_model(model: onnx.ModelProto, inputs: Mapping[str, Array]) -> tuple[Array, Array, Array]:
    """Outputs of `model`; types that NumPy lacks travel as their bytes."""
    session = _session_of_model(model.SerializeToString(deterministic=True))
    feeds = {name: to_ort_value(array) for name, array in inputs.items()}
    wanted = {value.name for value in session.get_inputs()}
    names = [value.name for value in session.get_outputs()]
    results = session.run_with_ort_values(names, {name: feeds[name] for name in wanted})
    output, key_pool, value_pool = (from_ort_value(result) for result in results)
    return output, key_pool, value_pool


def to_ort_value(array: Array) -> Any:
    """`array` for onnxruntime."""
    for dtype, carrier in ((DType.BFLOAT16, np.uint16), (DType.FLOAT8, np.uint8)):
        if array.dtype == dtype.numpy:
            return onnxruntime.OrtValue.ortvalue_from_numpy_with_onnx_type(
                np.ascontiguousarray(array).view(carrier), dtype.onnx
            )
    return onnxruntime.OrtValue.ortvalue_from_numpy(np.ascontiguousarray(array))


def from_ort_value(value: Any) -> Array:
    """An onnxruntime tensor as an array of its own type; onnxruntime refuses bfloat16."""
    for dtype, name in ((DType.BFLOAT16, "bfloat16"), (DType.FLOAT8, "float8e4m3fn")):
        if value.data_type() == f"tensor({name})":
            shape = value.shape()
            data = ctypes.string_at(value.data_ptr(), math.prod(shape) * dtype.itemsize)
            return np.frombuffer(data, dtype.numpy).reshape(shape)
    array: Array = value.numpy()
    return array


def run_reference(case: Case, inputs: Mapping[str, Array]) -> tuple[Array, Array, Array]:
    """Outputs of the reference function."""
    return run_model(make_model(case), inputs)


def assert_output_close(actual: Array, expected: npt.NDArray[np.float64], dtype: DType) -> None:
    """Compare by the tolerance rule above."""
    numbers = actual.astype(np.float64)
    assert np.isfinite(numbers).all()
    largest = np.abs(expected).max(initial=0.0)
    allowed = OUTPUT_ROUNDING[dtype] * np.abs(expected) + FLOAT32_ERROR * largest
    excess = np.abs(numbers - expected) - allowed - SMALLEST_HALF_STEP
    assert excess.max(initial=-1.0) <= 0, f"over the tolerance by {excess.max()}"


def assert_same_bytes(actual: Array, expected: Array) -> None:
    """Compare bit for bit, NaN included."""
    assert actual.dtype == expected.dtype
    np.testing.assert_array_equal(_bytes(actual), _bytes(expected))


def _bytes(array: Array) -> npt.NDArray[np.uint8]:
    return np.ascontiguousarray(array).view(np.uint8)


def check(case: Case, inputs: Mapping[str, Array] | None = None) -> Array:
    """Run the reference and NumPy, compare all three outputs, return the output."""
    inputs = make_inputs(case) if inputs is None else inputs
    expected = numpy_attention.paged_attention(inputs, case.settings)
    return compare(case, run_reference(case, inputs), expected)


def compare(
    case: Case,
    actual: tuple[Array, Array, Array],
    expected: tuple[npt.NDArray[np.float64], Array, Array],
) -> Array:
    """Compare the three outputs of a step and return the first of `actual`."""
    assert actual[0].dtype == case.activation.numpy
    assert_output_close(actual[0], expected[0], case.activation)
    assert_same_bytes(actual[1], expected[1])
    assert_same_bytes(actual[2], expected[2])
    return actual[0]

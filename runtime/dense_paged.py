"""A model that already holds PagedAttention nodes, decoded in onnxruntime as a reference.

One sequence on identity pages (page i of the table is page i of the pool), with none of the
runtime's registry, page tables or scheduler.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx

from paged_trt.plugins.dtypes import DType
from paged_trt.plugins.errors import SequenceError, UnsupportedError
from paged_trt.plugins.fields import OP_DOMAIN, OP_TYPE
from paged_trt.plugins.kv import UNUSED_PAGE_ENTRY, pages_for_tokens
from paged_trt.plugins.kv_scales import read_scales_file
from paged_trt.plugins.manifest import KV_SCALES_FILE
from paged_trt.plugins.operands import ALIASES, Operand
from paged_trt.plugins.reference import paged_attention_function
from paged_trt.plugins.tensors import INPUT_IDS, LOGITS, POSITION_IDS
from paged_trt.runtime.dense import run

Array = npt.NDArray[Any]
Pool = tuple[str, tuple[int, ...], DType]
"""Output that holds a pool after the step, shape and element type."""

_REMEDY = "pass the dense model that the engine was built from instead"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PagedSignature:
    """Names of the inputs and outputs of a paged model.

    Attributes:
        page_table: `[num_seqs, table_width]` int32.
        query_start_offsets: `[num_seqs + 1]` int32.
        past_lens: `[num_seqs]` int32.
        pools: pool input -> (pool output, shape, dtype); a page count of 0 is a free one.
        scales: inputs of per-head scales, `[2, num_kv_heads]` float32.
        reads_position_ids: whether the model has `position_ids`.
    """

    page_table: str
    query_start_offsets: str
    past_lens: str
    pools: dict[str, Pool]
    scales: tuple[str, ...]
    reads_position_ids: bool


def paged_nodes(model: onnx.ModelProto) -> list[onnx.NodeProto]:
    """The PagedAttention nodes of a model; empty for a dense one."""
    return [
        node for node in model.graph.node if (node.domain, node.op_type) == (OP_DOMAIN, OP_TYPE)
    ]


def read_paged_signature(model: onnx.ModelProto) -> PagedSignature:
    """Find the step inputs and pools of a paged model from its nodes.

    Raises:
        UnsupportedError: a pool is no input of a fixed shape, or an input has no known meaning.
    """
    inputs = {value.name: value.type.tensor_type for value in model.graph.input}
    nodes = paged_nodes(model)
    pools = {name: pool for node in nodes for name, pool in _node_pools(node, inputs).items()}
    first = nodes[0].input
    scales = tuple(
        node.input[Operand.KV_SCALES] for node in nodes if node.input[Operand.KV_SCALES] in inputs
    )
    known = {INPUT_IDS, POSITION_IDS, *pools, *scales}
    known |= {
        first[Operand.PAGE_TABLE],
        first[Operand.QUERY_START_OFFSETS],
        first[Operand.PAST_LENS],
    }
    for name in inputs:
        if name not in known:
            raise UnsupportedError(
                f"compare does not know what to feed to input `{name}` of a paged model; {_REMEDY}"
            )
    return PagedSignature(
        page_table=first[Operand.PAGE_TABLE],
        query_start_offsets=first[Operand.QUERY_START_OFFSETS],
        past_lens=first[Operand.PAST_LENS],
        pools=pools,
        scales=scales,
        reads_position_ids=POSITION_IDS in inputs,
    )


def _node_pools(
    node: onnx.NodeProto, inputs: Mapping[str, onnx.TypeProto.Tensor]
) -> dict[str, Pool]:
    pools = {}
    for target, source in ALIASES.items():
        name = node.input[source]
        dims = [dim.dim_value for dim in inputs[name].shape.dim] if name in inputs else []
        if len(dims) != 4 or not all(dims[1:]):
            raise UnsupportedError(
                f"pool `{name}` of `{node.name}` must be an input of 4 dims, all fixed but the "
                f"pages, found {dims}; {_REMEDY}"
            )
        dtype = DType.from_onnx(inputs[name].elem_type)
        pools[name] = (node.output[target], tuple(dims), dtype)
    return pools


def add_missing_functions(model: onnx.ModelProto) -> bool:
    """Give PagedAttention nodes whose function the model lacks the project's own.

    Returns:
        Whether the model was changed.
    """
    present = {(each.domain, each.name, each.overload) for each in model.functions}
    inputs = {value.name: value.type.tensor_type.elem_type for value in model.graph.input}
    changed = False
    for node in paged_nodes(model):
        if (OP_DOMAIN, OP_TYPE, node.overload) in present:
            continue
        function = paged_attention_function(DType.from_onnx(inputs[node.input[Operand.KEY_POOL]]))
        node.overload = function.overload
        if (OP_DOMAIN, OP_TYPE, node.overload) not in present:
            model.functions.append(function)
            present.add((OP_DOMAIN, OP_TYPE, node.overload))
        changed = True
    return changed


def load_scales(folder: Path, signature: PagedSignature) -> dict[str, Array]:
    """Scales of a quantised pool, from the file beside the model.

    Raises:
        ConfigError: the file is damaged.
        UnsupportedError: the model needs scales and the file does not hold them.
    """
    if not signature.scales:
        return {}
    path = folder / KV_SCALES_FILE
    scales = read_scales_file(path) if path.is_file() else {}
    for name in signature.scales:
        if name not in scales:
            raise UnsupportedError(
                f"the model needs the scales `{name}` and {path} does not hold them; {_REMEDY}"
            )
    return {name: scales[name] for name in signature.scales}


class IdentityPagesDecoder:
    """A decoder of one sequence whose pages are the first of the pool, in order.

    Args:
        session: onnxruntime session of the paged model.
        signature: what its inputs and outputs mean.
        scales: scales input -> `[2, num_kv_heads]` float32.
        notes: what a report must say about it.
    """

    def __init__(
        self,
        session: Any,
        signature: PagedSignature,
        *,
        scales: dict[str, Array],
        notes: tuple[str, ...] = (),
    ) -> None:
        self._session = session
        self._signature = signature
        self._scales = scales
        self._notes = (*notes, "the model holds PagedAttention nodes: run on identity pages")
        self._past_len = 0
        self._pools: dict[str, Any] = {}

    @property
    def notes(self) -> tuple[str, ...]:
        """What a report must say about this decoder."""
        return self._notes

    def start(self, max_tokens: int) -> None:
        """Forget the sequence; the pools are zero again.

        Raises:
            SequenceError: the pools of the model are too small.
        """
        width = pages_for_tokens(max_tokens)
        self._past_len = 0
        self._pools = {}
        for name, (_, (fixed, *tile), dtype) in self._signature.pools.items():
            if 0 < fixed < width:
                raise SequenceError(
                    f"{max_tokens} tokens need {width} pages and the pool `{name}` of the model "
                    f"has {fixed}; lower `--prompt-lens` or `--new-tokens`"
                )
            self._pools[name] = _zeros((fixed or width, *tile), dtype)

    def step(self, token_ids: Array) -> Array:
        """Append tokens `[num_tokens]` int64; the logits `[vocab_size]` of the last one."""
        names = [output for output, _, _ in self._signature.pools.values()]
        run_values = self._session.run_with_ort_values
        logits, *pools = run(run_values, [LOGITS, *names], self._feeds(token_ids))
        self._pools = dict(zip(self._signature.pools, pools, strict=True))
        self._past_len += len(token_ids)
        rows = logits.numpy()
        return np.asarray(rows.reshape(-1, rows.shape[-1])[-1])

    def _feeds(self, token_ids: Array) -> dict[str, Any]:
        signature = self._signature
        total = self._past_len + len(token_ids)
        step_inputs = {
            signature.page_table: _page_table(total),
            signature.query_start_offsets: np.array([0, len(token_ids)], np.int32),
            signature.past_lens: np.array([self._past_len], np.int32),
            INPUT_IDS: token_ids[None],
            **self._scales,
        }
        if signature.reads_position_ids:
            step_inputs[POSITION_IDS] = np.arange(self._past_len, total)[None]
        return {**{name: _value(each) for name, each in step_inputs.items()}, **self._pools}


def _page_table(num_tokens: int) -> Array:
    width = pages_for_tokens(num_tokens)
    # One column more than is used: an unused entry must not matter.
    table = np.full((1, width + 1), UNUSED_PAGE_ENTRY, np.int32)
    table[0, :width] = np.arange(width)
    return table


def _value(array: Array) -> Any:
    import onnxruntime

    return onnxruntime.OrtValue.ortvalue_from_numpy(np.ascontiguousarray(array))


def _zeros(shape: tuple[int, ...], dtype: DType) -> Any:
    # Raw bytes: onnxruntime takes no NumPy array of bfloat16 or float8.
    import onnxruntime

    raw = np.zeros(shape, f"u{dtype.itemsize}")
    return onnxruntime.OrtValue.ortvalue_from_numpy_with_onnx_type(raw, dtype.onnx)

"""What reads the KV cache, its length or the padding mask outside attention.

Values are followed from those inputs forward, as far as they reach the logits or the operands
of attention. Each of them has to turn into something that a paged step has (see `lengths`).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final

import onnx_ir as ir

from paged_trt.builder.onnx.facts import IndexKind, IndexValue, LayerMatch
from paged_trt.builder.onnx.graph import EXPORT_COMMAND, node_name, value_name
from paged_trt.builder.onnx.lengths import recognise
from paged_trt.builder.onnx.probe import ATTENTION_MASK, Probe
from paged_trt.plugins.errors import OnnxRewriteError

_MIXES_TOKENS: Final = frozenset(
    {"Conv", "ConvTranspose", "AveragePool", "MaxPool", "GlobalAveragePool", "GlobalMaxPool"}
    | {"LSTM", "GRU", "RNN", "CumSum", "Scan", "Loop", "If", "LinearAttention"}
    | {"CausalConvWithState"}
)
"""Operators that work along the tokens, which belong to several sequences in a paged step."""
_REDUCES: Final = frozenset({"ReduceMax", "ReduceMin", "ReduceSum", "ReduceMean", "ArgMax"})


def live_values(
    matches: Sequence[LayerMatch], logits: ir.Value, index_values: Iterable[IndexValue]
) -> set[ir.Value]:
    """Values that still matter once attention is replaced.

    Args:
        matches: the layers.
        logits: the model's result.
        index_values: values that are replaced, so that nothing behind them matters.
    """
    replaced = {found.value for found in index_values}
    outputs = {found.node.outputs[0]: found for found in matches}
    live: set[ir.Value] = set()
    stack = [logits]
    for found in matches:
        stack += [found.query, found.key, found.value]
    while stack:
        value = stack.pop()
        if value in live or value in replaced:
            continue
        live.add(value)
        if value in outputs:
            continue
        node = value.producer()
        if node is not None:
            stack += [each for each in node.inputs if each is not None]
    return live


def find_index_values(
    model: ir.Model, probe: Probe, *, matches: Sequence[LayerMatch], logits: ir.Value
) -> tuple[IndexValue, ...]:
    """Recognise all values that have to be replaced.

    Raises:
        OnnxRewriteError: a node uses the cache, its length or the mask in a way that a paged
            step cannot serve, or works along the tokens of a step.
    """
    live = live_values(matches, logits, ())
    attention = {found.node for found in matches}
    tainted = {present for found in matches for present in found.presents}
    tainted |= {cache for found in matches for cache in found.caches}
    tainted |= {each for each in model.graph.inputs if each.name == ATTENTION_MASK}
    results: list[IndexValue] = []
    for node in model.graph:
        if node in attention or not live.intersection(node.outputs):
            continue
        read = [each for each in node.inputs if each is not None and each in tainted]
        _check_mixing(node, probe)
        if not read:
            continue
        for output in node.outputs:
            if not probe.depends_on_lengths_only(output):
                raise _read_outside_attention(node, read[0])
            found = recognise(probe, output)
            if found is None:
                tainted.add(output)
            else:
                results.append(found)
    if logits in tainted:
        raise _read_outside_attention(logits.producer(), logits)
    return tuple(results)


def _read_outside_attention(node: ir.Node | None, read: ir.Value) -> OnnxRewriteError:
    return OnnxRewriteError(
        value_name(read) if node is None else node_name(node),
        f"it reads `{value_name(read)}`, so the KV cache, its length or the padding mask, outside "
        "attention, in a way that sequences of different lengths in one step do not have",
        "export a model that takes `position_ids` and reads the cache in attention only",
    )


def _is_spelt_out_attention(node: ir.Node, probe: Probe) -> bool:
    """Whether `node` is the second product of attention in primitive nodes."""
    if node.op_type != "MatMul" or any(
        value is None or probe.depends_on_lengths_only(value) for value in node.inputs
    ):
        return False
    value = node.inputs[0]
    while value is not None and (producer := value.producer()) is not None:
        if producer.op_type == "Softmax":
            return True
        if producer.op_type not in {"Cast", "Identity", "Dropout", "Where"}:
            return False
        value = producer.inputs[1 if producer.op_type == "Where" else 0]
    return False


def _check_mixing(node: ir.Node, probe: Probe) -> None:
    output = node.outputs[0]
    is_index = probe.depends_on_lengths_only(output)
    mixes = node.op_type in _MIXES_TOKENS and not is_index
    if node.op_type in _REDUCES and is_index:
        # A constant or a count of tokens is no matter; the largest position of a step is.
        found = recognise(probe, output)
        mixes = found is None or found.kind is IndexKind.POSITIONS
    if _is_spelt_out_attention(node, probe):
        raise OnnxRewriteError(
            node_name(node),
            "it weighs tokens by a Softmax: this attention is spelt out, and has no KV cache here",
            EXPORT_COMMAND,
        )
    if mixes:
        raise OnnxRewriteError(
            node_name(node),
            f"{node.op_type} works along the tokens of a step, which belong to several sequences "
            "in a paged step",
            "use a model whose layers see other tokens through attention only",
        )

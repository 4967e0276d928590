"""Finds out what a model is: its dialect, its layers, and what else reads the KV cache.

A survey changes nothing. Everything that would be lost in the rewrite is refused here, by the
name of the node.
"""

from __future__ import annotations

from collections.abc import Sequence

import onnx_ir as ir

from paged_trt.builder.onnx import paged
from paged_trt.builder.onnx.dialects import attention_nodes, match_layer
from paged_trt.builder.onnx.facts import (
    Dialect,
    IndexKind,
    IndexValue,
    LayerMatch,
    ModelFacts,
    PositionLimit,
)
from paged_trt.builder.onnx.graph import (
    node_name,
    require_static_dim,
    static_dim,
    value_name,
)
from paged_trt.builder.onnx.leftovers import find_index_values, live_values
from paged_trt.builder.onnx.position_tables import find_position_tables
from paged_trt.builder.onnx.probe import ATTENTION_MASK, Probe
from paged_trt.builder.onnx.token_rows import require_token_rows
from paged_trt.plugins.dtypes import DType
from paged_trt.plugins.errors import OnnxRewriteError
from paged_trt.plugins.tensors import INPUT_IDS, NUM_SEQS, POSITION_IDS


def survey(model: ir.Model) -> ModelFacts:
    """Survey a model as `load_model` gives it.

    Args:
        model: the model; it is not changed, and the facts point into it.

    Raises:
        OnnxRewriteError: the model cannot become a paged model without losing something.
        UnsupportedError: a mask has to be proved and onnxruntime is not installed.
    """
    dialect, nodes, match = attention_nodes(model)
    _check_axes(model)
    probe = make_probe(model)
    matches: list[LayerMatch] = []
    limits: list[PositionLimit] = []
    for node in nodes:
        found, found_limits = match_layer(node, match, probe)
        matches.append(found)
        limits.extend(found_limits)
    _check_caches(matches)
    _check_inputs(model, matches)
    logits = _logits(model, matches)
    vocab_size, last_only = _logits_dims(
        logits, has_batch_axis=all(found.has_batch_axis for found in matches)
    )
    index_values = find_index_values(model, probe, matches=matches, logits=logits)
    live = live_values(matches, logits, index_values)
    if dialect is not Dialect.PAGED_ATTENTION:
        # A model of PagedAttention nodes is ragged already and may gather rows of sequences.
        require_token_rows(
            model, probe, matches=matches, index_values=index_values, live=live, logits=logits
        )
    limits.extend(find_position_tables(model, probe, live))
    return ModelFacts(
        dialect=dialect,
        layers=tuple(found.attention for found in matches),
        activation_dtype=_activation_dtype(matches),
        kv_cache_dtype=_kv_cache_dtype(matches),
        vocab_size=vocab_size,
        logits_dtype=_dtype(logits, "the logits"),
        reads_position_ids=_reads_position_ids(live, index_values),
        position_limits=tuple(dict.fromkeys(limits)),
        last_tokens_only=last_only,
        matches=tuple(matches),
        index_values=index_values,
        logits=logits,
    )


def make_probe(model: ir.Model) -> Probe:
    """What evaluates the index arithmetic of `model`."""
    return Probe(model, _cache_inputs(model))


def _cache_inputs(model: ir.Model) -> list[ir.Value]:
    return [each for each in model.graph.inputs if each.shape is not None and len(each.shape) == 4]


def _check_caches(matches: Sequence[LayerMatch]) -> None:
    owners: dict[ir.Value, ir.Node] = {}
    for found in matches:
        for cache in found.caches:
            if cache in owners:
                raise OnnxRewriteError(
                    node_name(found.node),
                    f"it reads the cache `{value_name(cache)}` of "
                    f"`{node_name(owners[cache])}`, and layers that share a cache are not "
                    "supported",
                    "use a model in which each layer has a cache of its own",
                )
            owners[cache] = found.node
            if not found.has_batch_axis:
                continue
            heads = require_static_dim(cache, 1, node=found.node)
            if heads != found.attention.num_kv_heads:
                raise OnnxRewriteError(
                    node_name(found.node),
                    f"its cache `{value_name(cache)}` has {heads} heads and its keys have "
                    f"{found.attention.num_kv_heads}",
                    "export key and value caches with one number of heads",
                )


def _check_axes(model: ir.Model) -> None:
    """Refuse token ids of a fixed number: a step holds any number, of any number of sequences."""
    ids = next((each for each in model.graph.inputs if each.name == INPUT_IDS), None)
    dims = [] if ids is None or ids.shape is None else list(ids.shape)
    # An engine step is a batch of one, so that a batch fixed at 1 is as good as an open one.
    open_dims = dims[1:] if dims[:1] == [1] else dims
    if any(isinstance(dim, int) for dim in open_dims):
        raise OnnxRewriteError(
            INPUT_IDS,
            f"its shape is [{', '.join(map(str, dims))}], and a step holds any number of tokens "
            "of any number of sequences",
            "export with the batch and token axes dynamic (`dynamic_shapes` of torch.onnx.export)",
        )


def _check_inputs(model: ir.Model, matches: Sequence[LayerMatch]) -> None:
    known = {INPUT_IDS, ATTENTION_MASK, POSITION_IDS, *paged.STEP_INPUTS}
    caches = {each for found in matches for each in (*found.caches, *found.step_inputs)}
    scales = {found.node.inputs[9] for found in matches if paged.is_match(found.node)}
    for graph_input in model.graph.inputs:
        is_known = (
            graph_input.name in known
            or graph_input in caches
            or graph_input in scales
            or graph_input.is_initializer()
        )
        if not is_known and graph_input.uses():
            raise OnnxRewriteError(
                value_name(graph_input),
                "this graph input is neither tokens, mask, positions nor a layer's KV cache",
                "export a text decoder whose only state is the KV cache of its attention nodes",
            )
    tokens = next((each for each in model.graph.inputs if each.name == INPUT_IDS), None)
    if tokens is None or not tokens.uses():
        raise OnnxRewriteError(
            INPUT_IDS, "the model does not read this input", "export with token ids as input"
        )
    for each in model.graph.inputs:
        if each.name in {INPUT_IDS, POSITION_IDS} and each.dtype is not ir.DataType.INT64:
            raise OnnxRewriteError(
                value_name(each), f"its type is {each.dtype}, not INT64", "export with int64 ids"
            )


def _logits(model: ir.Model, matches: Sequence[LayerMatch]) -> ir.Value:
    presents = {present for found in matches for present in found.presents}
    others = [each for each in model.graph.outputs if _without_identity(each) not in presents]
    if len(others) == 1:
        return others[0]
    names = ", ".join(f"`{value_name(each)}`" for each in others) or "none"
    raise OnnxRewriteError(
        model.graph.name or "model",
        f"besides the caches there has to be one output, the logits, and there are: {names}",
        "export without hidden states, attentions and other outputs",
    )


def _without_identity(value: ir.Value) -> ir.Value:
    while (producer := value.producer()) is not None and producer.op_type == "Identity":
        source = producer.inputs[0]
        if source is None:
            break
        value = source
    return value


def _logits_dims(logits: ir.Value, *, has_batch_axis: bool) -> tuple[int, bool]:
    """Vocabulary size, and whether there is one row per sequence."""
    shape = logits.shape
    vocab_size = static_dim(logits, -1)
    rank = 0 if shape is None else len(shape)
    last_only = rank == 2 and shape is not None and shape[0] == ir.SymbolicDim(NUM_SEQS)
    token_axis = int(has_batch_axis)
    keeps_tokens = rank == token_axis + 2 and static_dim(logits, token_axis) is None
    if vocab_size is None or not (last_only or keeps_tokens):
        raise OnnxRewriteError(
            value_name(logits),
            f"its shape is {shape}, not [batch, tokens, vocabulary]",
            "export logits of all tokens (without `logits_to_keep`), with the size of the "
            "vocabulary as a number; the engine keeps those of last tokens by itself",
        )
    return vocab_size, last_only


def _dtype(value: ir.Value, what: str) -> DType:
    try:
        return DType.from_onnx(0 if value.dtype is None else value.dtype.value)
    except KeyError:
        raise OnnxRewriteError(
            value_name(value),
            f"{what} have the type {value.dtype}",
            "export a float16, bfloat16 or float32 model",
        ) from None


def _activation_dtype(matches: Sequence[LayerMatch]) -> DType:
    types = {}
    for found in matches:
        # The pool of a paged node may be quantised: its query has the type then.
        has_type = paged.is_match(found.node) and found.query.dtype is not None
        source = found.query if has_type else found.caches[0]
        types[_dtype(source, "keys and values")] = found.node
    if len(types) > 1:
        names = " and ".join(sorted(each.value for each in types))
        raise OnnxRewriteError(
            node_name(list(types.values())[-1]),
            f"the layers' types differ: {names}",
            "export all layers in one type",
        )
    return next(iter(types))


def _kv_cache_dtype(matches: Sequence[LayerMatch]) -> DType:
    pools = {_dtype(cache, "pools or caches") for found in matches for cache in found.caches}
    if len(pools) > 1:
        names = " and ".join(sorted(each.value for each in pools))
        raise OnnxRewriteError(
            node_name(matches[-1].node), f"the caches' types differ: {names}", "use one type"
        )
    return next(iter(pools))


def _reads_position_ids(live: set[ir.Value], index_values: Sequence[IndexValue]) -> bool:
    # Positions that the model counts itself are read from `position_ids` afterwards.
    return any(value.is_graph_input() and value.name == POSITION_IDS for value in live) or any(
        found.kind is IndexKind.POSITIONS for found in index_values
    )

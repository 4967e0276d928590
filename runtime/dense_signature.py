"""Which inputs and outputs of an ordinary exporter's model are tokens, caches and logits.

Exporters agree on little but `input_ids` and `logits`: caches are found by their shape and
paired with their outputs by the node that extends them, then by name, then by order.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Final

import onnx

from paged_trt.plugins.dtypes import DType
from paged_trt.plugins.errors import ConfigError, UnsupportedError
from paged_trt.plugins.path_hints import not_a_model
from paged_trt.runtime.dense_ports import Port, complete_caches, length_roles

# Operator -> (input, output) positions of the caches that it extends.
_CACHE_PORTS: Final[dict[str, tuple[tuple[int, int], ...]]] = {
    "Attention": ((4, 1), (5, 2)),
    "GroupQueryAttention": ((3, 1), (4, 2)),
    "TensorScatter": ((0, 0),),
}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class CachePort:
    """One cache: the input that carries the past and the output that carries past and new.

    Attributes:
        past: name of the input, `[batch, ..., past, ...]`.
        present: name of the output, same axes, past and new tokens.
        dtype: element type.
        empty_shape: shape of the cache of one sequence that holds no token.
        is_fixed: it has room for the whole sequence from the start; a 0 in `empty_shape` is an
            open length.
    """

    past: str
    present: str
    dtype: DType
    empty_shape: tuple[int, ...]
    is_fixed: bool = False


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class DenseSignature:
    """Interface of a dense decoder; `None` where the model has no such input."""

    input_ids: str
    attention_mask: str | None
    position_ids: str | None
    past_lens: str | None
    total_lens: str | None
    caches: tuple[CachePort, ...]
    logits: str
    integer_dtypes: dict[str, DType]


def load_graph(path: Path) -> onnx.ModelProto:
    """The model without its external data.

    Raises:
        ConfigError: the file is missing or no ONNX model.
    """
    try:
        model = onnx.load(path, load_external_data=False)
    except OSError as error:
        reason = (
            not_a_model(path) if not path.is_file() else f"cannot read {path}: {error.strerror}"
        )
        raise ConfigError(reason) from error
    except Exception as error:  # protobuf's DecodeError has no stable import path
        raise ConfigError(f"{path} is no ONNX model: {error}") from error
    if not model.graph.node:
        raise ConfigError(f"{path} is no ONNX model or an empty one: it has 0 nodes")
    return model


def read_signature(model: onnx.ModelProto) -> DenseSignature:
    """Find tokens, caches and logits of a decoder.

    Args:
        model: the un-rewritten model, external data not needed.

    Raises:
        UnsupportedError: an input or output has no known meaning, or the caches do not pair.
    """
    constants = {tensor.name for tensor in model.graph.initializer}
    inputs = [_port(value) for value in model.graph.input if value.name not in constants]
    outputs = [_port(value) for value in model.graph.output]
    pasts = complete_caches(model.graph, [port for port in inputs if _is_cache(port)])
    plain = [port for port in inputs if not _is_cache(port)]
    roles = _plain_roles(plain, length_roles(model.graph))
    presents = [port for port in outputs if port.is_float and len(port.dims) == 4]
    return DenseSignature(
        input_ids=roles["input_ids"].name,
        attention_mask=roles["mask"].name if "mask" in roles else None,
        position_ids=roles["position"].name if "position" in roles else None,
        past_lens=roles["past_lens"].name if "past_lens" in roles else None,
        total_lens=roles["total_lens"].name if "total_lens" in roles else None,
        caches=_pair_caches(model.graph, pasts, presents),
        logits=_logits(outputs, presents),
        integer_dtypes={port.name: _known_dtype(port) for port in plain},
    )


def _port(value: onnx.ValueInfoProto) -> Port:
    tensor = value.type.tensor_type
    try:
        dtype = DType.from_onnx(tensor.elem_type)
    except KeyError:
        dtype = None
    dims = tuple(
        int(dim.dim_value) if dim.HasField("dim_value") else None for dim in tensor.shape.dim
    )
    return Port(value.name, dtype, dims)


def _is_cache(port: Port) -> bool:
    return port.is_float and len(port.dims) == 4 and "mask" not in port.name


def _known_dtype(port: Port) -> DType:
    if port.dtype is None:
        raise UnsupportedError(
            f"input `{port.name}` has an element type that compare cannot feed; "
            "export it as int64 or int32"
        )
    return port.dtype


def _plain_roles(ports: list[Port], lengths: Mapping[str, str]) -> dict[str, Port]:
    roles: dict[str, Port] = {}
    for port in ports:
        names = ("mask", "position", "input_ids")
        key = lengths.get(port.name) or next((key for key in names if key in port.name), None)
        if key is None or key in roles or port.is_float or len(port.dims) > 2:
            raise UnsupportedError(
                f"compare does not know what to feed to input `{port.name}` of "
                f"{len(port.dims)} dims; it knows `input_ids`, a 2-D `attention_mask`, "
                "`position_ids` and 4-D caches: export the model with those"
            )
        roles[key] = port
    if "input_ids" not in roles:
        raise UnsupportedError(
            f"the model has no input `input_ids`, found {[port.name for port in ports]}; "
            "export a decoder that reads token ids"
        )
    return roles


def _logits(outputs: list[Port], presents: list[Port]) -> str:
    rest = [port for port in outputs if port not in presents]
    named = [port for port in rest if port.name == "logits"] or rest
    if len(named) != 1 or not named[0].is_float:
        raise UnsupportedError(
            f"the model must have one output of logits, found {[port.name for port in rest]}; "
            "name it `logits`"
        )
    return named[0].name


def _pair_caches(
    graph: onnx.GraphProto, pasts: list[Port], presents: list[Port]
) -> tuple[CachePort, ...]:
    if not pasts or len(pasts) != len(presents):
        raise UnsupportedError(
            f"the model has {len(pasts)} cache inputs (4-D floats) and {len(presents)} cache "
            "outputs; export it with a KV cache, one `present` for each `past`"
        )
    names = [port.name for port in pasts]
    outputs = [port.name for port in presents]
    pairs = _by_producer(graph, names, outputs) or _by_name(names, outputs)
    pairs = pairs or dict(zip(names, outputs, strict=True))
    by_name = {port.name: port for port in presents}
    for past in pasts:
        present = by_name[pairs[past.name]]
        if past.dtype is not present.dtype:
            raise UnsupportedError(
                f"cache input `{past.name}` is {past.dtype} and its output `{present.name}` is "
                f"{present.dtype}; compare cannot feed one to the other"
            )
    return tuple(
        CachePort(
            past=port.name,
            present=pairs[port.name],
            dtype=_known_dtype(port),
            empty_shape=_empty_shape(port),
            is_fixed=port.is_fixed,
        )
        for port in pasts
    )


def _empty_shape(port: Port) -> tuple[int, ...]:
    free = [axis for axis, dim in enumerate(port.dims) if axis > 0 and dim is None]
    allowed = {0, 1} if port.is_fixed else {0} if port.is_window else {1}
    if len(free) not in allowed or port.dims[0] not in (None, 1):
        raise UnsupportedError(
            f"cache input `{port.name}` must have a batch of 1 or a free one and one free axis, "
            f"the past; found {list(port.dims)}: export it with a dynamic past length"
        )
    return (1, *(0 if dim is None else dim for dim in port.dims[1:]))


def _by_producer(
    graph: onnx.GraphProto, pasts: list[str], presents: list[str]
) -> dict[str, str] | None:
    """Pairs by the node that extends the cache; None unless it settles every pair."""
    pairs: dict[str, str] = {}
    for node in graph.node:
        ports = _CACHE_PORTS.get(node.op_type, ())
        if node.op_type == "Concat":
            ports = tuple((index, 0) for index in range(len(node.input)))
        for source, target in ports:
            if source < len(node.input) and target < len(node.output):
                past, present = node.input[source], node.output[target]
                if past in pasts and present in presents:
                    pairs[past] = present
    return _complete(pairs, pasts)


def _by_name(pasts: list[str], presents: list[str]) -> dict[str, str] | None:
    """Pairs by layer number and key or value; None unless it settles every pair."""
    targets = {_name_key(name): name for name in presents}
    pairs = {name: targets[_name_key(name)] for name in pasts if _name_key(name) in targets}
    return _complete(pairs, pasts)


def _name_key(name: str) -> tuple[tuple[str, ...], str]:
    # `past_key_values.0.value` holds both words: what follows the number decides.
    tail = re.split(r"\d+", name)[-1] or name
    kind = "value" if "value" in tail else "key" if "key" in tail else tail
    return tuple(re.findall(r"\d+", name)), kind


def _complete(pairs: dict[str, str], pasts: list[str]) -> dict[str, str] | None:
    return pairs if len(pairs) == len(set(pairs.values())) == len(pasts) else None

"""Takes over the attention of a transformers model, and reads all that it is told.

Attention goes through transformers' AttentionInterface: scale, window, softcap and sinks arrive as
numbers. What arrives and is not known is refused by name.
"""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

from paged_trt.plugins.attention import FULL_WINDOW, AttentionSpec
from paged_trt.plugins.errors import PackageMissingError, UnsupportedError

IMPLEMENTATION: Final = "paged_trt"
"""Name under which transformers knows this attention."""
_EXAMPLE_TOKENS: Final = 5
_IGNORED: Final = frozenset(
    {"position_ids", "position_embeddings", "cache_position", "use_cache", "return_dict"}
    | {"output_attentions", "output_hidden_states", "output_router_logits", "logits_to_keep"}
)
"""Arguments that tell attention nothing: it has the positions of the step already."""
_LAYER_TYPES: Final = frozenset({"full_attention", "sliding_attention"})


@dataclasses.dataclass(frozen=True, slots=True)
class Layer:
    """What a layer says to its attention.

    Attributes:
        attention: heads, sizes, scale, window and softcap.
        sinks: `[num_q_heads]` float32 tensor, or None.
    """

    attention: AttentionSpec
    sinks: Any


@dataclasses.dataclass(slots=True)
class State:
    """What the attention function and the module that is exported share.

    Attributes:
        layers: what the first run recorded, by layer.
        call: emits the node of a layer while the second run is exported.
    """

    layers: list[Layer] = dataclasses.field(default_factory=list)
    call: Any = None


def package(name: str) -> Any:
    """A package that only an export needs.

    Raises:
        UnsupportedError: it is not installed.
    """
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise PackageMissingError(
            f"a direct export needs {error.name or name}, which is not installed; run "
            '`pip install "paged-trt[export]"`'
        ) from error


@contextmanager
def attention_of(model: Any, state: State) -> Iterator[None]:
    """Let `model` attend through `state`, as long as the context lasts.

    Args:
        model: a causal language model of transformers.
        state: records layers, or emits nodes where `state.call` is set.
    """
    interface = package("transformers").AttentionInterface

    def attend(
        module: Any, query: Any, key: Any, value: Any, attention_mask: Any, **options: Any
    ) -> tuple[Any, None]:
        # Without a mask function of this name, transformers makes no mask: the op is causal.
        if attention_mask is not None:
            raise UnsupportedError(
                f"{type(module).__name__} hands a mask of its own to attention; "
                "export a model whose attention is causal"
            )
        if state.call is not None:
            return state.call(module.layer_idx, query, key, value), None
        state.layers.append(_read_layer(module, query, key, value, options))
        shape = (query.shape[0], query.shape[2], query.shape[1], value.shape[3])
        return query.new_zeros(shape), None

    before = model.config._attn_implementation
    interface.register(IMPLEMENTATION, attend)
    try:
        model.set_attn_implementation(IMPLEMENTATION)
        yield
    finally:
        model.set_attn_implementation(before)


def record(model: Any, state: State) -> None:
    """Run `model` once under `attention_of`, and fill `state.layers`.

    Raises:
        UnsupportedError: a layer attends in another way, or says something that is not known.
    """
    torch = package("torch")
    tokens = torch.zeros(1, _EXAMPLE_TOKENS, dtype=torch.long)
    model(input_ids=tokens, position_ids=torch.arange(_EXAMPLE_TOKENS)[None], use_cache=False)
    wanted = model.config.num_hidden_layers
    if len(state.layers) != wanted:
        raise UnsupportedError(
            f"{len(state.layers)} of {wanted} layers of {type(model).__name__} attend through "
            "transformers' AttentionInterface; export another model, or export with "
            '`attn_implementation="sdpa"` and `torch.onnx.export(..., opset_version=23)`'
        )


def _read_layer(module: Any, query: Any, key: Any, value: Any, options: dict[str, Any]) -> Layer:
    """Everything that a layer says to its attention; operands are `[1, heads, T, size]`."""
    name = f"layer {module.layer_idx} of {type(module).__name__}"
    _refuse_options(module, name, options)
    scale = options.get("scaling")
    window = options.get("sliding_window")
    _check_layer_type(module, name, window)
    sinks = options.get("s_aux")
    attention = AttentionSpec(
        num_q_heads=query.shape[1],
        num_kv_heads=key.shape[1],
        head_dim=query.shape[3],
        value_head_dim=value.shape[3],
        softmax_scale=float(query.shape[3] ** -0.5 if scale is None else scale),
        window=FULL_WINDOW if window is None else int(window),
        softcap=float(options.get("softcap") or 0.0),
    )
    return Layer(attention, None if sinks is None else sinks.detach().float().reshape(-1))


def _refuse_options(module: Any, name: str, options: dict[str, Any]) -> None:
    handled = {"scaling", "sliding_window", "softcap", "s_aux", "dropout", "is_causal"}
    unknown = {
        key: value
        for key, value in options.items()
        if key not in handled | _IGNORED and value is not None
    }
    if options.get("is_causal", getattr(module, "is_causal", True)) is False:
        unknown["is_causal"] = False
    if options.get("dropout"):
        unknown["dropout"] = options["dropout"]
    if unknown:
        key = min(unknown)
        raise UnsupportedError(
            f"{name} hands `{key}` to its attention, which PagedAttention does not support; "
            "export a model without it"
        )


def _check_layer_type(module: Any, name: str, window: int | None) -> None:
    config = module.config
    if getattr(config, "num_kv_shared_layers", 0):
        raise UnsupportedError(
            f"{name} belongs to a model whose last {config.num_kv_shared_layers} layers read the "
            "cache of another layer; export a model in which each layer has a cache of its own"
        )
    types = getattr(config, "layer_types", None)
    kind = None if types is None else types[module.layer_idx]
    if kind is not None and kind not in _LAYER_TYPES:
        raise UnsupportedError(
            f"{name} is of type `{kind}`, and PagedAttention knows "
            f"{' and '.join(sorted(_LAYER_TYPES))}; export a model of those"
        )
    by_mask = getattr(config, "sliding_window", None) and getattr(
        config, "use_sliding_window", True
    )
    if window is None and (kind == "sliding_attention" or (kind is None and by_mask)):
        raise UnsupportedError(
            f"{name} has a window that it leaves to a mask; export with "
            '`attn_implementation="sdpa"` and `torch.onnx.export(..., opset_version=23)`'
        )

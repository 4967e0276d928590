"""Exports a model with `torch.onnx.export(dynamo=True)`, as its documentation shows it."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

from zoo import VOCAB

_PAST, _NEW = 5, 3
"""Past and new tokens of the example: unlike each other, and neither 0 nor 1."""


def export_torch(model: Any, path: Path, *, opset: int) -> None:
    """Write `path`, and its weights beside it.

    Args:
        model: a causal language model of transformers.
        path: the ONNX file; its folder exists.
        opset: ai.onnx opset of the export.
    """
    import torch

    names = [
        f"past_key_values.{layer}.{part}" for layer in range(_layers(model)) for part in _PARTS
    ]
    inputs = ["input_ids", "attention_mask", "position_ids"]
    presents = [name.replace("past_key_values", "present") for name in names]
    batch, new, past = (torch.export.Dim(name) for name in ("batch", "sequence", "past"))
    # The mask's length is past plus new; torch works that out.
    shapes = [{0: batch, 1: new}, {0: batch, 1: torch.export.Dim.AUTO}, {0: batch, 1: new}]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        program = torch.onnx.export(
            _with_flat_cache(model),
            _example(model, len(names)),
            input_names=[*inputs, *names],
            output_names=["logits", *presents],
            dynamic_shapes=(*shapes, tuple({0: batch, 2: past} for _ in names)),
            dynamo=True,
            opset_version=opset,
            verbose=False,
        )
    program.save(str(path), external_data=True)


_PARTS = ("key", "value")


def _layers(model: Any) -> int:
    return int(model.config.num_hidden_layers)


def _with_flat_cache(model: Any) -> Any:
    """The model with its cache as a flat list of tensors."""
    import torch
    from transformers import DynamicCache

    class WithFlatCache(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def forward(
            self, input_ids: Any, attention_mask: Any, position_ids: Any, *past: Any
        ) -> tuple[Any, ...]:
            cache = DynamicCache()
            for layer in range(len(past) // 2):
                cache.update(past[2 * layer], past[2 * layer + 1], layer)
            positions = {} if model.config.model_type == "bloom" else {"position_ids": position_ids}
            result = self.model(
                input_ids=input_ids,
                attention_mask=attention_mask,
                past_key_values=cache,
                use_cache=True,
                **positions,
            )
            present = [
                each
                for layer in result.past_key_values.layers
                for each in (layer.keys, layer.values)
            ]
            return (result.logits, *present)

    return WithFlatCache()


def _example(model: Any, num_caches: int) -> tuple[Any, ...]:
    import torch

    config, batch = model.config, 2
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    caches = tuple(
        torch.randn(batch, heads, _PAST, size, dtype=model.dtype) for _ in range(num_caches)
    )
    return (
        torch.randint(3, VOCAB, (batch, _NEW)),
        torch.ones(batch, _PAST + _NEW, dtype=torch.long),
        torch.arange(_PAST, _PAST + _NEW).expand(batch, _NEW).contiguous(),
        *caches,
    )

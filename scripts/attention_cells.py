"""Attention geometry as cells of a table."""

from __future__ import annotations

from typing import Final

from paged_trt.plugins.attention import AttentionSpec

ATTENTION_COLUMNS: Final = (
    "heads (query / KV)",
    "head dim (key / value)",
    "scale",
    "window",
    "softcap",
    "rope",
)


def attention_cells(layer: AttentionSpec) -> tuple[str, ...]:
    """One text per entry of ATTENTION_COLUMNS."""
    return (
        f"{layer.num_q_heads} / {layer.num_kv_heads}",
        f"{layer.head_dim} / {layer.value_head_dim}",
        f"{layer.softmax_scale:.6g}",
        "all keys" if layer.window < 0 else str(layer.window),
        str(layer.softcap or "off"),
        layer.rope.name.lower(),
    )

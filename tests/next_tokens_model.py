"""A model that chooses greedily as an engine does, and logits that put it to the test."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import onnx_ir as ir

from paged_trt.builder.onnx.next_tokens import emit_next_tokens
from paged_trt.plugins.dtypes import DType

VOCAB = 131
INF = float("inf")


def make_model(dtype: DType) -> onnx.ModelProto:
    """`logits` `[n, VOCAB]` in, `next_tokens` `[n]` out."""
    element = ir.DataType(dtype.onnx)
    value = ir.Value(name="logits", type=ir.TensorType(element), shape=ir.Shape(["n", VOCAB]))
    graph = ir.Graph([value], [], nodes=[], opset_imports={"": 23}, name="greedy")
    tokens = emit_next_tokens(graph, value, vocab_size=VOCAB, dtype=element)
    tokens.name = "next_tokens"
    graph.outputs.append(tokens)
    graph.sort()
    proto: onnx.ModelProto = ir.to_proto(ir.Model(graph, ir_version=10))
    return proto


def tied_rows() -> Any:
    """`[200, VOCAB]` float32, most rows with several largest logits; any type holds them."""
    random = np.random.default_rng(0)
    # Whole numbers of a narrow range: nearly every row has several largest logits.
    rows = random.integers(-3, 4, (200, VOCAB)).astype(np.float32)
    rows[:50, random.integers(0, VOCAB, 30)] = -INF
    rows[3, 7] = rows[3, 90] = INF
    rows[4, :] = -2
    assert (np.sum(rows == rows.max(1, keepdims=True), axis=1) > 1).mean() > 0.9
    return rows


def broken_rows() -> tuple[Any, list[int]]:
    """`[4, VOCAB]` float32, and what each row gives."""
    rows = np.zeros((4, VOCAB), np.float32)
    rows[0, 5] = np.nan
    rows[1] = -INF
    rows[2] = np.nan
    rows[3, 9] = 1
    return rows, [-1, VOCAB, -1, 9]

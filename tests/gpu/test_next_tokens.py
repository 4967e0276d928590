"""The engine's own greedy choice in TensorRT: ties, infinities and NaN as the runtime's."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import pytest
from gpu.decode_device import to_device
from next_tokens_model import VOCAB, broken_rows, make_model, tied_rows

from paged_trt.plugins import trt
from paged_trt.plugins.dtypes import DType
from paged_trt.runtime.sampler import greedy

pytestmark = pytest.mark.gpu

TYPES = (DType.FLOAT16, DType.BFLOAT16, DType.FLOAT32)
MAX_ROWS = 256


@functools.cache
def make_plan(dtype: DType) -> bytes:
    api = trt.load()
    logger = trt.logger(trt.LogLines())
    builder = api.Builder(logger)
    network = trt.create_network(builder)
    parser = api.OnnxParser(network, logger)
    assert parser.parse(make_model(dtype).SerializeToString())
    config = builder.create_builder_config()
    profile = builder.create_optimization_profile()
    profile.set_shape("logits", (1, VOCAB), (4, VOCAB), (MAX_ROWS, VOCAB))
    config.add_optimization_profile(profile)
    return bytes(builder.build_serialized_network(network, config))


def choose(rows: Any, dtype: DType) -> list[int]:
    import torch

    runtime = trt.load().Runtime(trt.logger(trt.LogLines()))
    engine = runtime.deserialize_cuda_engine(make_plan(dtype))
    context = engine.create_execution_context()
    logits = to_device(rows.astype(dtype.numpy))
    tokens = torch.full((len(rows),), -7, dtype=torch.int64, device="cuda")
    assert context.set_input_shape("logits", rows.shape)
    context.set_tensor_address("logits", logits.data_ptr())
    context.set_tensor_address("next_tokens", tokens.data_ptr())
    torch.cuda.synchronize()
    assert context.execute_async_v3(torch.cuda.current_stream().cuda_stream)
    torch.cuda.synchronize()
    found: list[int] = tokens.cpu().tolist()
    return found


@pytest.mark.parametrize("dtype", TYPES, ids=lambda each: each.value)
def test_the_lowest_of_equals_wins(dtype: DType) -> None:
    rows = tied_rows()
    assert choose(rows, dtype) == greedy(rows)
    noise = np.random.default_rng(1).normal(0, 3, (64, VOCAB)).astype(dtype.numpy)
    wide = noise.astype(np.float32)
    assert choose(wide, dtype) == greedy(wide)


@pytest.mark.parametrize("dtype", TYPES, ids=lambda each: each.value)
def test_a_row_without_a_largest_logit_gets_no_token(dtype: DType) -> None:
    rows, expected = broken_rows()
    assert choose(rows, dtype) == expected

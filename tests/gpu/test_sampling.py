"""The sampling kernel on the device: the draws of its NumPy twin, in any batch, without padding."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from gpu.decode_device import arch, launch, load_kernel, to_device
from gpu.engines import ToyEngine, prompts
from sampling_cases import Case, Spec, make_case, step_inputs

from paged_trt.plugins.dtypes import DType
from paged_trt.plugins.launch.args import SampleArgs
from paged_trt.plugins.launch.sampling import MAX_SAMPLED_VOCAB, SampleRow, sample_build
from paged_trt.runtime.engine import open_plan
from paged_trt.runtime.sampler import sample, sample_rows

pytestmark = pytest.mark.gpu

TYPES = (DType.FLOAT32, DType.FLOAT16, DType.BFLOAT16)
LOGPROB_ERROR = 2e-5


def run(
    logits: Any,
    specs: Sequence[Spec],
    steps: Sequence[int],
    *,
    dtype: DType,
    token_dtype: DType = DType.INT64,
    stride: int | None = None,
) -> tuple[Any, Any]:
    """Tokens and logprobs of rows that lie `stride` elements apart."""
    import torch

    rows, vocab = logits.shape
    stride = stride or vocab
    padded = np.full((rows, stride), np.nan, dtype.numpy)
    padded[:, :vocab] = logits
    device_logits = to_device(padded)
    parameters = to_device(np.frombuffer((SampleRow * rows)(*sample_rows(specs, steps)), np.uint8))
    tokens = torch.full((rows * token_dtype.itemsize,), 0x55, dtype=torch.uint8, device="cuda")
    logprobs = torch.zeros(rows, dtype=torch.float32, device="cuda")
    build = sample_build(dtype, token_dtype, vocab_size=vocab)
    args = SampleArgs(
        logits=device_logits.data_ptr(),
        rows=parameters.data_ptr(),
        tokens=tokens.data_ptr(),
        logprobs=logprobs.data_ptr(),
        row_stride=stride,
        num_seqs=rows,
        vocab_size=vocab,
    )
    assert arch()
    function = load_kernel(build.source, build.name_expression)
    launch(function, (rows, 1, 1), build.threads, args, is_programmatic=False)
    torch.cuda.synchronize()
    return tokens.cpu().numpy().view(token_dtype.numpy), logprobs.cpu().numpy()


def run_case(case: Case, dtype: DType, **options: Any) -> tuple[Any, Any]:
    return run(case.logits, case.specs, case.steps, dtype=dtype, **options)


@pytest.mark.parametrize(
    "vocab",
    [1, 2, 31, 33, 97, 1023, 1024, 1025, 32_000, 49_152, 151_936, 262_208, MAX_SAMPLED_VOCAB],
)
@pytest.mark.parametrize("dtype", TYPES, ids=lambda each: each.value)
def test_draws_of_the_twin(dtype: DType, vocab: int) -> None:
    case = make_case(dtype, 64 if vocab < 50_000 else 8, vocab)
    tokens, logprobs = run_case(case, dtype)
    np.testing.assert_array_equal(tokens, case.tokens)
    np.testing.assert_allclose(logprobs, case.logprobs, rtol=0, atol=LOGPROB_ERROR)


def test_ids_of_32_bits_and_rows_apart() -> None:
    case = make_case(DType.BFLOAT16, 33, 1000)
    tokens, _ = run_case(case, DType.BFLOAT16, token_dtype=DType.INT32, stride=1037)
    np.testing.assert_array_equal(tokens, case.tokens)


def test_a_draw_does_not_depend_on_its_batch() -> None:
    case = make_case(DType.FLOAT16, 40, 5000)
    order = np.random.default_rng(1).permutation(40)
    tokens, logprobs = run_case(case, DType.FLOAT16)
    specs, steps = [case.specs[i] for i in order], [case.steps[i] for i in order]
    moved = run(case.logits[order], specs, steps, dtype=DType.FLOAT16)
    np.testing.assert_array_equal(moved[0], tokens[order])
    np.testing.assert_array_equal(moved[1], logprobs[order])
    for index in (0, 7, 39):
        alone = run(
            case.logits[index : index + 1],
            case.specs[index : index + 1],
            case.steps[index : index + 1],
            dtype=DType.FLOAT16,
        )
        assert alone[0].tolist() == [tokens[index]]


def test_draws_repeat_bit_for_bit() -> None:
    case = make_case(DType.FLOAT32, 24, 100_003)
    first = run_case(case, DType.FLOAT32)
    for _ in range(5):
        again = run_case(case, DType.FLOAT32)
        np.testing.assert_array_equal(again[0], first[0])
        np.testing.assert_array_equal(again[1], first[1])


@pytest.mark.parametrize("dtype", TYPES, ids=lambda each: each.value)
def test_rows_without_a_largest_logit(dtype: DType) -> None:
    vocab = 40_000
    logits = np.zeros((4, vocab), dtype.numpy)
    logits[0, vocab - 1] = np.nan
    logits[1] = -np.inf
    logits[2] = np.nan
    logits[3, 5] = np.inf
    for temperature in (0.0, 1.0):
        specs = [Spec(temperature, 50, 0.9, 3)] * 4
        tokens, _ = run(logits, specs, [0] * 4, dtype=dtype)
        assert tokens.tolist() == [-1, vocab, -1, 5]


def test_many_seeds_follow_the_distribution() -> None:
    values = np.random.default_rng(4).normal(0, 1.5, 61).astype(np.float32)
    draws = 60_000
    specs = [Spec(1.0, 0, 1.0, seed) for seed in range(draws)]
    logits = np.broadcast_to(values, (draws, 61))
    tokens, _ = run(logits, specs, [0] * draws, dtype=DType.FLOAT32)
    expected = np.exp(values.astype(np.float64))
    expected *= draws / expected.sum()
    statistic = ((np.bincount(tokens, minlength=61) - expected) ** 2 / expected).sum()
    # 60 degrees of freedom pass this once in 10,000 times.
    assert statistic < 107


@pytest.mark.parametrize("dtype", [DType.FLOAT16, DType.BFLOAT16], ids=lambda each: each.value)
def test_steps_of_an_engine_draw_from_its_own_logits(dtype: DType) -> None:
    """The same step twice: its logits on the host, and its tokens from the device."""
    specs = [Spec(1.0, 0, 1.0, 7), Spec(0.7, 40, 0.9, 8), Spec(0.0, 0, 1.0, 0)]
    executor = open_plan(ToyEngine(activation=dtype).folder)
    try:
        tokens, past = prompts((20, 130, 3)), [0, 0, 0]
        for number in range(12):
            inputs = step_inputs(tokens, past)
            logits = executor.step(inputs)
            expected, logprobs = sample(logits, specs, [number] * 3)
            drawn, found = executor.step_sampled(
                inputs, [0, 1, 2], specs, [number] * 3, with_logprobs=True
            )
            np.testing.assert_array_equal(drawn, expected)
            np.testing.assert_allclose(found, logprobs, rtol=0, atol=LOGPROB_ERROR)
            past = [len(mine) for mine in tokens]
            for mine, token in zip(tokens, drawn.tolist(), strict=True):
                mine.append(token)
        stats = executor.stats()
    finally:
        executor.close()
    assert stats.graph_fallbacks == 0
    assert stats.graph_replays > 15

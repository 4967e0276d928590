"""Steps that draw their tokens: on a device that stands in, on the host, in the reference."""

from __future__ import annotations

import ctypes
import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fake_driver import FakeDriver, Function
from fake_engine import FakeEngine, read_memory
from sampling_cases import step_inputs
from session.paged_toy import VOCAB, make_spec, open_toy, prompt_of

from paged_trt.plugins.device import Device
from paged_trt.plugins.dtypes import DType
from paged_trt.plugins.errors import ConfigError
from paged_trt.plugins.launch.args import SampleArgs
from paged_trt.plugins.launch.sampling import MAX_SAMPLED_VOCAB, SampleRow
from paged_trt.plugins.tensors import NO_NEXT_TOKEN, EngineSpec, LogitsMode
from paged_trt.runtime.executor import Executor, StepInputs
from paged_trt.runtime.sampler import sample, sample_by_rows
from paged_trt.runtime.step_sampling import samples_on_device
from paged_trt.runtime.tensorrt_executor import TensorRtExecutor


@dataclasses.dataclass(frozen=True)
class Spec:
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int | None = 11


SPECS = [Spec(), Spec(0.7, 9, 0.9, 5), Spec(0.0, seed=None)]


def run_twin(dtype: DType) -> Any:
    """What the kernel does, by its NumPy twin on the same memory."""

    def run(args: dict[str, Any]) -> None:
        seqs, vocab = args["num_seqs"], args["vocab_size"]
        assert args["row_stride"] == vocab
        logits = read_memory(args["logits"], (seqs, vocab), np.dtype(dtype.numpy))
        size = ctypes.sizeof(SampleRow) * seqs
        rows = (SampleRow * seqs).from_buffer_copy(ctypes.string_at(args["rows"], size))
        tokens, logprobs = sample_by_rows(logits.astype(np.float32), list(rows))
        ctypes.memmove(args["tokens"], tokens.ctypes.data, 8 * seqs)
        if args["logprobs"]:
            ctypes.memmove(args["logprobs"], logprobs.ctypes.data, 4 * seqs)

    return run


def open_device(
    spec: EngineSpec, folder: Path, driver: FakeDriver, *, has_kernel: bool = True
) -> TensorRtExecutor:
    folder.mkdir()
    engine = FakeEngine(driver, open_toy(spec, folder))
    run = run_twin(spec.logits_dtype)
    kernel = Function("sample", SampleArgs, run) if has_kernel else None
    return TensorRtExecutor(engine, spec, Device(driver=driver), sampling_kernel=kernel)


class Prompts:
    """Three prompts that run by hand, with bucketed shapes."""

    def __init__(self, executor: Executor) -> None:
        self.executor, self.tokens = executor, [prompt_of(n) for n in (20, 130, 3)]
        self.past = [0, 0, 0]
        self.logprobs: list[Any] = []

    def step(self, number: int, *, with_logprobs: bool = False) -> list[int]:
        inputs = self.inputs()
        tokens, logprobs = self.executor.step_sampled(
            inputs, [0, 1, 2], SPECS, [number] * 3, with_logprobs=with_logprobs
        )
        self.past = [len(tokens) for tokens in self.tokens]
        for mine, token in zip(self.tokens, tokens.tolist(), strict=True):
            mine.append(token)
        self.logprobs.append(logprobs)
        return [int(token) for token in tokens]

    def inputs(self) -> StepInputs:
        return step_inputs(self.tokens, self.past)


def draw(executor: Executor, steps: int = 6, **options: Any) -> Prompts:
    prompts = Prompts(executor)
    for number in range(steps):
        prompts.step(number, **options)
    return prompts


@pytest.mark.parametrize("dtype", [DType.FLOAT16, DType.BFLOAT16], ids=lambda each: each.value)
def test_device_host_and_reference_draw_the_same(tmp_path: Path, dtype: DType) -> None:
    spec = make_spec(activation=dtype)
    found = {}
    for name, has_kernel in (("device", True), ("host", False)):
        executor = open_device(spec, tmp_path / name, FakeDriver(), has_kernel=has_kernel)
        found[name] = draw(executor, with_logprobs=True)
    (tmp_path / "reference").mkdir()
    found["all"] = draw(open_toy(spec, tmp_path / "reference"), with_logprobs=True)
    assert found["device"].tokens == found["host"].tokens == found["all"].tokens
    np.testing.assert_array_equal(found["device"].logprobs, found["host"].logprobs)
    drawn = [tokens[-6:] for tokens in found["device"].tokens]
    assert len({tuple(tokens) for tokens in drawn}) == 3
    assert (np.array(found["device"].logprobs) < 0).all()


def test_a_step_that_draws_costs_one_copy_each_way(tmp_path: Path) -> None:
    driver = FakeDriver()
    executor = open_device(make_spec(), tmp_path / "device", driver)
    prompts = draw(executor, 3)
    before = executor.stats()
    driver.calls.clear()
    driver.copied.clear()
    prompts.step(3)
    assert driver.calls == {
        "cuCtxPushCurrent": 1,
        "cuMemcpyHtoDAsync": 1,
        "cuGraphLaunch": 1,
        "cuLaunchKernelEx": 1,
        "cuMemcpyDtoHAsync": 1,
        "cuStreamSynchronize": 1,
        "cuCtxPopCurrent": 1,
    }
    assert driver.copied["cuMemcpyDtoHAsync"] == [8 * 3]
    prompts.step(4, with_logprobs=True)
    assert driver.copied["cuMemcpyDtoHAsync"] == [8 * 3, 12 * 3]
    assert executor.stats().allocations == before.allocations
    assert driver.launches[-1].grid == (3, 1, 1)
    assert driver.launches[-1].threads == 1024


def test_logits_of_all_tokens_are_drawn_from_on_the_host(tmp_path: Path) -> None:
    last, everything = make_spec(), make_spec(logits_mode=LogitsMode.ALL)
    assert samples_on_device(last)
    assert not samples_on_device(everything)
    large = dataclasses.replace(last, vocab_size=MAX_SAMPLED_VOCAB + 1)
    assert not samples_on_device(large)
    expected = draw(open_device(last, tmp_path / "last", FakeDriver()))
    found = draw(open_device(everything, tmp_path / "all", FakeDriver(), has_kernel=False))
    assert found.tokens == expected.tokens


@pytest.mark.parametrize("has_kernel", [True, False])
def test_rows_that_do_not_draw_are_not_looked_at(tmp_path: Path, has_kernel: bool) -> None:
    executor = open_device(make_spec(), tmp_path / "e", FakeDriver(), has_kernel=has_kernel)
    inputs = Prompts(executor).inputs()
    all_rows = executor.step_sampled(inputs, [0, 1, 2], SPECS, [0, 0, 0])[0]
    some = executor.step_sampled(inputs, [2, 0], [SPECS[2], SPECS[0]], [0, 0])[0]
    assert some.tolist() == [all_rows[2], all_rows[0]]
    assert executor.step_sampled(inputs, [], [], [])[0].tolist() == []
    with pytest.raises(ConfigError, match="needs a seed"):
        executor.step_sampled(inputs, [0], [Spec(seed=None)], [0])


def test_a_row_without_a_largest_logit_says_so_and_the_others_have_tokens(tmp_path: Path) -> None:
    driver = FakeDriver()
    executor = open_device(make_spec(), tmp_path / "e", driver)

    def run(args: dict[str, Any]) -> None:
        ctypes.memmove(args["tokens"], np.array([5, VOCAB, -1]).ctypes.data, 24)

    assert executor._sampler is not None
    executor._sampler._function.run = run
    inputs = Prompts(executor).inputs()
    assert executor.step_sampled(inputs, [0], SPECS[:1], [0])[0].tolist() == [5]
    found = executor.step_sampled(inputs, [0, 2, 1], [SPECS[each] for each in (0, 2, 1)], [0] * 3)
    assert found[0].tolist() == [5, NO_NEXT_TOKEN, VOCAB]


@pytest.mark.parametrize("with_logprobs", [True, False])
def test_broken_rows_draw_nothing_on_the_host(with_logprobs: bool) -> None:
    logits = np.random.default_rng(2).normal(size=(6, 50)).astype(np.float32)
    specs = [SPECS[row % 3] for row in range(6)]
    expected = sample(logits, specs, range(6), with_logprobs=with_logprobs)
    broken = logits.copy()
    broken[1, 7], broken[2], broken[3] = np.nan, np.nan, -np.inf
    tokens, logprobs = sample(broken, specs, range(6), with_logprobs=with_logprobs)
    assert tokens[1:4].tolist() == [NO_NEXT_TOKEN, NO_NEXT_TOKEN, 50]
    for row in (0, 4, 5):
        assert tokens[row] == expected[0][row]
        assert logprobs[row] == expected[1][row]


def test_padding_rows_do_not_matter(tmp_path: Path) -> None:
    spec = make_spec(max_batch_size=8)
    executor = open_device(spec, tmp_path / "e", FakeDriver())
    exact = Prompts(executor).inputs()
    tokens = executor.step_sampled(exact, [0, 1, 2], SPECS, [4, 4, 4])[0]
    padded = dataclasses.replace(
        exact,
        page_table=np.concatenate([exact.page_table, np.full((2, 2), -1, np.int32)]),
        query_start_offsets=np.append(exact.query_start_offsets, [153, 153]).astype(np.int32),
        past_lens=np.append(exact.past_lens, [0, 0]).astype(np.int32),
    )
    assert executor.step_sampled(padded, [0, 1, 2], SPECS, [4] * 3)[0].tolist() == tokens.tolist()

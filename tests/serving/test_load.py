"""Traffic from the trace's percentiles, and a benchmark of it on the reference executor."""

from __future__ import annotations

import asyncio
import json
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner
from polling import PATIENCE_SECONDS
from session.history_executor import HistoryExecutor
from session.paged_toy import VOCAB, make_spec

from paged_trt.plugins.errors import ConfigError, ExecutionError
from paged_trt.plugins.kv import TOKENS_PER_PAGE
from paged_trt.runtime.async_session import AsyncSession
from paged_trt.runtime.executor import Executor, StepInputs
from paged_trt.runtime.reference_executor import ReferenceExecutor
from paged_trt.runtime.results import SessionStats
from paged_trt.scripts.bench import serve
from paged_trt.scripts.bench.serve import command
from paged_trt.scripts.load import put_load
from paged_trt.scripts.load_plot import main as draw
from paged_trt.scripts.load_plot import plot_loads
from paged_trt.scripts.readme import RESULTS, serve_table
from paged_trt.scripts.results import read_results
from paged_trt.scripts.traffic import Limits, TrafficOptions, make_traffic

WIDE = Limits(max_input_len=100_000, max_kv_cache_capacity=200_000, vocab_size=500)
NARROW = Limits(max_input_len=300, max_kv_cache_capacity=384, vocab_size=VOCAB)


def options(**changes: object) -> TrafficOptions:
    values = {"service": "conv", "rate": 4.0, "num_requests": 4000, **changes}
    return TrafficOptions(**values)  # type: ignore[arg-type]


@pytest.mark.parametrize(("service", "prompt", "answer"), [("conv", 1020, 129), ("code", 1469, 13)])
def test_lengths_and_arrivals_are_those_of_the_trace(
    service: str, prompt: int, answer: int
) -> None:
    traffic = make_traffic(options(service=service), WIDE)
    assert np.median([len(each.prompt) for each in traffic.arrivals]) == pytest.approx(
        prompt, rel=0.1
    )
    assert np.median([each.num_new_tokens for each in traffic.arrivals]) == pytest.approx(
        answer, rel=0.1
    )
    gaps = np.diff([each.seconds for each in traffic.arrivals])
    # Of an exponential distribution: mean and standard deviation are one number.
    assert gaps.mean() == pytest.approx(0.25, rel=0.1)
    assert gaps.std() == pytest.approx(0.25, rel=0.1)
    assert (traffic.num_prompts_cut, traffic.num_answers_cut) == (0, 0)


def test_the_same_seed_makes_the_same_requests_and_another_one_others() -> None:
    made = [make_traffic(options(seed=seed, num_requests=20), WIDE) for seed in (1, 1, 2)]
    assert made[0] == made[1]
    assert made[0] != made[2]


def test_what_the_engine_does_not_take_is_cut_and_counted() -> None:
    whole, cut = make_traffic(options(), WIDE), make_traffic(options(), NARROW)
    pairs = list(zip(whole.arrivals, cut.arrivals, strict=True))
    assert all(
        len(short.prompt) == min(len(long.prompt), 300)
        and short.num_new_tokens == min(long.num_new_tokens, 384 - len(short.prompt))
        for long, short in pairs
    )
    assert cut.num_prompts_cut == sum(len(long.prompt) > 300 for long, _ in pairs) > 0
    assert cut.num_answers_cut == sum(
        short.num_new_tokens < long.num_new_tokens for long, short in pairs
    )
    assert cut.num_answers_cut > 0


def test_prompts_share_their_first_tokens_and_no_more() -> None:
    prompts = [
        each.prompt
        for each in make_traffic(options(shared_prefix_tokens=50, num_requests=30), NARROW).arrivals
    ]
    assert len({prompt[:50] for prompt in prompts}) == 1
    assert len({prompt[:60] for prompt in prompts}) > 1
    assert all(len(prompt) > 50 for prompt in prompts)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"service": "search"}, "search"),
        ({"rate": 0}, "rate"),
        ({"num_requests": 0}, "num_requests"),
        ({"length_scale": float("nan")}, "length_scale"),
        ({"seed": -1}, "seed"),
        ({"shared_prefix_tokens": 300}, "300 tokens leaves no room in prompts of up to 300"),
    ],
)
def test_traffic_that_cannot_be_is_refused(changes: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make_traffic(options(**changes), NARROW)


def let_pages_be_seen(monkeypatch: pytest.MonkeyPatch, executor: type) -> None:
    """Hold steps that read pages until somebody looked at the pages in use, once in each session.

    A busy machine may run all steps of a short request between two looks.
    """
    were_seen = threading.Event()
    make, stats, step = AsyncSession.__init__, AsyncSession.stats, executor.step

    def making(self: AsyncSession, *arguments: Any, **options: Any) -> None:
        were_seen.clear()
        make(self, *arguments, **options)

    def looking(self: AsyncSession) -> SessionStats:
        found = stats(self)
        if found.pages_in_use:
            were_seen.set()
        return found

    def stepping(self: Executor, inputs: StepInputs) -> Any:
        if inputs.past_lens.any():
            assert were_seen.wait(PATIENCE_SECONDS)
        return step(self, inputs)

    monkeypatch.setattr(AsyncSession, "__init__", making)
    monkeypatch.setattr(AsyncSession, "stats", looking)
    monkeypatch.setattr(executor, "step", stepping)


def test_every_token_of_every_request_is_noted(monkeypatch: pytest.MonkeyPatch) -> None:
    let_pages_be_seen(monkeypatch, HistoryExecutor)
    traffic = make_traffic(options(num_requests=30, rate=1000, length_scale=0.05), NARROW)

    async def run() -> None:
        session = AsyncSession(HistoryExecutor(make_spec()))
        try:
            load = await put_load(session, traffic.arrivals)
        finally:
            await session.aclose()
        counts = [len(each.tokens) for each in load.requests]
        assert counts == [each.num_new_tokens for each in traffic.arrivals]
        assert all(each.is_complete for each in load.requests)
        assert all(each.tokens == sorted(each.tokens) for each in load.requests)
        assert all(each.first_token > 0 for each in load.requests)
        assert load.num_tokens == sum(counts)
        assert max(count for _, count in load.pages) > 0

    asyncio.run(run())


def test_an_engine_that_fails_always_is_no_measurement() -> None:
    traffic = make_traffic(options(num_requests=3, rate=1000, length_scale=0.05), NARROW)

    async def run() -> None:
        executor = HistoryExecutor(make_spec())
        executor.failure = ExecutionError("the device is gone")
        session = AsyncSession(executor)
        try:
            with pytest.raises(ExecutionError, match=r"no request got all.*device is gone"):
                await put_load(session, traffic.arrivals)
        finally:
            await session.aclose()

    asyncio.run(run())


@pytest.fixture(scope="module")
def engine_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from engine_dirs import write_engine_dir

    from paged_trt.scripts.example_models.config import Dialect
    from paged_trt.scripts.example_models.toy import write_toy

    folder = tmp_path_factory.mktemp("engine")
    write_toy(folder, Dialect("attention23-past"))
    # Of requests that come together, the first has run its first page before the next one's turn.
    return write_engine_dir(folder / "model.onnx", folder / "toy", max_num_tokens=TOKENS_PER_PAGE)


def test_the_command_writes_a_results_file(
    engine_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    let_pages_be_seen(monkeypatch, ReferenceExecutor)
    words = ["--executor=reference", "--rate=20", "--rate=40", "--requests=8"]
    sizes = ["--length-scale=0.02", "--shared-prefix=130"]
    output = tmp_path / "results.json"
    done = CliRunner().invoke(command, [str(engine_dir), *words, *sizes, "-o", str(output)])
    assert done.exit_code == 0, done.output
    results = read_results(output)
    assert results.kind == "serve"
    assert "Splitwise" in results.method
    assert [row["rate"] for row in results.rows] == [20, 40]
    for row in results.rows:
        assert (row["requests"], row["failed"]) == (8, 0)
        assert row["first_token_ms"] <= row["first_token_ms_p90"] <= row["first_token_ms_p99"]
        # Each prompt but the first finds the page that all begin with.
        assert row["prefix_hit_rate"] == pytest.approx(7 * TOKENS_PER_PAGE / row["prompt_tokens"])
        assert 0 < row["pages_in_use_max"] <= row["num_pages"]
        assert len(row["inter_token_ms_percentiles"]) == 101
        assert 0 < len(row["pages_in_use"]) <= 201
    table = serve_table([("results.json", results)])
    assert len(table.splitlines()) == 4
    assert "0 of 8" in table
    assert json.loads(output.read_text())["schema"] == 1


def test_a_rate_that_is_interrupted_takes_nothing_from_those_before(
    engine_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    measure, asked = serve._measure, []

    async def measure_one(*arguments: object) -> object:
        asked.append(arguments)
        if len(asked) == 2:
            raise KeyboardInterrupt
        return await measure(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(serve, "_measure", measure_one)
    words = ["--executor=reference", "--rate=40", "--rate=20", "--requests=2"]
    output = tmp_path / "results.json"
    words += ["--length-scale=0.02", "-o", str(output)]
    done = CliRunner().invoke(command, [str(engine_dir), *words])
    assert done.exit_code == 1
    assert [row["rate"] for row in read_results(output).rows] == [40]


def test_the_command_draws_a_picture(engine_dir: Path, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="matplotlib of the extra `plots` is missing")
    words = ["--executor=reference", "--rate=40", "--requests=4", "--length-scale=0.02"]
    outputs = ["-o", str(tmp_path / "results.json"), "--plot", str(tmp_path / "load.png")]
    done = CliRunner().invoke(command, [str(engine_dir), *words, *outputs])
    assert done.exit_code == 0, done.output
    assert (tmp_path / "load.png").read_bytes().startswith(b"\x89PNG")
    again = CliRunner().invoke(draw, [str(tmp_path / "results.json"), str(tmp_path / "again.png")])
    assert again.exit_code == 0, again.output
    assert (tmp_path / "again.png").read_bytes() == (tmp_path / "load.png").read_bytes()


def test_results_of_another_kind_are_not_drawn() -> None:
    other = read_results(RESULTS / "rewrite-8gb.json")
    with pytest.raises(ConfigError, match="of kind `rewrite`"):
        plot_loads(other, Path("load.png"))

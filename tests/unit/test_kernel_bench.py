"""The kernel benchmark without a GPU: cells, rows, ratios, failures, limits, files, pictures."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from paged_trt.plugins.dtypes import DType
from paged_trt.plugins.errors import ExecutionError, KernelError
from paged_trt.plugins.launch.step_sizes import StepSizes
from paged_trt.plugins.launch.tuned import TuningTarget
from paged_trt.plugins.timing import Times
from paged_trt.scripts.cli import main
from paged_trt.scripts.kernel_bench.cells import (
    SPREAD,
    Cell,
    Family,
    cells_of,
    even,
    spread_lengths,
)
from paged_trt.scripts.kernel_bench.ours import OurTimes
from paged_trt.scripts.kernel_bench.peers import PeerCalls, PeerError
from paged_trt.scripts.kernel_bench.report import results_of, results_path, rows_table, shape_of
from paged_trt.scripts.kernel_bench.run import MOST_FAILURES, Bench
from paged_trt.scripts.readme import render
from paged_trt.scripts.results import Results, read_results

CEILINGS = {"read_GBs": 4000.0, "copy_GBs": 3000.0, "matmul_TFLOPs": 700.0}
TARGET = TuningTarget(
    gpu="NVIDIA H200",
    arch="sm_90",
    num_multiprocessors=132,
    driver="580",
    kernels="0" * 64,
    compiler="13.0",
)


def test_the_cells_are_those_of_the_tables() -> None:
    decode = cells_of(Family.DECODE, quick=False)
    table = [cell for cell in decode if cell.group == "table"]
    assert len(table) == 47
    assert {cell.heads for cell in table} == {(32, 8), (64, 8), (32, 32)}
    assert [cell.kv for cell in decode].count(DType.FLOAT8) == 8
    assert {(40, 8), (28, 4), (16, 2)} <= {cell.heads for cell in decode}
    assert {64, 256} <= {cell.head_dim for cell in decode}
    prefill = cells_of(Family.PREFILL, quick=False)
    assert [cell.group for cell in prefill].count("table") == 9
    assert len(prefill) >= 20
    for family in Family:
        every = cells_of(family, quick=False)
        assert len(set(every)) == len(every)
        assert 0 < len(cells_of(family, quick=True)) < len(every)


def test_a_ragged_batch_has_the_tokens_of_an_even_one() -> None:
    decode = cells_of(Family.DECODE, quick=False)
    even_bytes = {cell.bytes for cell in decode if cell.is_even and cell.heads == (32, 8)}
    ragged = [cell for cell in decode if not cell.is_even]
    assert len(ragged) == 3
    for cell in ragged:
        assert cell.bytes in even_bytes
        lengths = cell.sizes.kv_lens
        assert max(lengths) / min(lengths) == pytest.approx(SPREAD, rel=0.05)
        assert list(lengths) != sorted(lengths)
    assert sum(spread_lengths(7, 10_000)) == 10_000


def test_bytes_and_operations_of_a_cell() -> None:
    decode = Cell(family=Family.DECODE, group="x", heads=(32, 8), sizes=even(8, 4096))
    assert decode.bytes == 134_217_728
    prefill = Cell(family=Family.PREFILL, group="x", heads=(32, 8), sizes=even(2, 1000, 300))
    pairs = sum(range(701, 1001))
    assert prefill.flops == 2 * 4 * 32 * 128 * pairs
    windowed = Cell(
        family=Family.PREFILL, group="x", heads=(32, 8), sizes=even(1, 1000, 300), window=10
    )
    assert windowed.flops == 4 * 32 * 128 * 300 * 10
    append = Cell(
        family=Family.APPEND, group="x", heads=(32, 8), sizes=even(1, 64, 64), kv=DType.FLOAT8
    )
    assert append.bytes == 64 * 8 * 256 * 3


class FakeGraphs:
    """Times come from the calls themselves; `torch` is there for those who ask."""

    torch = object()

    def __init__(self) -> None:
        self.is_lost = False

    def run(self, call: Callable[[], Any]) -> float:
        if self.is_lost:
            raise RuntimeError("illegal address")
        return float(call() or 0.0)

    def record(self, calls: Any) -> Any:
        return FakeReplay(calls)


class FakeReplay:
    def __init__(self, calls: Any) -> None:
        self.calls = calls

    def __call__(self) -> float:
        return float(sum(call() for call in self.calls))

    def close(self) -> None:
        pass


class FakeMemory:
    class stream:  # noqa: N801
        @staticmethod
        def synchronize() -> None:
            pass

    def release(self) -> None:
        pass


class FakeOurs:
    stream = 1

    def __init__(self, microseconds: float = 50.0) -> None:
        self.microseconds = microseconds
        self.error: BaseException | None = None

    def time(self, cell: Cell, *, estimate: float, all_plans: bool) -> OurTimes:
        if self.error is not None:
            raise self.error
        assert estimate > cell.bytes / 4e6
        us = self.microseconds
        times = Times(median=us, minimum=us - 1, maximum=us + 2, calls=40, replays=5)
        return OurTimes(times=times, plan="direct (heuristic)", plans_us={})


class FakePeer:
    families = frozenset({Family.DECODE})
    version = "1"

    def __init__(self, name: str, microseconds: float, error: Exception | None = None) -> None:
        self.name, self.microseconds, self.error = name, microseconds, error
        self.prepared = 0

    def prepare(self, data: Any) -> PeerCalls:
        self.prepared += 1
        if self.error is not None:
            raise self.error
        return PeerCalls(calls=[lambda: self.microseconds], output=lambda: self.name)


class Data:
    def __init__(self, cell: Cell) -> None:
        self.cell = cell


def make_bench(*peers: FakePeer, errors: dict[str, float] | None = None) -> Any:
    return Bench(
        graphs=FakeGraphs(),
        memory=FakeMemory(),  # type: ignore[arg-type]
        ours=FakeOurs(),  # type: ignore[arg-type]
        peers=list(peers),  # type: ignore[arg-type]
        ceilings=CEILINGS,
        data_of=Data,  # type: ignore[arg-type]
        error_of=lambda data, output, turn: (errors or {}).get(output, 0.001),
    )


CELL = Cell(family=Family.DECODE, group="table", heads=(32, 8), sizes=even(8, 4096))


def test_a_row_has_times_ratio_and_share_of_the_ceiling() -> None:
    bench = make_bench(FakePeer("slow", 80.0), FakePeer("fast", 40.0))
    (row,), note = bench.run([CELL])
    assert note == ""
    assert (row["ours_us"], row["ours_us_min"], row["ours_us_max"]) == (50.0, 49.0, 52.0)
    assert row["peers_us"] == {"slow": 80.0, "fast": 40.0}
    assert row["ratio_to_best_peer"] == 1.25
    assert row["of_ceiling"] == round(CELL.bytes / 50.0 / 1e3 / 4000.0, 3)
    assert row["floor_us"] == round(CELL.bytes / 4000.0 / 1e3, 2)
    assert (row["batch"], row["query_len"], row["kv_len"]) == (8, 1, 4096)
    assert "errors" not in row


def test_a_library_that_computes_something_else_has_no_time() -> None:
    peers = (FakePeer("wrong", 1.0), FakePeer("nan", 1.0), FakePeer("right", 40.0))
    bench = make_bench(*peers, errors={"wrong": 0.5, "nan": float("nan")})
    # One cell of a kind is compared, and what it showed holds for all of them.
    rows, _ = bench.run([CELL, CELL])
    for row in rows:
        assert row["peers_us"] == {"right": 40.0}
        assert "off by 0.5" in row["errors"]["wrong"]
        assert "nan" in row["errors"]["nan"]


def test_a_library_that_keeps_failing_is_left_out_and_one_that_declines_is_not() -> None:
    failing = FakePeer("failing", 1.0, RuntimeError("no kernel\nimage at /home/a_b/c.d/e.cu:3 a/b"))
    declining = FakePeer("declining", 1.0, PeerError("no float8"))
    cells = cells_of(Family.DECODE, quick=False)[: MOST_FAILURES + 2]
    rows, _ = make_bench(failing, declining).run(cells)
    assert failing.prepared == MOST_FAILURES
    assert declining.prepared == len(cells)
    assert rows[0]["errors"] == {"failing": "RuntimeError: no kernel image at e.cu:3 a/b"}
    assert all("ratio_to_best_peer" not in row for row in rows)


def test_our_own_failure_is_a_row_with_its_reason() -> None:
    bench = make_bench(FakePeer("fast", 40.0))
    bench.ours.error = KernelError("it spills")
    (row,), _ = bench.run([CELL])
    assert row["errors"]["ours"] == "KernelError: it spills"
    assert row["peers_us"] == {"fast": 40.0}
    assert "ratio_to_best_peer" not in row


def test_our_own_wrong_result_is_said_beside_its_time() -> None:
    bench = make_bench()
    bench.our_error = lambda cell: 0.3
    for row in bench.run([CELL, CELL])[0]:
        assert "off by 0.3" in row["errors"]["ours"]
        assert row["ours_us"] == 50.0


def test_a_lost_device_ends_the_run_and_keeps_what_there_is() -> None:
    class Breaking(FakePeer):
        def prepare(self, data: Any) -> PeerCalls:
            if data.cell is not CELL:
                bench.graphs.is_lost = True
                raise RuntimeError("illegal address")
            return super().prepare(data)

    bench = make_bench(Breaking("breaking", 40.0))
    other = cells_of(Family.DECODE, quick=False)[0]
    rows, note = bench.run([CELL, other, CELL])
    assert len(rows) == 1
    assert "the device is lost" in note
    with pytest.raises(ExecutionError):
        bench._require_device(RuntimeError("again"))


def test_an_interrupt_keeps_what_was_measured() -> None:
    bench = make_bench()
    rows, note = bench.run([CELL])
    bench.ours.error = KeyboardInterrupt()
    more, note = bench.run([CELL, CELL])
    assert (len(rows), more) == (1, [])
    assert note == "interrupted at cell 1 of 2"
    assert bench.is_interrupted


def test_the_limit_keeps_what_was_measured() -> None:
    rows, note = make_bench().run([CELL, CELL], limit_s=-1.0)
    assert rows == []
    assert note == "2 of 2 cells not run: -1 s"


def test_int8_pools_are_ours_alone() -> None:
    peer = FakePeer("fast", 40.0)
    cell = Cell(
        family=Family.DECODE, group="int8", heads=(32, 8), sizes=even(8, 4096), kv=DType.INT8
    )
    (row,), _ = make_bench(peer).run([cell])
    assert (peer.prepared, row["peers_us"]) == (0, {})


def some_results(family: Family = Family.DECODE) -> Results:
    rows, _ = make_bench(FakePeer("fast", 60.0)).run(cells_of(family, quick=True))
    return results_of(
        family, rows, target=TARGET, ceilings=CEILINGS, peers={"fast": "1"}, tree="abc"
    )


def test_results_are_written_and_read(tmp_path: Path) -> None:
    results = some_results()
    path = results_path(tmp_path, results)
    results.write(path)
    assert read_results(path) == results
    assert path.name == f"decode-nvidia-h200-{results.date:%Y%m%d}.json"
    assert results_path(tmp_path, results).name.endswith("-2.json")
    assert json.loads(path.read_text())["schema"] == 1


def test_every_row_is_in_the_table() -> None:
    console = Console(width=200, record=True)
    results = some_results()
    console.print(rows_table(results))
    text = console.export_text()
    assert all(shape_of(row) in text for row in results.rows)
    ragged = Cell(
        family=Family.PREFILL,
        group="ragged",
        heads=(40, 8),
        head_dim=64,
        kv=DType.FLOAT8,
        sizes=StepSizes(query_lens=(2, 6), kv_lens=(2, 6)),
        window=4,
    )
    assert shape_of(ragged.row()) == ("40/8, head_dim 64, float8, 2 x 2 to 6, sum 8, window 4")


@pytest.mark.parametrize("family", list(Family))
def test_pictures_are_drawn(family: Family, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="pictures need the extra `plots`")
    from paged_trt.scripts.kernel_bench.plots import draw

    path = tmp_path / "picture.png"
    draw(some_results(family), path)
    data = path.read_bytes()
    assert data.startswith(b"\x89PNG")
    draw(some_results(family), path)
    assert path.read_bytes() == data


def test_the_reference_of_a_check_is_attention() -> None:
    torch = pytest.importorskip("torch", reason="other libraries need torch")
    from paged_trt.scripts.kernel_bench.peers import PeerData, relative_error

    cell = Cell(
        family=Family.PREFILL,
        group="x",
        heads=(4, 2),
        head_dim=16,
        sizes=StepSizes(query_lens=(3, 2), kv_lens=(130, 2)),
        window=50,
    )
    generator = torch.Generator().manual_seed(0)
    keys, values = (torch.randn(4, 128, 2, 16, generator=generator) for _ in range(2))
    query = torch.randn(5, 4, 16, generator=generator)
    tables = torch.tensor([[[3, 1], [2, 0]]])
    data = PeerData(
        torch=torch, cell=cell, keys=keys, values=values, tables=tables, query=query, out=None
    )
    expected = np.zeros((5, 4, 16))
    for row, (sequence, position) in enumerate([(0, 127), (0, 128), (0, 129), (1, 0), (1, 1)]):
        pages = [int(page) for page in tables[0, sequence]]
        key, value = (np.concatenate([pool[page].numpy() for page in pages])
                      for pool in (keys, values))  # fmt: skip
        seen = slice(max(0, position - 49), position + 1)
        for head in range(4):
            scores = key[seen, head // 2] @ query[row, head].numpy() / 4.0
            weights = np.exp(scores - scores.max())
            expected[row, head] = weights @ value[seen, head // 2] / weights.sum()
    assert relative_error(data, torch.from_numpy(expected), turn=0) < 1e-5
    assert relative_error(data, torch.from_numpy(expected) * 1.1, turn=0) > 0.05


def test_the_command_lists_cells_and_needs_a_gpu(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert main(["bench", "kernels", "--list", "--cells", "append"]) == 0
    assert "append: 32/8 d128 bfloat16 1 x 1 on 4096" in capsys.readouterr().out
    assert main(["bench", "kernels", "-o", str(tmp_path / "none")]) == 2
    assert "is no directory" in capsys.readouterr().err
    assert main(["bench", "kernels", "--plot"]) == 2
    assert "-o FOLDER" in capsys.readouterr().err


def test_the_readme_says_where_another_library_wins(tmp_path: Path) -> None:
    rows, _ = make_bench(FakePeer("fast", 60.0)).run(cells_of(Family.DECODE, quick=True))
    rows[0]["ratio_to_best_peer"] = 1.5
    rows[1]["errors"] = {"cuDNN": "too large"}
    results = results_of(
        Family.DECODE, rows, target=TARGET, ceilings=CEILINGS, peers={"fast": "1"}, tree="abc"
    )
    path = tmp_path / "decode-x.json"
    results.write(path)
    text = render("<!-- results: decode -->\nold\n<!-- end -->\n", tmp_path)
    assert f"as fast, in {len(rows) - 1} of {len(rows)} cells" in text
    assert "faster in 1 (ours / other): 32/8, 1 x 1024 (1.500, fast)" in text
    assert "| **1.50** |" in text
    assert "- cuDNN: too large (32/8, 8 x 4096)" in text
    assert "old" not in text
    assert ".png" not in text
    path.with_suffix(".png").write_bytes(b"")
    assert "](tests/bench/results/decode-x.png)" in render(text, tmp_path)
    later = results.model_copy(update={"rows": rows[1:]})
    later.write(tmp_path / "decode-x-20261129-2.json")
    results.write(tmp_path / "decode-x-20261129.json")
    assert "decode-x-20261129-2.json" in render(text, tmp_path)
    assert render("<!-- results: append -->\nold\n<!-- end -->\n", tmp_path).count("\n") == 2

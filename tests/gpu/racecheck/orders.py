"""Runs `orders.cu` on a device, for racecheck to look at; `tests/README.md` says what it shows.

    PYTHONPATH=.typing python tests/gpu/racecheck/orders.py -o FOLDER

runs it under compute-sanitizer and writes a results file: what racecheck reported of each order.
Without `-o` it prints whether the sums of each order are right.
"""

from __future__ import annotations

import ctypes
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import click
import numpy as np
import numpy.typing as npt

from paged_trt.plugins import cuda
from paged_trt.plugins.device import Device, KernelLaunch, Stream
from paged_trt.plugins.launch.sources import KERNEL_DIRECTORY
from paged_trt.scripts.gpu_host.ending import end
from paged_trt.scripts.gpu_host.host_results import results_path, write_results
from paged_trt.scripts.gpu_host.race_reports import races
from paged_trt.scripts.gpu_host.sanitizer import version_of

ORDERS: Final = (
    ("ByEveryThread", "ByEachFiller", "Stores"),
    ("ByEveryThread", "ByEachFiller", "Copies"),
    ("ByOneOfAWarp", "ByEachFiller", "Stores"),
    ("ByOneOfAWarp", "ByEachFiller", "Copies"),
    ("ByEveryThread", "ByOneWarp", "Stores"),
    ("ByEveryThread", "ByOneWarp", "Copies"),
    ("ByOneOfAWarp", "ByOneWarp", "Stores"),
    ("ByOneOfAWarp", "ByOneWarp", "Copies"),
    ("ByOneOfAWarp", "ByOneWarpThenEach", "Copies"),
)
"""Correct ones; `ByEveryThread ByOneWarp Copies` is the prefill kernel's."""
RACES: Final = (
    ("Early", "ByEachFiller", "Stores"),
    ("Early", "ByOneWarp", "Copies"),
    ("EarlyByEveryThread", "ByEachFiller", "Stores"),
    ("EarlyByEveryThread", "ByOneWarp", "Copies"),
    ("Unordered", "ByEachFiller", "Stores"),
    ("Unordered", "ByOneWarp", "Copies"),
)
RIGHT: Final = "right"
BLOCKS, ROUNDS, THREADS, USERS, STAGE_BYTES = 2, 6, 384, 256, 16 * 1024


def name_of(order: tuple[str, str, str]) -> str:
    return f"paged_trt::hand_back<{', '.join('paged_trt::' + part for part in order)}>"


def compile_orders(arch: str = "sm_90a") -> cuda.Cubin:
    """Machine code of all orders."""
    source = Path(__file__).with_suffix(".cu").read_text(encoding="utf-8")
    return cuda.compile_cubin(
        source,
        arch=arch,
        name_expressions=[name_of(order) for order in ORDERS + RACES],
        include_directories=(KERNEL_DIRECTORY,),
    )


class HandBackArgs(ctypes.Structure):
    """As in `orders.cu`."""

    _fields_ = (
        ("source", ctypes.c_void_p),
        ("sums", ctypes.c_void_p),
        ("rounds", ctypes.c_int32),
    )


def expected_sums() -> npt.NDArray[np.uint32]:
    """What each user reads, `[BLOCKS, USERS]`: 16 words a round, of four lanes in a row."""
    lane = np.arange(USERS) % 32
    rounds = np.arange(ROUNDS)[:, None]
    sums = (16 * rounds + 16 * (4 * lane % 32) + 24).sum(axis=0, dtype=np.uint32)
    return np.tile(sums, (BLOCKS, 1))


def run(device: Device, function: object, label: str) -> npt.NDArray[np.uint32]:
    """Sums of one launch, `[BLOCKS, USERS]`."""
    stream = Stream(device.driver)
    sums = np.zeros((BLOCKS, USERS), np.uint32)
    args = HandBackArgs(
        source=device.allocate(STAGE_BYTES, "words"),
        sums=device.allocate(sums.nbytes, "sums"),
        rounds=ROUNDS,
    )
    stream.fill(args.source, STAGE_BYTES, byte=255)
    launch = KernelLaunch(
        function, args, grid=(BLOCKS, 1, 1), threads=THREADS, shared_bytes=0, overlaps=False,
        label=label,
    )  # fmt: skip
    launch(stream.handle)
    stream.download(sums.ctypes.data, args.sums, sums.nbytes)
    stream.synchronize()
    return sums


def run_all() -> int:
    """Run every order; 1 where one that is no race has a wrong result."""
    wrong = 0
    device = Device()
    with device.current():
        cubin = compile_orders()
        module = cuda.check(device.driver.cuModuleLoadData(cubin.code), "cuModuleLoadData")
        for order in ORDERS + RACES:
            name = cubin.names[name_of(order)].encode()
            function = cuda.check(device.driver.cuModuleGetFunction(module, name), "get function")
            is_right = np.array_equal(run(device, function, " ".join(order)), expected_sums())
            wrong += order in ORDERS and not is_right
            click.echo(f"{' '.join(order)} {RIGHT if is_right else 'other sums'}")
    return int(wrong > 0)


def rows_of(printed: str, logs: Sequence[str]) -> list[dict[str, Any]]:
    """What racecheck reported of each order.

    Args:
        printed: by `run_all`.
        logs: of racecheck.

    Returns:
        Rows of a results file: the three parts of an order, `is_race` on purpose, `is_right` (its
        sums), `hazards` reported.

    Raises:
        click.ClickException: the tool did not run, or not to its end.
    """
    lines = [line.split(maxsplit=3) for line in printed.splitlines()]
    sums = {tuple(words[:3]): words[3] for words in lines if len(words) == 4}
    has_ended = len(logs) > 0 and all("RACECHECK SUMMARY" in log for log in logs)
    if not has_ended or not sums.keys() >= {*ORDERS, *RACES}:
        raise click.ClickException("\n".join(("racecheck did not get to its end", printed, *logs)))
    hazards = Counter[str]()
    for race in races(logs):
        hazards[race["kernel"]] += sum(race["against"].values())
    return [
        {
            **dict(zip(("freed", "awaited", "filled"), order, strict=True)),
            "is_race": order in RACES,
            "is_right": sums[order] == RIGHT,
            "hazards": hazards[f"hand_back<{', '.join(order)}>"],
        }
        for order in ORDERS + RACES
    ]


def check_all(program: str) -> list[dict[str, Any]]:
    """Rows of a run under racecheck, see `rows_of`; `program` is compute-sanitizer."""
    with tempfile.TemporaryDirectory() as folder:
        words = [
            *(program, "--tool", "racecheck", "--target-processes", "all", "--print-limit", "0"),
            *("--report-api-errors", "no", "--log-file", f"{folder}/%p.log"),
            *(sys.executable, __file__),
        ]
        done = subprocess.run(words, check=False, capture_output=True, text=True)
        logs = [path.read_text(encoding="utf-8") for path in sorted(Path(folder).glob("*.log"))]
    rows = rows_of(done.stdout + done.stderr, logs)
    return [{**row, "version": version_of(program)} for row in rows]


@click.command()
@click.option("-o", "--output", type=click.Path(path_type=Path), help="Folder of a results file.")
@click.option("--program", default="compute-sanitizer", show_default=True, help="Or its path.")
@click.option("--commit", "tree")
def main(*, output: Path | None, program: str, tree: str | None) -> None:
    """Run every order, with `-o` under racecheck; exit 1 where a correct one has a wrong result."""
    if output is None:
        sys.exit(run_all())
    rows = check_all(program)
    output.mkdir(parents=True, exist_ok=True)
    path = results_path(output, "racecheck-orders", device=0)
    click.echo(write_results(path, "racecheck-orders", rows, device=0, tree=tree))
    sys.exit(any(not row["is_right"] and not row["is_race"] for row in rows))


if __name__ == "__main__":
    end(main)

"""The results file of the orders that racecheck is asked about, from what the tool writes."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from click.testing import CliRunner
from gpu.racecheck import orders

from paged_trt.plugins import cuda
from paged_trt.scripts.gpu_host import host_results
from paged_trt.scripts.results import read_results

ELECTED = ("ByOneOfAWarp", "ByOneWarp", "Copies")
KERNEL = f"void paged_trt::{orders.name_of(ELECTED).removeprefix('paged_trt::')}"
LOG = f"""========= COMPUTE-SANITIZER
========= Error: Race reported between Write access at {KERNEL}(paged_trt::HandBackArgs)+0x5f0
=========     and Write access at {KERNEL}(paged_trt::HandBackArgs)+0x940 [3072 hazards]
=========     and Read access at {KERNEL}(paged_trt::HandBackArgs)+0x9f0 [123904 hazards]
=========
========= RACECHECK SUMMARY: 1 hazard displayed (1 error, 0 warnings)
"""
PRINTED = "".join(
    f"{' '.join(order)} {'other sums' if order in orders.RACES else 'right'}\n"
    for order in orders.ORDERS + orders.RACES
)
FAKE = """#!{python}
import sys
words = sys.argv[1:]
if words == ["--version"]:
    print("NVIDIA (R) Compute Sanitizer\\nVersion 1.2")
else:
    assert words[words.index("--tool") + 1] == "racecheck" and words[-1].endswith("orders.py")
    with open(words[words.index("--log-file") + 1].replace("%p", "7"), "w") as log:
        log.write({log!r})
    print({printed!r}, end="")
"""


@pytest.fixture(autouse=True)
def _host(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_results, "gpu_and_driver", lambda device: ("NVIDIA Test 1", "1.2"))
    monkeypatch.setattr(cuda, "nvrtc_version", lambda: "13.0")


def write_fake(folder: Path, *, log: str = LOG, printed: str = PRINTED) -> Path:
    """A program that writes what compute-sanitizer and `orders.py` under it would."""
    path = folder / "compute-sanitizer"
    path.write_text(FAKE.format(python=sys.executable, log=log, printed=printed))
    path.chmod(0o755)
    return path


def test_a_results_file_has_the_hazards_of_each_order(tmp_path: Path) -> None:
    words = ["-o", str(tmp_path / "out"), "--program", str(write_fake(tmp_path)), "--commit", "abc"]
    done = CliRunner().invoke(orders.main, words)
    assert done.exit_code == 0, done.output
    results = read_results(next((tmp_path / "out").glob("racecheck-orders-nvidia-test-1-*.json")))
    assert (results.kind, results.commit) == ("racecheck-orders", "abc")
    assert len(results.rows) == len(orders.ORDERS) + len(orders.RACES)
    reported = [row for row in results.rows if row["hazards"]]
    assert reported == [
        {
            "freed": "ByOneOfAWarp",
            "awaited": "ByOneWarp",
            "filled": "Copies",
            "is_race": False,
            "is_right": True,
            "hazards": 126976,
            "version": "Version 1.2",
        }
    ]
    assert [row["is_race"] for row in results.rows] == [False] * 9 + [True] * 6


@pytest.mark.parametrize(
    "fake", [{"log": LOG.partition("=========\n")[0]}, {"printed": PRINTED.partition("\n")[0]}]
)
def test_a_run_that_did_not_end_writes_nothing(tmp_path: Path, fake: dict[str, str]) -> None:
    program = write_fake(tmp_path, **fake)
    done = CliRunner().invoke(orders.main, ["-o", str(tmp_path / "out"), "--program", str(program)])
    assert done.exit_code == 1
    assert "did not get to its end" in done.output
    assert not (tmp_path / "out").exists()


def test_a_correct_order_with_wrong_sums_fails(tmp_path: Path) -> None:
    program = write_fake(tmp_path, printed=PRINTED.replace(" right", " other sums", 1))
    done = CliRunner().invoke(orders.main, ["-o", str(tmp_path / "out"), "--program", str(program)])
    assert done.exit_code == 1
    assert len(list((tmp_path / "out").iterdir())) == 1

"""Runs steps one after the other, each with a time limit; what was done is on disk at any time."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import signal
import subprocess
import sys
import tarfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final

from paged_trt.plugins.files import write_text
from paged_trt.scripts.gpu_host.device_tests import END_SECONDS
from paged_trt.scripts.gpu_host.host_results import name_commit
from paged_trt.scripts.gpu_host.kit import ROOT
from paged_trt.scripts.gpu_host.phases import Settings, Step, steps_of

SUMMARY_FILE: Final = "summary.json"
LEAST_SECONDS: Final = 5.0
"""A step is not begun with less time than this."""
_GRACE_SECONDS: Final = END_SECONDS + 5
_TAIL_CHARACTERS: Final = 3000
_ONE_THREAD: Final = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")


@dataclasses.dataclass(kw_only=True)
class Outcome:
    """What came of a step.

    Attributes:
        phase: it belongs to.
        step: its name.
        status: `passed`, `failed`, `ended` at its limit, `there` (nothing to do) or `not run`.
        seconds: it took.
        limit_s: it had.
        exit_code: of the command; None where none ended by itself.
        why: a status that needs a reason has one.
        tail: end of the output of a step that did not pass.
    """

    phase: str
    step: str
    status: str
    seconds: float = 0.0
    limit_s: float = 0.0
    exit_code: int | None = None
    why: str = ""
    tail: str = ""

    @property
    def is_good(self) -> bool:
        """Whether nothing went wrong."""
        return self.status in ("passed", "there")


def run_phases(
    settings: Settings,
    chosen: list[str],
    *,
    seconds: float,
    limits: dict[str, float],
    archive: Path | None,
) -> list[Outcome]:
    """Run the steps of phases, whatever comes of those before.

    Args:
        settings: of the run.
        chosen: phases and steps.
        seconds: of the whole run.
        limits: seconds of steps that get others than their own, `phase/step`.
        archive: `.tar.gz` of the results, written anew after each step; None writes none.

    Raises:
        ValueError: there is no such phase or step.
    """
    steps = steps_of(settings, chosen)
    settings.output.mkdir(parents=True, exist_ok=True)
    settings.workspace.mkdir(parents=True, exist_ok=True)
    deadline = time.monotonic() + seconds
    outcomes = [Outcome(phase=phase, step=step.name, status="not run") for phase, step in steps]
    with interruptible():
        for outcome, (phase, step) in zip(outcomes, steps, strict=True):
            limit = min(limits.get(f"{phase}/{step.name}", step.limit_s), _left(deadline))
            try:
                _run(outcome, step, limit_s=limit, settings=settings)
            finally:
                _keep(settings, outcomes, archive)
            sys.stdout.write(_line(outcome))
            sys.stdout.flush()
    return outcomes


def _left(deadline: float) -> float:
    """Seconds that a step may take so that its end is before the deadline."""
    return deadline - time.monotonic() - _GRACE_SECONDS


@contextlib.contextmanager
def interruptible() -> Iterator[None]:
    """Ctrl-C reaches this process and those that it starts, in a background job too."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _run(outcome: Outcome, step: Step, *, limit_s: float, settings: Settings) -> None:
    outcome.limit_s = round(limit_s, 1)
    if step.makes is not None and step.makes.exists():
        outcome.status = "there"
    elif step.needs is not None and not step.needs.exists():
        outcome.why = f"{step.needs} is missing: an earlier step makes it"
    elif limit_s < LEAST_SECONDS:
        outcome.why = "the time of the run has ended"
    else:
        log = settings.output / "logs" / f"{outcome.phase}-{step.name}.log"
        log.parent.mkdir(exist_ok=True)
        begin = time.monotonic()
        try:
            _execute(outcome, step.words, log=log, limit_s=limit_s)
        finally:
            outcome.seconds = round(time.monotonic() - begin, 1)
            if not outcome.is_good:
                outcome.tail = log.read_text(errors="replace")[-_TAIL_CHARACTERS:]


def _execute(outcome: Outcome, words: Sequence[str], *, log: Path, limit_s: float) -> None:
    """Run a command; at its limit, or when this process is interrupted, end it and its children."""
    environment = {**dict.fromkeys(_ONE_THREAD, "1"), "PYTHONUNBUFFERED": "1", **os.environ}
    with log.open("w", encoding="utf-8") as out:
        process = subprocess.Popen(  # noqa: S603 - our own words
            words, cwd=ROOT, env=environment, stdout=out, stderr=subprocess.STDOUT,
            start_new_session=True,
        )  # fmt: skip
        outcome.status = "ended"
        try:
            outcome.exit_code = process.wait(limit_s)
            outcome.status = "failed" if outcome.exit_code else "passed"
        except subprocess.TimeoutExpired:
            outcome.why = f"its limit of {limit_s:.0f} s"
            _interrupt(process)
        except KeyboardInterrupt:
            outcome.why = "interrupted"
            _interrupt(process)
            raise


def _interrupt(process: subprocess.Popen[bytes]) -> None:
    """First the process alone, so that it can write what it has; then all that is left."""
    process.send_signal(signal.SIGINT)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(_GRACE_SECONDS)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _keep(settings: Settings, outcomes: Sequence[Outcome], archive: Path | None) -> None:
    """Write the summary and the archive."""
    if settings.tree is not None:
        name_commit(settings.output, settings.tree)
    write_text(settings.output / SUMMARY_FILE, json.dumps(summary(outcomes), indent=1) + "\n")
    if archive is None:
        return
    staged = archive.with_name(f".{archive.name}.part")
    with tarfile.open(staged, "w:gz") as tar:
        tar.add(settings.output, arcname="results")
    staged.replace(archive)


def summary(outcomes: Sequence[Outcome]) -> dict[str, Any]:
    """Everything as JSON types."""
    return {
        "passed": all(outcome.is_good for outcome in outcomes),
        "seconds": round(sum(outcome.seconds for outcome in outcomes), 1),
        "steps": [dataclasses.asdict(outcome) for outcome in outcomes],
    }


def _line(outcome: Outcome) -> str:
    why = f": {outcome.why}" if outcome.why else ""
    code = f", exit code {outcome.exit_code}" if outcome.exit_code else ""
    head = f"{outcome.phase}/{outcome.step}: {outcome.status}{why}{code}, {outcome.seconds} s\n"
    tail = "".join(f"    {line}\n" for line in outcome.tail.splitlines()[-12:])
    return head + tail

"""Who holds which page of a pool: a small JSON record of a session, for pictures and questions.

`Session.snapshot` takes one. `SessionRecorder` keeps what a session held over its steps and
writes it while it runs; `paged-trt run --record` does that, `paged-trt inspect --session` shows it.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any, Final, Literal

import numpy.typing as npt
import pydantic

from paged_trt.plugins.errors import ManifestError
from paged_trt.plugins.files import write_text
from paged_trt.plugins.kv import UNUSED_PAGE_ENTRY, KvPoolSpec
from paged_trt.runtime.executor import Executor, StepInputs
from paged_trt.runtime.page_table import PageTable
from paged_trt.runtime.registry import PageRegistry

WRITE_SECONDS: Final = 1.0
"""A running session writes its record no more often."""
MAX_RECORD_BYTES: Final = 256 * 2**20
# Bounded, for a picture has to place it on an axis.
_Count = Annotated[int, pydantic.Field(ge=0, lt=2**31)]


class _Record(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(frozen=True, strict=True, extra="forbid")


class SlotRecord(_Record):
    """A row of the page table.

    Attributes:
        slot: its number.
        tokens: tokens of its sequence in the pool.
        pages: page ids, in order.
    """

    slot: _Count
    tokens: _Count
    pages: tuple[_Count, ...]


class PoolSnapshot(_Record):
    """The pages of a pool at one moment.

    Attributes:
        tokens_per_page: tokens that a page holds.
        max_batch_size: rows of the page table.
        max_pages_per_seq: width of the page table.
        references: references to each page of the pool, by id; 0 where it is free.
        slots: rows that hold a sequence.
    """

    tokens_per_page: _Count
    max_batch_size: _Count
    max_pages_per_seq: _Count
    references: Annotated[tuple[_Count, ...], pydantic.Field(min_length=1)]
    slots: tuple[SlotRecord, ...]

    @property
    def pages_in_use(self) -> int:
        """Pages with a reference."""
        return sum(map(bool, self.references))


class StepRecord(_Record):
    """Occupancy at one step: its number from 1, pages in use, sequences."""

    step: _Count
    pages_in_use: _Count
    sequences: _Count


class SessionRecord(_Record):
    """What a session held.

    Attributes:
        schema_version: of this record.
        geometry_sha256: of the engine, as in its manifest.
        is_running: whether the session was still running when this was written.
        timeline: one entry for each step at which the occupancy changed, and the last step.
        fullest: the pages at the fullest step.
        latest: the pages at the last step.
    """

    schema_version: Literal[1] = 1
    geometry_sha256: str
    is_running: bool
    timeline: tuple[StepRecord, ...]
    fullest: PoolSnapshot
    latest: PoolSnapshot


def take_snapshot(
    pool: KvPoolSpec, registry: PageRegistry, table: PageTable, tokens: Mapping[int, int]
) -> PoolSnapshot:
    """The pages of a pool now.

    Args:
        pool: geometry.
        registry: owner of the pages.
        table: rows of the slots.
        tokens: slot -> tokens of its sequence in the pool; slots left out hold none.
    """
    return PoolSnapshot(
        tokens_per_page=pool.pool_shape(1, 1)[2],
        max_batch_size=pool.max_batch_size,
        max_pages_per_seq=pool.max_pages_per_seq,
        references=tuple(registry.reference_count(page) for page in range(pool.num_pages)),
        slots=tuple(
            SlotRecord(slot=slot, tokens=count, pages=_held(table.row(slot)))
            for slot, count in sorted(tokens.items())
        ),
    )


def _held(row: Iterable[int]) -> tuple[int, ...]:
    """The pages of a row; entries below every layer's window hold none."""
    return tuple(int(page) for page in row if page != UNUSED_PAGE_ENTRY)


class SessionRecorder:
    """An executor that records the pages of its session at every step.

    Args:
        executor: runs the model.
        path: where the record goes; written at most once a second, and by `close`.
        geometry_sha256: of the engine.

    Attributes:
        take: gives the pages now, `Session.snapshot` of the session that this executor runs in;
            set before the first step.
    """

    def __init__(self, executor: Executor, path: Path, *, geometry_sha256: str) -> None:
        self._executor = executor
        self._path = path
        self._geometry = geometry_sha256
        self._timeline: list[StepRecord] = []
        self._fullest: PoolSnapshot | None = None
        self._latest: PoolSnapshot | None = None
        self._num_steps = 0
        self._written = time.monotonic()
        self.take: Callable[[], PoolSnapshot] | None = None

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._executor, name)
        # Every way to run a step is one.
        return self._noted(found) if name.startswith("step_") else found

    def step(self, inputs: StepInputs) -> npt.NDArray[Any]:
        """Run the step, then note who holds which page."""
        logits: npt.NDArray[Any] = self._noted(self._executor.step)(inputs)
        return logits

    def close(self) -> None:
        """Write the record and close the executor."""
        try:
            self.write(is_running=False)
        finally:
            self._executor.close()

    def write(self, *, is_running: bool) -> None:
        """Write the record beside its place, then rename; nothing where no step ran.

        Raises:
            OSError: it cannot be written.
        """
        if self._fullest is None or self._latest is None:
            return
        record = SessionRecord(
            geometry_sha256=self._geometry,
            is_running=is_running,
            timeline=(*self._timeline, self._step_record(self._latest)),
            fullest=self._fullest,
            latest=self._latest,
        )
        write_text(self._path, json.dumps(record.model_dump(mode="json")) + "\n")

    def _noted(self, step: Callable[..., Any]) -> Callable[..., Any]:
        def run(inputs: StepInputs, *rest: Any, **options: Any) -> Any:
            result = step(inputs, *rest, **options)
            if self.take is not None:
                self._note(_with_tokens(self.take(), inputs))
            return result

        return run

    def _note(self, snapshot: PoolSnapshot) -> None:
        self._num_steps += 1
        self._latest = snapshot
        if self._fullest is None or snapshot.pages_in_use > self._fullest.pages_in_use:
            self._fullest = snapshot
        here = self._step_record(snapshot)
        last = self._timeline[-1] if self._timeline else None
        if last is None or (last.pages_in_use, last.sequences) != (
            here.pages_in_use,
            here.sequences,
        ):
            self._timeline.append(here)
        if time.monotonic() - self._written >= WRITE_SECONDS:
            self.write(is_running=True)
            self._written = time.monotonic()

    def _step_record(self, snapshot: PoolSnapshot) -> StepRecord:
        return StepRecord(
            step=self._num_steps,
            pages_in_use=snapshot.pages_in_use,
            sequences=len(snapshot.slots),
        )


def _with_tokens(snapshot: PoolSnapshot, inputs: StepInputs) -> PoolSnapshot:
    """The tokens that this step wrote count: the session adds them after it."""
    counts = inputs.query_start_offsets[1:] - inputs.query_start_offsets[:-1]
    ends = {
        _held(row): int(past + count)
        for row, past, count in zip(inputs.page_table, inputs.past_lens, counts, strict=True)
    }
    slots = tuple(
        slot.model_copy(update={"tokens": ends.get(slot.pages, slot.tokens)})
        if slot.pages
        else slot
        for slot in snapshot.slots
    )
    return snapshot.model_copy(update={"slots": slots})


def read_record(path: Path) -> SessionRecord:
    """Read and check the record of a session.

    Raises:
        ManifestError: it cannot be read, or is no record.
    """
    again = "record a session with `paged-trt run ENGINE_DIR --record FILE`"
    try:
        if path.exists() and not path.is_file():
            # A pipe or a device would be read for ever.
            raise ManifestError(f"{path} is no regular file; {again}")
        size = path.stat().st_size
        if size > MAX_RECORD_BYTES:
            raise ManifestError(f"{path} has {size} bytes, over the limit of {MAX_RECORD_BYTES}")
        record = SessionRecord.model_validate_json(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise ManifestError(f"{path} cannot be read ({error}); {again}") from error
    except pydantic.ValidationError as error:
        first = error.errors(include_url=False)[0]
        place = ".".join(map(str, first["loc"]))
        message = f"{path} is no record of a session (`{place}`: {first['msg']}); {again}"
        raise ManifestError(message) from error
    for snapshot in (record.fullest, record.latest):
        _check(snapshot, path)
    return record


def _check(snapshot: PoolSnapshot, path: Path) -> None:
    ids = {page for slot in snapshot.slots for page in slot.pages}
    slots = [slot.slot for slot in snapshot.slots]
    known = set(range(len(snapshot.references)))
    if not (ids <= known and len(set(slots)) == len(slots)):
        raise ManifestError(
            f"{path} names pages or slots that its pool does not have; record the session again"
        )

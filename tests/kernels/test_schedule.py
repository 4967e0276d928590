"""The device-side schedule of a ragged decode, compiled for the host: every key of every column
is read once, shared columns know their blocks, and an even batch is not cut.
"""

from __future__ import annotations

import dataclasses
import random
import shutil
import subprocess
from collections import defaultdict
from pathlib import Path

import pytest

from paged_trt.plugins.launch.sources import KERNEL_DIRECTORY

HERE = Path(__file__).parent
PAGE, CHUNK = 128, 64
# What the kernel headers take from CUDA's: two types that the schedule does not use.
STUBS = {"cuda_fp16.h": "struct __half {};\n", "cuda_bf16.h": "struct __nv_bfloat16 {};\n"}


@dataclasses.dataclass(frozen=True)
class Batch:
    """Lengths before a step, and who reads them; sequences from `num_real` on are padding."""

    blocks: int
    columns: int
    window: int
    table_width: int
    past: tuple[int, ...]
    num_real: int

    @property
    def text(self) -> str:
        head = (self.blocks, self.grid, self.columns, self.window, self.table_width, len(self.past))
        return " ".join(map(str, (*head, self.num_real, *self.past)))

    @property
    def grid(self) -> int:
        """As `kernel_grid` has it."""
        columns = self.columns * len(self.past)
        return max(self.blocks, columns) if columns <= 4 * self.blocks else self.blocks

    def visible(self, sequence: int) -> tuple[int, int]:
        end = min(self.past[sequence], self.table_width * PAGE - 1) + 1
        first = 0 if self.window < 0 else max(0, self.past[sequence] - self.window + 1)
        return min(first, end), end


@dataclasses.dataclass(frozen=True)
class Piece:
    block: int
    sequence: int
    column: int
    first: int
    end: int
    first_block: int
    num_blocks: int
    index: int


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    compiler = shutil.which("g++")
    if compiler is None:
        pytest.skip("g++ is not installed")
    folder = tmp_path_factory.mktemp("schedule")
    for name, text in STUBS.items():
        (folder / name).write_text(text)
    include = [f"-I{path}" for path in (folder, HERE, KERNEL_DIRECTORY)]
    output = folder / "schedule"
    source = str(HERE / "schedule_on_host.cpp")
    command = [compiler, "-std=c++20", "-O1", "-w", "-pthread", *include, source, "-o", str(output)]
    subprocess.run(command, check=True)
    return output


def pieces_of(program: Path, batches: list[Batch]) -> list[list[Piece]]:
    text = "\n".join(batch.text for batch in batches)
    output = subprocess.run(
        [program], input=text, check=True, capture_output=True, text=True, timeout=300
    ).stdout
    found: list[list[Piece]] = [[]]
    for line in output.splitlines():
        if line == "done":
            found.append([])
        else:
            found[-1].append(Piece(*map(int, line.split())))
    return found[: len(batches)]


def random_batch(random_: random.Random) -> Batch:
    width, count = random_.randint(1, 40), random_.choice([1, 3, 12, 70])
    most = width * PAGE - 1
    base = random_.randint(0, most)
    spread = random_.choice([0, 40, most])
    past = [max(0, min(most + 300, base + random_.randint(-spread, spread))) for _ in range(count)]
    padding = random_.randint(0, 3)
    return Batch(
        blocks=random_.randint(1, 40),
        columns=random_.randint(1, 12),
        window=random_.choice([-1, -1, 1, 500, 3000]),
        table_width=width,
        past=(*past, *[0] * padding),
        num_real=count,
    )


def check(batch: Batch, pieces: list[Piece]) -> None:
    by_column: dict[tuple[int, int], list[Piece]] = defaultdict(list)
    slots: set[tuple[int, bool]] = set()
    for piece in pieces:
        by_column[piece.sequence, piece.column].append(piece)
        if piece.num_blocks > 1:
            # Workspace: a block leaves one partial that it starts with and one that it does not.
            slot = (piece.block, piece.index == 0)
            assert slot not in slots
            slots.add(slot)
    wanted = {(n, c) for n in range(batch.num_real) for c in range(batch.columns)}
    assert by_column.keys() == wanted
    for (sequence, _), parts in by_column.items():
        first, end = batch.visible(sequence)
        assert [part.index for part in parts] == list(range(len(parts)))
        assert {part.num_blocks for part in parts} == {len(parts)}
        if len(parts) > 1:
            assert [part.block - part.index for part in parts] == [parts[0].first_block] * len(
                parts
            )
        assert parts[-1].end == end
        if first < end:
            assert [part.first for part in parts] == [first, *[part.end for part in parts[:-1]]]
        assert all(part.first % CHUNK == 0 for part in parts[1:])


def test_every_key_is_read_once_and_every_block_knows_its_neighbours(program: Path) -> None:
    random_ = random.Random(0)  # noqa: S311 - a fixed sample
    batches = [random_batch(random_) for _ in range(40)]
    for batch, pieces in zip(batches, pieces_of(program, batches), strict=True):
        check(batch, pieces)


def test_even_batches_are_not_cut_and_ragged_ones_are_shared_evenly(program: Path) -> None:
    even = Batch(264, 8, -1, 128, (16383,) * 32, 32)
    lengths = tuple(int(256 * 64 ** (i / 31)) - 1 for i in range(32))
    ragged = Batch(264, 8, -1, 128, lengths, 32)
    many = Batch(264, 8, -1, 128, (16383,) * 128, 128)
    short = Batch(264, 8, -1, 128, (299,) * 128, 128)
    whole, shared, rounds, dealt = pieces_of(program, [even, ragged, many, short])
    assert len(whole) == 256
    assert {piece.num_blocks for piece in whole} == {1}
    # A block for each column, of which multiprocessors take as many as they can read.
    check(many, rounds)
    assert sorted(piece.block for piece in rounds) == [*range(1024)]
    # Short ones are dealt out, so that a block has the next one's keys on their way.
    check(short, dealt)
    assert sorted(piece.block for piece in dealt) == [block // 4 for block in range(1024)]
    check(ragged, shared)
    tokens: dict[int, int] = defaultdict(int)
    for piece in shared:
        # A piece costs two chunks besides its own.
        tokens[piece.block] += piece.end - piece.first + 2 * CHUNK
    assert 258 <= len(tokens) <= 264  # runs are whole chunks, so the last blocks may have none
    assert max(tokens.values()) <= 1.1 * sum(tokens.values()) / len(tokens)

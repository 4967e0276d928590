"""The order of query tiles on Hopper, compiled for the host: every block of tokens comes once, most
keys first, from wherever the search starts, and every tile goes to one thread block.
"""

from __future__ import annotations

import dataclasses
import itertools
import random
import shutil
import subprocess
from pathlib import Path

import pytest
from kernels.test_schedule import HERE, STUBS

from paged_trt.plugins.launch.sources import KERNEL_DIRECTORY

TILE_TOKENS, KEY_TOKENS = 32, 128
SECTION_BYTES, SHORT_SECTION_BYTES, SHORT_TOKENS = 17 << 20, 34 << 20, 512
BLOCKS = 7


@dataclasses.dataclass(frozen=True)
class Batch:
    """(New tokens, tokens before the step) of each sequence; padding has no token."""

    sequences: tuple[tuple[int, int], ...]
    num_kv_heads: int = 8
    token_bytes: int = 512

    @property
    def text(self) -> str:
        new, past = zip(*self.sequences, strict=True)
        offsets = itertools.accumulate(new, initial=0)
        head = (len(new), self.num_kv_heads, self.token_bytes)
        return " ".join(map(str, (*head, *offsets, *past)))

    def key_tiles(self, sequence: int, block: int) -> int:
        new, past = self.sequences[sequence]
        return -(-(past + min((block + 1) * TILE_TOKENS, new)) // KEY_TOKENS)

    @property
    def blocks(self) -> list[tuple[int, int]]:
        return [
            (sequence, block)
            for sequence, (new, _) in enumerate(self.sequences)
            for block in range(-(-new // TILE_TOKENS))
        ]


def ragged(seed: int, count: int) -> Batch:
    numbers = random.Random(seed)  # noqa: S311  # lengths, no secrets
    return Batch(
        tuple(
            (numbers.choice([0, 1, 31, 32, 33, 130]), numbers.choice([0, 1, 127, 128, 129, 4000]))
            for _ in range(count)
        )
    )


BATCHES = [
    Batch(((1000, 0),)),
    Batch(((1, 0),)),
    Batch(((0, 0), (0, 0))),
    Batch(((300, 0), (1, 5000), (129, 128), (64, 999), (0, 0))),
    ragged(0, 20),
    ragged(1, 45),  # more sequences than lanes
    Batch(((64, 20_000), (64, 20_000)), token_bytes=1024),  # 39 MiB a head: one at a time
    Batch(((96, 8000),), num_kv_heads=3),
    Batch(((512, 0),) * 16),  # 4 MiB a head
    Batch(((513, 0),) * 16),
]
Lines = list[tuple[int, int]]


@pytest.fixture(scope="module")
def outputs(tmp_path_factory: pytest.TempPathFactory) -> list[list[Lines]]:
    """For each of BATCHES: what the device's search gives, then who gets which tile."""
    compiler = shutil.which("g++")
    if compiler is None:
        pytest.skip("g++ is not installed")
    folder = tmp_path_factory.mktemp("order")
    for name, text in STUBS.items():
        (folder / name).write_text(text)
    include = [f"-I{path}" for path in (folder, HERE, KERNEL_DIRECTORY)]
    program: Path = folder / "order"
    source = str(HERE / "tile_order_on_host.cpp")
    command = [compiler, "-std=c++20", "-O1", "-w", "-pthread", *include, source]
    subprocess.run([*command, "-o", str(program)], check=True)
    text = "\n".join(batch.text for batch in BATCHES)
    run = subprocess.run(
        [program], input=text, check=True, capture_output=True, text=True, timeout=300
    )
    parts = run.stdout.split("done\n")[:-1]
    lines = [[tuple(map(int, line.split())) for line in part.splitlines()] for part in parts]
    return [lines[first : first + 4] for first in range(0, len(lines), 4)]  # type: ignore[misc]


@pytest.mark.parametrize("index", range(len(BATCHES)))
def test_every_block_comes_once_and_most_keys_first(outputs: list[list[Lines]], index: int) -> None:
    batch, ((num_blocks, _), *found) = BATCHES[index], outputs[index][0]
    assert num_blocks == len(batch.blocks)
    forward, backward = found[:num_blocks], found[num_blocks:]
    assert sorted(forward) == batch.blocks
    levels = [batch.key_tiles(*block) for block in forward]
    assert levels == sorted(levels, reverse=True)
    # A search that jumps back gives the same.
    assert backward == forward[::-1][::3]


@pytest.mark.parametrize("index", range(len(BATCHES)))
def test_keys_and_values_of_a_section_fit_the_cache(outputs: list[list[Lines]], index: int) -> None:
    batch, (_, heads) = BATCHES[index], outputs[index][0][0]
    lengths = [new + past for new, past in batch.sequences if new]
    is_short = max(lengths, default=0) <= SHORT_TOKENS
    most = SHORT_SECTION_BYTES if is_short else SECTION_BYTES
    head_bytes = sum(lengths) * batch.token_bytes
    assert 1 <= heads <= batch.num_kv_heads
    assert heads == 1 or heads * head_bytes <= most
    assert heads * 2 > batch.num_kv_heads or heads * 2 * head_bytes > most


def test_heads_of_short_sequences_come_together(outputs: list[list[Lines]]) -> None:
    assert [batch.sequences[0] for batch in BATCHES[-2:]] == [(512, 0), (513, 0)]
    assert [found[0][0][1] for found in outputs[-2:]] == [8, 4]


@pytest.mark.parametrize("index", range(len(BATCHES)))
def test_every_tile_goes_to_one_block(outputs: list[list[Lines]], index: int) -> None:
    num_tiles, _ = outputs[index][0][0]
    dealt, *from_counter = outputs[index][1:]
    for tiles in (dealt, *from_counter):
        assert sorted(tile for _, tile in tiles) == list(range(num_tiles))
    # Dealt out there and back, a block gets two tiles of each run of twice as many as blocks.
    for block in range(BLOCKS):
        found = sorted(tile for owner, tile in dealt if owner == block)
        both = (block, 2 * BLOCKS - 1 - block)
        wanted = [run + tile for run in range(0, num_tiles, 2 * BLOCKS) for tile in both]
        assert found == [tile for tile in wanted if tile < num_tiles]
    # A launch leaves the counter as it found it.
    assert from_counter[0] == from_counter[1]

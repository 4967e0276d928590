"""The gather kernel: it compiles everywhere, and on a CPU, thread by thread, it moves what a brute
force over queries and positions says, and touches nothing else.
"""

from __future__ import annotations

import ctypes
import dataclasses
import itertools
import random
import re
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from host_kernels import load_on_host
from hypothesis import given
from hypothesis import strategies as st
from kernels.test_decode_kernels_compile import compile_kernel, compile_resources
from kernels.test_launch_args import ARCHITECTURES
from kernels.test_prefill_sm90_kernels_compile import find_disassembler

from paged_trt.plugins.dtypes import DType
from paged_trt.plugins.errors import UnsupportedError
from paged_trt.plugins.kv import most_pages_read
from paged_trt.plugins.launch.args import GatherArgs
from paged_trt.plugins.launch.gather import THREADS, gather_build
from paged_trt.plugins.launch.registry import KernelKey, KernelPath
from paged_trt.plugins.launch.sources import KERNEL_DIRECTORY

BF16, FP16, FP8, INT8 = DType.BFLOAT16, DType.FLOAT16, DType.FLOAT8, DType.INT8
PAGE = 128
UNTOUCHED = 0x7FFF  # no converted element
INT32 = np.iinfo(np.int32)


def key(
    activation: DType, kv: DType, head_dim: int, value_head_dim: int | None = None
) -> KernelKey:
    return KernelKey(
        path=KernelPath.GATHER,
        arch=None,
        activation_dtype=activation,
        kv_cache_dtype=kv,
        head_dim=head_dim,
        value_head_dim=value_head_dim or head_dim,
        group_size=1,
    )


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_it_compiles_without_spills(arch: str) -> None:
    every = [key(*types, dim) for types in itertools.product((BF16, FP16), (FP8, INT8))
             for dim in (64, 128, 256)]  # fmt: skip
    for kernel in every if arch == "sm_90a" else (key(BF16, FP8, 128), key(FP16, INT8, 64)):
        found = compile_resources(gather_build(kernel), arch)
        assert (found.spill_bytes, found.stack_bytes, found.shared_bytes) == (0, 0, 0)
        # Four blocks of 256 threads hide the latency of each other's loads.
        assert found.registers <= 64


def test_loads_and_stores_are_wide(tmp_path: Path) -> None:
    disassembler = find_disassembler()
    if disassembler is None:
        pytest.skip("nvdisasm is not installed; `pip install nvidia-cuda-nvdisasm`")
    for kv in (FP8, INT8):
        code, _ = compile_kernel(gather_build(key(BF16, kv, 128)), "sm_90a")
        path = tmp_path / "kernel.cubin"
        path.write_bytes(code)
        listing = subprocess.run(
            [disassembler, "-c", str(path)], check=True, capture_output=True, text=True
        ).stdout
        # Eight chunks of keys and eight of values are on their way at a time.
        assert len(re.findall(r"LDG\.E\.64", listing)) == 16
        assert len(re.findall(r"STG\.E\.128", listing)) == 16
        assert not re.findall(r"\b(?:LDL|STL|BAR)\b", listing)
        waits = [listing.index(name) for name in ("ACQBULK", "LDG.E.64")]
        assert waits == sorted(waits)  # nothing of the pools is read before the append has ended
    source = (KERNEL_DIRECTORY / "gather.cu").read_text()
    assert f"kGatherThreads = {THREADS};" in source


@pytest.mark.parametrize(
    "kernel",
    [
        dataclasses.replace(key(BF16, FP8, 128), path=KernelPath.PREFILL),
        key(BF16, BF16, 128),
        key(BF16, FP8, 96),
        key(BF16, INT8, 128, 80),
    ],
    ids=["path", "type", "head_dim", "value_head_dim"],
)
def test_keys_without_a_kernel_are_refused(kernel: KernelKey) -> None:
    with pytest.raises(UnsupportedError, match=r"gather"):
        gather_build(kernel)


@pytest.mark.parametrize("kv", [FP8, INT8], ids=lambda dtype: dtype.value)
@pytest.mark.parametrize("activation", [BF16, FP16], ids=lambda dtype: dtype.value)
def test_every_element_is_exact_in_either_type(activation: DType, kv: DType) -> None:
    """So gathering rounds nothing."""
    numbers = np.arange(256, dtype=np.uint8).view(kv.numpy).astype(np.float32)
    gathered = numbers.astype(activation.numpy).astype(np.float32)
    assert np.array_equal(gathered, numbers, equal_nan=True)


@dataclasses.dataclass(frozen=True)
class Batch:
    """(New tokens, tokens before the step) of each sequence; padding has no new token."""

    sequences: tuple[tuple[int, int], ...]
    table_width: int
    window: int = -1
    num_pages: int = 40
    num_kv_heads: int = 2
    seed: int = 0
    bad_ids: bool = False
    dims: tuple[int, int] = (64, 128)

    @property
    def slots(self) -> int:
        return most_pages_read(
            num_tokens=sum(new for new, _ in self.sequences),
            num_seqs=len(self.sequences),
            table_width=self.table_width,
            window=self.window,
        )

    def table(self) -> Any:
        """Scrambled, with pages that sequences share; some ids are outside of the pool."""
        numbers = np.random.default_rng(self.seed)
        shape = (len(self.sequences), self.table_width)
        table = numbers.integers(0, self.num_pages, shape)
        if self.bad_ids:
            wrong = [-1, -7, self.num_pages, INT32.max, INT32.min, 1 << 30]
            is_bad = numbers.random(shape) < 0.4
            table = np.where(is_bad, numbers.choice(wrong, shape), table)
        return table.astype(np.int32)

    def seen(self, sequence: int) -> set[int]:
        """Positions that some query of a sequence sees and that the table has an entry for."""
        new, past = self.sequences[sequence]
        positions: set[int] = set()
        for position in range(past, past + new):
            first = 0 if self.window < 0 else max(0, position - self.window + 1)
            positions.update(range(first, position + 1))
        return {position for position in positions if position < self.table_width * PAGE}


def brute_force(batch: Batch, pools: list[Any]) -> tuple[Any, list[Any], int]:
    """The table, the gathered pages and the number of slots, position by position."""
    table = batch.table()
    gathered = [np.full((batch.slots, *pool.shape[1:]), UNTOUCHED, np.uint16) for pool in pools]
    named = np.full(table.shape, UNTOUCHED, np.int32)
    slot = 0
    for sequence in range(len(batch.sequences)):
        seen = batch.seen(sequence)
        for index in sorted({position // PAGE for position in seen}):
            page = int(table[sequence, index])
            is_valid = 0 <= page < batch.num_pages
            named[sequence, index] = slot if is_valid else -1
            if is_valid:
                rows = [position % PAGE for position in seen if position // PAGE == index]
                for pool, target in zip(pools, gathered, strict=True):
                    target[slot] = 0x100  # what a zero becomes
                    target[slot][:, rows] = 0x100 + pool[page][:, rows].astype(np.uint16)
            slot += 1
    return named, gathered, slot


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    return load_on_host("gather", tmp_path_factory.mktemp("host"))


def run(library: ctypes.CDLL, batch: Batch) -> tuple[Any, list[Any], list[Any]]:
    """Table and gathered pages that the kernel leaves, and the pools."""
    numbers = np.random.default_rng(batch.seed + 1)
    shapes = [(batch.num_kv_heads, PAGE, dim) for dim in batch.dims]
    pools = [numbers.integers(0, 256, (batch.num_pages, *shape), np.uint8) for shape in shapes]
    # One slot more than there is: nobody may write there.
    gathered = [np.full((batch.slots + 1, *shape), UNTOUCHED, np.uint16) for shape in shapes]
    named = np.full((len(batch.sequences) + 1, batch.table_width), UNTOUCHED, np.int32)
    counter = np.full(2, UNTOUCHED, np.int32)
    new, past = (np.array(part, np.int32) for part in zip(*batch.sequences, strict=True))
    offsets, table = np.concatenate([[0], np.cumsum(new)]).astype(np.int32), batch.table()
    args = GatherArgs(
        key_pool=pools[0].ctypes.data,
        value_pool=pools[1].ctypes.data,
        page_table=table.ctypes.data,
        query_start_offsets=offsets.ctypes.data,
        past_lens=past.ctypes.data,
        gathered_keys=gathered[0].ctypes.data,
        gathered_values=gathered[1].ctypes.data,
        gathered_table=named.ctypes.data,
        tile_counter=counter.ctypes.data,
        num_seqs=len(batch.sequences),
        table_width=batch.table_width,
        num_pages=batch.num_pages,
        num_kv_heads=batch.num_kv_heads,
        window=batch.window,
    )
    function = library[f"gather_{batch.dims[0]}_{batch.dims[1]}"]
    function(ctypes.byref(args), batch.slots * batch.num_kv_heads)
    assert counter.tolist() == [0, UNTOUCHED]
    assert (named[-1] == UNTOUCHED).all()
    assert all((pages[-1] == UNTOUCHED).all() for pages in gathered)
    return named[:-1], [pages[:-1] for pages in gathered], pools


BATCHES = {
    "one": Batch(((1, 0),), 1),
    "page-edges": Batch(((128, 0), (1, 128), (129, 0), (1, 127)), 2),
    "long-past": Batch(((33, 700),), 7, num_kv_heads=3),
    "ragged": Batch(((300, 0), (1, 513), (64, 999), (0, 0), (129, 128), (0, 0)), 9),
    "padding-first": Batch(((0, 0), (0, 0), (5, 130)), 3),
    "nothing": Batch(((0, 0), (0, 0)), 2),
    "window": Batch(((70, 830), (1, 999), (3, 0)), 8, window=100),
    "window-1": Batch(((1, 127), (1, 128), (2, 127)), 3, window=1),
    "window-of-pages": Batch(((1, 511), (130, 382)), 6, window=256),
    "window-larger": Batch(((9, 300),), 4, window=5000),
    "bad-ids": Batch(((300, 0), (1, 513), (64, 500), (7, 120)), 6, bad_ids=True),
    "bad-ids-window": Batch(((300, 0), (1, 513), (64, 500)), 6, window=200, bad_ids=True),
    "beyond-the-table": Batch(((300, 200), (200, 0), (1, 600)), 2),
    "beyond-the-table-window": Batch(((10, 600), (200, 0)), 2, window=50),
    "many-sequences": Batch(tuple((n % 3, 40 * (n % 5)) for n in range(70)), 2, num_kv_heads=1),
    "wide-keys": Batch(((130, 200), (1, 5)), 3, dims=(256, 64), bad_ids=True),
}


@pytest.mark.parametrize("name", BATCHES)
def test_it_moves_what_queries_see(library: ctypes.CDLL, name: str) -> None:
    batch = BATCHES[name]
    named, gathered, pools = run(library, batch)
    wanted_table, wanted, used = brute_force(batch, pools)
    assert used <= batch.slots
    assert np.array_equal(named, wanted_table)
    for found, expected in zip(gathered, wanted, strict=True):
        assert np.array_equal(found, expected)


def test_random_batches(library: ctypes.CDLL) -> None:
    numbers = random.Random(0)  # noqa: S311 - a fixed sample
    for seed in range(12):
        count = numbers.choice([1, 2, 5, 33])
        most = 900 if count < 33 else 140
        batch = Batch(
            tuple((numbers.choice([0, 1, 5, 128, 200]), numbers.randint(0, most))
                  for _ in range(count)),
            numbers.randint(1, 9),
            window=numbers.choice([-1, -1, 1, 64, 129, 300]),
            num_kv_heads=1,
            seed=seed,
            bad_ids=seed % 2 == 1,
            dims=(64, 128) if seed % 3 else (256, 64),
        )  # fmt: skip
        named, gathered, pools = run(library, batch)
        wanted_table, wanted, used = brute_force(batch, pools)
        assert used <= batch.slots, batch
        assert np.array_equal(named, wanted_table), batch
        assert all(map(np.array_equal, gathered, wanted)), batch


@given(
    st.lists(st.tuples(st.integers(0, 700), st.integers(0, 3000)), min_size=1, max_size=8),
    st.integers(1, 30),
    st.one_of(st.just(-1), st.integers(1, 1200)),
    st.integers(0, 3),
)
def test_there_is_a_slot_for_every_page_that_is_read(
    sequences: list[tuple[int, int]], width: int, window: int, padding: int
) -> None:
    pages = 0
    for new, past in sequences:
        if new == 0:
            continue
        first = 0 if window < 0 else max(0, past - window + 1)
        pages += max(0, min((past + new - 1) // PAGE, width - 1) - first // PAGE + 1)
    slots = most_pages_read(
        num_tokens=sum(new for new, _ in sequences) + padding,
        num_seqs=len(sequences) + padding,
        table_width=width,
        window=window,
    )
    assert pages <= slots <= (len(sequences) + padding) * width


@pytest.mark.parametrize("window", [1, 2, 127, 128, 129, 130, 1000])
def test_the_slots_of_a_window_are_as_few_as_can_be(window: int) -> None:
    """One sequence of every place of its window in a page."""
    needed = {
        (past + new - 1) // PAGE - max(0, past - window + 1) // PAGE + 1
        for new in (5,)
        for past in range(2000, 2000 + PAGE)
    }
    slots = most_pages_read(num_tokens=5, num_seqs=1, table_width=100, window=window)
    assert slots == max(needed)

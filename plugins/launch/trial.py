"""Attention steps on random data, for whoever times kernels: no engine, no TensorRT.

Keys and values lie in pages of random order; several page tables name different pages of one
pool, so that launches in turn find nothing of each other in a cache.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from paged_trt.plugins.attention import AttentionSpec, Rope
from paged_trt.plugins.device import Device, KernelLaunch, Stream
from paged_trt.plugins.dtypes import DType
from paged_trt.plugins.errors import ConfigError
from paged_trt.plugins.fields import OperatorSpec
from paged_trt.plugins.kv import UNUSED_PAGE_ENTRY, KvPoolSpec, pages_for_tokens
from paged_trt.plugins.launch.dispatch import PreparedStep
from paged_trt.plugins.launch.kernels_decode import CallAddresses
from paged_trt.plugins.launch.loaded import KERNELS, KernelRegistry
from paged_trt.plugins.launch.planner import Planner
from paged_trt.plugins.launch.registry import KernelPath
from paged_trt.plugins.launch.requests import AttentionPlanRequest
from paged_trt.plugins.operands import StepShape

Array = npt.NDArray[Any]
BYTES_IN_TURN: Final = 190_000_000
"""Keys and values that launches in turn read before one of them reads the first again: over
three times the largest second-level cache."""
MOST_SETS: Final = 48
_PATTERN_BYTES: Final = 2**23
_PATTERN_NUMBERS: Final = 2**22
_ALIGNMENT: Final = 256
"""Bytes, as of every allocation of CUDA."""
_INT8_SPREAD: Final = 40.0


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class StepSizes:
    """Ragged sizes of one step.

    Attributes:
        query_lens: new tokens of each sequence.
        kv_lens: keys of each sequence after the step, the new ones included.

    Raises:
        ConfigError: a sequence has no new token, or fewer keys than new tokens.
    """

    query_lens: tuple[int, ...]
    kv_lens: tuple[int, ...]

    def __post_init__(self) -> None:
        pairs = list(zip(self.query_lens, self.kv_lens, strict=True))
        if not pairs or any(not 0 < query <= keys for query, keys in pairs):
            raise ConfigError(f"no step has new tokens and keys {pairs[:4]}")

    @property
    def shape(self) -> StepShape:
        """T, N and M."""
        tokens, num_seqs = sum(self.query_lens), len(self.query_lens)
        return StepShape(
            num_tokens=tokens,
            num_seqs=num_seqs,
            table_width=max(self.page_counts),
        )

    @property
    def page_counts(self) -> tuple[int, ...]:
        """Pages of each sequence."""
        return tuple(map(pages_for_tokens, self.kv_lens))

    def kv_bytes(self, attention: AttentionSpec, kv: DType) -> int:
        """Bytes of the keys and values that the step sees, each once."""
        return sum(self.kv_lens) * attention.kv_elements * kv.itemsize


def sets_in_turn(sizes: StepSizes, attention: AttentionSpec, kv: DType, pool: KvPoolSpec) -> int:
    """Page tables that take turns, so that none of their data is in a cache.

    As many as BYTES_IN_TURN asks for; fewer, but one at least, where the pool is small.
    """
    wanted = min(MOST_SETS, -(-BYTES_IN_TURN // sizes.kv_bytes(attention, kv)))
    return max(1, min(wanted, pool.times(sum(sizes.page_counts))))


def page_tables(sizes: StepSizes, pool: KvPoolSpec, *, num_sets: int, seed: int = 0) -> Array:
    """Tables of pages in random order, no page twice.

    Args:
        sizes: of the step.
        pool: whose pages they name.
        num_sets: tables.
        seed: of the order.

    Returns:
        `[num_sets, N, M]` int32, UNUSED_PAGE_ENTRY behind the pages of a sequence.

    Raises:
        ConfigError: the pool has too few pages.
    """
    counts = np.array(sizes.page_counts)
    needed = num_sets * int(counts.sum())
    if not pool.times(needed):
        raise ConfigError(
            f"{num_sets} steps need {needed} pages and the pool holds {pool.num_pages}"
        )
    shape = sizes.shape
    order = np.random.default_rng(seed).permutation(needed).astype(np.int32)
    tables = np.full(
        (num_sets, shape.num_seqs, shape.table_width), UNUSED_PAGE_ENTRY, dtype=np.int32
    )
    is_used = np.arange(shape.table_width)[None] < counts[:, None]
    tables[:, is_used] = order.reshape(num_sets, -1)
    return tables


class TrialMemory:
    """Device memory of trials; the contents of the pools are random numbers of their type.

    Args:
        device: current while this is used.
        stream: of all copies.
        pool_bytes: of the keys, and of the values.
    """

    def __init__(self, device: Device, stream: Stream, *, pool_bytes: int) -> None:
        self.device, self.stream = device, stream
        self.pool_bytes = pool_bytes
        self.pools: list[int] = []
        self._filled: DType | None = None
        self._lent: list[int] = []
        self._pattern: tuple[DType, int] | None = None
        self._pinned = device.allocate_pinned(_PATTERN_BYTES)
        try:
            for what in ("keys", "values"):
                self.pools.append(device.allocate(pool_bytes, f"{what} of a trial"))
        except BaseException:
            self.close()
            raise

    def fill(self, kv: DType) -> None:
        """Random numbers of a type in both pools; a second call of a type does nothing."""
        if self._filled is kv:
            return
        numbers = np.random.default_rng(1).standard_normal(_PATTERN_NUMBERS, np.float32)
        pattern = (numbers * (_INT8_SPREAD if kv is DType.INT8 else 1.0)).astype(kv.numpy)
        self._pinned[: pattern.nbytes] = pattern.view(np.uint8)
        for pool in self.pools:
            done = min(pattern.nbytes, self.pool_bytes)
            self.stream.upload(pool, self._pinned.ctypes.data, done)
            self._repeat(pool, done, self.pool_bytes)
        self.stream.synchronize()
        self._filled = kv

    def random(self, dtype: DType, count: int, *, seed: int) -> int:
        """Address of `count` random numbers, until `release`.

        Args:
            dtype: an activation type.
            count: of numbers.
            seed: which stretch of the pattern comes first.
        """
        size = count * dtype.itemsize
        address = self.scratch(size, "an operand of a trial")
        # Quantised pools hold other numbers than activations: they have a pattern of their own.
        if self._pattern is None or self._pattern[0] is not dtype:
            if self._pattern is not None:
                self.device.free(self._pattern[1])
            numbers = np.random.default_rng(2).standard_normal(_PATTERN_NUMBERS, np.float32)
            data = numbers.astype(dtype.numpy)
            self._pattern = (dtype, self.device.allocate(data.nbytes, "random numbers"))
            self._send(self._pattern[1], data.view(np.uint8))
        pattern_bytes = _PATTERN_NUMBERS * dtype.itemsize
        start = seed % 16 * (pattern_bytes // 16)
        done = min(size, pattern_bytes - start)
        self.stream.copy(address, self._pattern[1] + start, done)
        self._repeat(address, done, size)
        return address

    def upload(self, array: Array) -> int:
        """Address of a copy of `array`, until `release`."""
        data = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        address = self.scratch(data.nbytes, "an operand of a trial")
        self._send(address, data)
        return address

    def _send(self, address: int, data: Array) -> None:
        for start in range(0, data.nbytes, _PATTERN_BYTES):
            part = data[start : start + _PATTERN_BYTES]
            self._pinned[: part.nbytes] = part
            self.stream.upload(address + start, self._pinned.ctypes.data, part.nbytes)
            self.stream.synchronize()

    def _repeat(self, address: int, done: int, size: int) -> None:
        """Fill memory with copies of its first `done` bytes."""
        while done < size:
            part = min(done, size - done)
            self.stream.copy(address + done, address, part)
            done += part

    def scratch(self, num_bytes: int, what: str) -> int:
        """Address of uninitialized memory, until `release`."""
        address = self.device.allocate(max(1, num_bytes), what)
        self._lent.append(address)
        return address

    def release(self) -> None:
        """Free everything but the pools."""
        while self._lent:
            self.device.free(self._lent.pop())

    def close(self) -> None:
        """Free everything."""
        self.release()
        if self._pattern is not None:
            self.device.free(self._pattern[1])
            self._pattern = None
        while self.pools:
            self.device.free(self.pools.pop())
        self.device.free_pinned(self._pinned)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """Steps on different pages, ready to launch.

    Attributes:
        request: what was planned for.
        steps: one per page table.
        launches: launches of each step by kernel path, in launch order.
        tables: page tables on the host, `[num_sets, N, M]` int32.
        query: address of the queries, `[T, Hq, D]`.
        output: address of the output, `[T, Hq, Dv]`.
    """

    request: AttentionPlanRequest
    steps: tuple[PreparedStep, ...]
    launches: tuple[tuple[tuple[str, Callable[[int], None]], ...], ...]
    tables: Array
    query: int
    output: int

    def calls(self, stream: int, *, only: Callable[[str], bool]) -> list[Callable[[], None]]:
        """One call per page table.

        Args:
            stream: where to launch.
            only: from the label of a launch to whether it takes part.
        """
        return [_call([each for label, each in step if only(label)], stream)
                for step in self.launches]  # fmt: skip


def is_attention(label: str) -> bool:
    """Whether a launch belongs to attention, and not to the append ahead of it."""
    return not is_append(label)


def is_append(label: str) -> bool:
    """Whether a launch writes new keys and values."""
    return label.startswith(KernelPath.APPEND.value)


def prepare_trial(
    memory: TrialMemory,
    request: AttentionPlanRequest,
    sizes: StepSizes,
    *,
    planner: Planner,
    num_sets: int | None = None,
    registry: KernelRegistry = KERNELS,
    make_launch: Callable[..., Callable[[int], None]] = KernelLaunch,
    seed: int = 0,
) -> Trial:
    """Operands on the device and the launches of every step.

    Args:
        memory: where they lie; what it lent before stays lent.
        request: of the step; its sizes must be those of `sizes`.
        sizes: of the step.
        planner: chooses the plan.
        num_sets: page tables that take turns; None for `sets_in_turn`.
        registry: where the kernels are.
        make_launch: as `KernelLaunch`.
        seed: of queries and page order.

    Raises:
        ConfigError: the pool is too small, or the sizes are not those of the request.
        KernelLaunchError: a kernel is not loaded.
        ExecutionError: there is too little memory.
    """
    shape, attention = request.step, request.attention
    if (shape.num_seqs, shape.num_tokens) != (len(sizes.kv_lens), sum(sizes.query_lens)):
        raise ConfigError(f"a request of {shape} is not for {len(sizes.kv_lens)} sequences")
    memory.fill(request.kv_cache_dtype)
    pool = pool_spec(memory.pool_bytes, attention, request.kv_cache_dtype)
    if num_sets is None:
        num_sets = sets_in_turn(sizes, attention, request.kv_cache_dtype, pool)
    tables = page_tables(sizes, pool, num_sets=num_sets, seed=seed)
    operands = _operands(memory, request, sizes, seed)
    output = memory.scratch(
        shape.num_tokens
        * attention.num_q_heads
        * attention.value_head_dim
        * request.activation_dtype.itemsize,
        "the output of a trial",
    )
    needed = planner.workspace_bytes(request)
    workspace = memory.scratch(needed, "the workspace of a trial")
    memory.stream.fill_zero(workspace, max(1, needed))
    operator = OperatorSpec(pool=pool, attention=attention)
    steps, launches = [], []
    stride = -(-tables[0].nbytes // _ALIGNMENT) * _ALIGNMENT
    table_bytes = np.zeros((num_sets, stride), np.uint8)
    table_bytes[:, : tables[0].nbytes] = tables.reshape(num_sets, -1).view(np.uint8)
    first_table = memory.upload(table_bytes)
    for index in range(num_sets):
        found: list[tuple[str, Callable[[int], None]]] = []

        def remember(
            *arguments: Any, into: list[Any] = found, label: str, **options: Any
        ) -> Callable[[int], None]:
            launch = make_launch(*arguments, label=label, **options)
            into.append((label, launch))
            return launch

        addresses = CallAddresses(
            operands=(*operands[:5], first_table + index * stride, *operands[5:]),
            token_strides=_token_strides(attention),
            output=output,
            workspace=workspace,
        )
        step = PreparedStep(
            request, operator, addresses, planner=planner, registry=registry, make_launch=remember
        )
        # Addresses reach the argument blocks as they do in the plugin.
        step.bind(addresses)
        steps.append(step)
        launches.append(tuple(found))
    memory.stream.synchronize()
    return Trial(
        request=request,
        steps=tuple(steps),
        launches=tuple(launches),
        tables=tables,
        query=operands[0],
        output=output,
    )


def pool_spec(pool_bytes: int, attention: AttentionSpec, kv: DType) -> KvPoolSpec:
    """Pages that fit into pools of a size.

    Raises:
        KvPoolError: not even one page fits.
    """
    widest = max(attention.head_dim, attention.value_head_dim)
    # Lengths are the tables' own: the kernels know the pool's page count only.
    return KvPoolSpec.fitting(pool_bytes, token_bytes=attention.num_kv_heads * widest * kv.itemsize)


def _operands(
    memory: TrialMemory, request: AttentionPlanRequest, sizes: StepSizes, seed: int
) -> list[int]:
    """Addresses of every operand but the page table, in the order of `Operand`."""
    attention, tokens = request.attention, request.step.num_tokens

    def numbers(heads: int, dim: int, salt: int) -> int:
        count = tokens * heads * dim
        return memory.random(request.activation_dtype, count, seed=3 * seed + salt)

    offsets = np.concatenate([[0], np.cumsum(sizes.query_lens)]).astype(np.int32)
    pasts = np.subtract(sizes.kv_lens, sizes.query_lens).astype(np.int32)
    scales = np.full((2, attention.num_kv_heads), pool_scale(request.kv_cache_dtype), np.float32)
    return [
        numbers(attention.num_q_heads, attention.head_dim, 0),
        numbers(attention.num_kv_heads, attention.head_dim, 1),
        numbers(attention.num_kv_heads, attention.value_head_dim, 2),
        *memory.pools,
        memory.upload(offsets),
        memory.upload(pasts),
        memory.upload(_rope_table(attention, max(sizes.kv_lens))),
        memory.upload(scales),
        memory.upload(np.full(attention.num_q_heads, -np.inf, np.float32)),
    ]


def pool_scale(kv: DType) -> float:
    """Scale under which what is read has about unit variance."""
    return 1.0 / _INT8_SPREAD if kv is DType.INT8 else 1.0


def _rope_table(attention: AttentionSpec, positions: int) -> Array:
    """`[positions, 2, rotary_dim / 2]` float32; `[1, 2, 1]` without rope."""
    if attention.rope is Rope.NONE:
        return np.array([[[1.0], [0.0]]], np.float32)
    half = attention.rotary_dim // 2
    angles = np.arange(positions)[:, None] * 10000.0 ** (-np.arange(half) / half)[None]
    return np.stack([np.cos(angles), np.sin(angles)], axis=1).astype(np.float32)


def _token_strides(attention: AttentionSpec) -> tuple[int, int, int]:
    return (
        attention.num_q_heads * attention.head_dim,
        attention.num_kv_heads * attention.head_dim,
        attention.num_kv_heads * attention.value_head_dim,
    )


def _call(launches: Sequence[Callable[[int], None]], stream: int) -> Callable[[], None]:
    def call() -> None:
        for launch in launches:
            launch(stream)

    return call

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
from paged_trt.plugins.device import KernelLaunch
from paged_trt.plugins.errors import ConfigError
from paged_trt.plugins.fields import OperatorSpec
from paged_trt.plugins.launch.dispatch import PreparedStep
from paged_trt.plugins.launch.kernels_decode import CallAddresses
from paged_trt.plugins.launch.loaded import KERNELS, KernelRegistry
from paged_trt.plugins.launch.planner import Planner
from paged_trt.plugins.launch.registry import KernelPath
from paged_trt.plugins.launch.requests import AttentionPlanRequest
from paged_trt.plugins.launch.step_sizes import StepSizes, page_tables, pool_spec, sets_in_turn
from paged_trt.plugins.launch.trial_memory import TrialMemory, pool_scale

Array = npt.NDArray[Any]
Launch = Callable[[int], None]
MakeLaunch = Callable[..., Launch]
_ALIGNMENT: Final = 256
"""Bytes, as of every allocation of CUDA."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """Steps on different pages, ready to launch.

    Attributes:
        request: what was planned for.
        launches: label and launch of each kernel of each step, in launch order.
        tables: page tables on the host, `[num_sets, N, M]` int32.
        query: address of the queries, `[T, Hq, D]`.
        output: address of the output, `[T, Hq, Dv]`.
    """

    request: AttentionPlanRequest
    launches: tuple[tuple[tuple[str, Launch], ...], ...]
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
    make_launch: MakeLaunch = KernelLaunch,
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
    output_elements = shape.num_tokens * attention.num_q_heads * attention.value_head_dim
    output = memory.scratch(
        output_elements * request.activation_dtype.itemsize, "the output of a trial"
    )
    needed = planner.workspace_bytes(request)
    workspace = memory.scratch(needed, "the workspace of a trial")
    memory.stream.fill(workspace, max(1, needed), byte=0)
    launches: list[list[tuple[str, Launch]]] = []
    for table in _upload_tables(memory, tables):
        launches.append([])
        addresses = CallAddresses(
            operands=(*operands[:5], table, *operands[5:]),
            token_strides=_token_strides(attention),
            output=output,
            workspace=workspace,
        )
        step = PreparedStep(
            request,
            OperatorSpec(pool=pool, attention=attention),
            addresses,
            planner=planner,
            registry=registry,
            make_launch=_remembering(make_launch, launches[-1]),
        )
        # Addresses reach the argument blocks as they do in the plugin.
        step.bind(addresses)
    memory.stream.synchronize()
    return Trial(
        request=request,
        launches=tuple(map(tuple, launches)),
        tables=tables,
        query=operands[0],
        output=output,
    )


def _remembering(make_launch: MakeLaunch, into: list[tuple[str, Launch]]) -> MakeLaunch:
    """`make_launch` that also notes each launch with its label."""

    def make(*arguments: Any, label: str, **options: Any) -> Launch:
        launch = make_launch(*arguments, label=label, **options)
        into.append((label, launch))
        return launch

    return make


def _upload_tables(memory: TrialMemory, tables: Array) -> list[int]:
    """Address of each page table, aligned as an allocation of its own would be."""
    stride = -(-tables[0].nbytes // _ALIGNMENT) * _ALIGNMENT
    padded = np.zeros((len(tables), stride), np.uint8)
    padded[:, : tables[0].nbytes] = tables.reshape(len(tables), -1).view(np.uint8)
    first = memory.upload(padded)
    return [first + index * stride for index in range(len(tables))]


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


def _call(launches: Sequence[Launch], stream: int) -> Callable[[], None]:
    def call() -> None:
        for launch in launches:
            launch(stream)

    return call

"""The gather path of prefill: what it covers, what it leaves in the workspace, whether it pays.

Only 16-bit pools have Hopper's kernel. The pages that a step reads out of an 8-bit pool are
gathered into the workspace, as pages of the activations' type, and that kernel attends from there.
Elements are gathered as they are, which both types hold exactly; the scales of the pool go into the
softmax scale and into the result. So nothing is rounded that the portable kernel does not round.
"""

from __future__ import annotations

import dataclasses
from typing import Final

from paged_trt.plugins.dtypes import DType
from paged_trt.plugins.errors import UnsupportedError
from paged_trt.plugins.kv import KvPoolSpec, bytes_of_pages, most_pages_read
from paged_trt.plugins.launch.kernels_decode import ELEMENT_TYPES, Grid, KernelBuild
from paged_trt.plugins.launch.kernels_prefill_sm90 import COUNTER_BYTES, HEAD_DIMS, refusal
from paged_trt.plugins.launch.registry import KernelKey, KernelPath
from paged_trt.plugins.launch.requests import AttentionPlanRequest

GATHERS_UNASKED: Final = True
"""Whether the planner may gather where `--attention-plan gather` does not say so. Every engine with
an 8-bit pool then has the workspace, so a change needs a new ABI_VERSION."""
UNASKED_HEAD_DIMS: Final = (64, 128)
"""Those that were right and faster on an H200: `tests/gpu/test_prefill_gather.py` and
`tests/gpu/bench_gather.py`."""
MOST_GATHERED_BYTES: Final = 256 * 2**20
"""Workspace that a step may take for gathered pages; beyond, it attends from the pool."""
FEWEST_ROWS: Final = 64
"""Query rows of a key, tokens times heads of a group, from which gathering pays.

Measured on an H200 (tests/bench/results/variants/gather-nvidia-h200-20261130.json): from 64 rows,
the fewest that were timed, whole steps take 0.20 to 0.69 of the portable kernel's time.
"""
THREADS: Final = 256
_ALIGNMENT: Final = 256
"""Bytes; what follows the pages in the workspace is aligned by itself."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class GatherWorkspace:
    """Where the parts of the workspace of a step that gathers are: keys come first.

    Attributes:
        pages: slots of gathered pages.
        key_bytes: of their keys.
        value_bytes: of their values.
        table_bytes: of the page table that names them.
    """

    pages: int
    key_bytes: int
    value_bytes: int
    table_bytes: int

    @property
    def table_offset(self) -> int:
        """Bytes in front of the page table."""
        return self.key_bytes + self.value_bytes

    @property
    def counter_offset(self) -> int:
        """Bytes in front of the counter of Hopper's kernel."""
        return self.table_offset + self.table_bytes

    @property
    def num_bytes(self) -> int:
        """Bytes of all."""
        return self.counter_offset + COUNTER_BYTES

    def addresses(self, workspace: int) -> dict[str, int]:
        """Fields of `GatherArgs` that lie in a workspace."""
        return {
            "gathered_keys": workspace,
            "gathered_values": workspace + self.key_bytes,
            "gathered_table": workspace + self.table_offset,
            "tile_counter": workspace + self.counter_offset,
        }

    def pool(self, request: AttentionPlanRequest) -> KvPoolSpec:
        """Gathered pages as Hopper's kernel knows them: a pool of their own."""
        return KvPoolSpec.fitting(self.key_bytes, token_bytes=_token_bytes(request)[0])


def gather_workspace(request: AttentionPlanRequest) -> GatherWorkspace:
    """Workspace of a step, however its tokens fall on its sequences."""
    step = request.step
    pages = most_pages_read(
        num_tokens=step.num_tokens,
        num_seqs=step.num_seqs,
        table_width=step.table_width,
        window=request.attention.window,
    )
    keys, values = (bytes_of_pages(pages, token_bytes=size) for size in _token_bytes(request))
    table = step.num_seqs * step.table_width * DType.INT32.itemsize
    aligned = -(-table // _ALIGNMENT) * _ALIGNMENT
    return GatherWorkspace(pages=pages, key_bytes=keys, value_bytes=values, table_bytes=aligned)


def _token_bytes(request: AttentionPlanRequest) -> tuple[int, int]:
    """Bytes of the gathered keys and values of a token."""
    attention, itemsize = request.attention, request.activation_dtype.itemsize
    row = attention.num_kv_heads * itemsize
    return row * attention.head_dim, row * attention.value_head_dim


def as_gathered(request: AttentionPlanRequest) -> AttentionPlanRequest:
    """What Hopper's kernel sees: a pool of the activations' type."""
    return dataclasses.replace(request, kv_cache_dtype=request.activation_dtype)


def layer_refusal(request: AttentionPlanRequest) -> str | None:
    """Why no step of a layer can gather; None where some can, or could on an unknown device."""
    if not request.kv_cache_dtype.is_quantised:
        return f"a {request.kv_cache_dtype.value} pool is read as it is"
    return refusal(dataclasses.replace(as_gathered(request), arch=request.arch or "sm_90"))


def size_refusal(request: AttentionPlanRequest) -> str | None:
    """Why a step of a layer that can gather does not; None where it can."""
    needed = gather_workspace(request).num_bytes
    if needed > MOST_GATHERED_BYTES:
        return f"{needed:,} bytes of workspace, over the limit of {MOST_GATHERED_BYTES:,}"
    return None


def most_gather_bytes(largest: AttentionPlanRequest) -> int:
    """Workspace that no gathering step up to the sizes of `largest` passes; 0 where none can."""
    if layer_refusal(largest) is not None:
        return 0
    # A step that is smaller than one beyond the limit may need all of it.
    return min(gather_workspace(largest).num_bytes, MOST_GATHERED_BYTES)


def query_rows(request: AttentionPlanRequest) -> int:
    """Query rows that a key serves, on average over the sequences and without a mask."""
    step = request.step
    return step.num_tokens * request.attention.group_size // step.num_seqs


def gather_build(key: KernelKey) -> KernelBuild:
    """The gather kernel of a key.

    Raises:
        UnsupportedError: the path is another one, or a type or dim is not covered.
    """
    if key.path is not KernelPath.GATHER:
        raise UnsupportedError(f"{key.path.value} is no gather kernel")
    if not key.kv_cache_dtype.is_quantised or not {key.head_dim, key.value_head_dim} <= {
        *HEAD_DIMS
    }:
        raise UnsupportedError(
            f"{key}: pages are gathered out of float8 and int8 pools of head dims {HEAD_DIMS}"
        )
    arguments = (
        ELEMENT_TYPES[key.activation_dtype],
        ELEMENT_TYPES[key.kv_cache_dtype],
        *(key.head_dim, key.value_head_dim),
    )
    return KernelBuild(
        source="gather.cu",
        name_expression=f"paged_trt::gather<{', '.join(map(str, arguments))}>",
        threads=THREADS,
        shared_bytes=0,
    )


def gather_grid(request: AttentionPlanRequest) -> Grid:
    """Grid of one launch: a block for each key head of each slot."""
    return (gather_workspace(request).pages * request.attention.num_kv_heads, 1, 1)

"""From one attention call to kernel launches, for one (N, T, M).

Everything that only shapes decide is done once and kept: plan, kernels, grids, argument blocks.
What only addresses decide is done when they change.
"""

from __future__ import annotations

import ctypes
import dataclasses
import logging
from collections.abc import Callable
from typing import Final

from paged_trt.plugins.device import KernelLaunch
from paged_trt.plugins.errors import KernelLaunchError
from paged_trt.plugins.fields import OperatorSpec
from paged_trt.plugins.launch.args import AppendArgs, PrefillSm90Args
from paged_trt.plugins.launch.gather import as_gathered, gather_workspace
from paged_trt.plugins.launch.kernels_decode import CallAddresses, fill_arguments
from paged_trt.plugins.launch.kernels_prefill_sm90 import (
    EncodeMap,
    refusal,
    set_pool_maps,
)
from paged_trt.plugins.launch.loaded import (
    ARGUMENT_STRUCTS,
    KERNELS,
    KernelRegistry,
    LoadedKernel,
    grid_of,
)
from paged_trt.plugins.launch.planner import Planner
from paged_trt.plugins.launch.plans import (
    AttentionPlan,
    Balanced,
    Cluster,
    Counter,
    Direct,
    PrefillPlan,
    SplitKv,
)
from paged_trt.plugins.launch.registry import DECODE_PATHS, SPECIALISED, KernelKey, KernelPath
from paged_trt.plugins.launch.requests import AttentionPlanRequest
from paged_trt.plugins.launch.workspace import (
    architecture,
    block_columns,
    decode_workspace,
    has_clusters,
    multiprocessors,
    plan_blocks,
)
from paged_trt.plugins.operands import Operand

OVERLAPPING: Final = frozenset({*DECODE_PATHS, KernelPath.MERGE, KernelPath.GATHER})
"""Kernels that may start before the one ahead of them has ended. Before they wait for it, they
read queries, lengths, page ids and tables only, which were there before the append started. The
append itself may follow the very kernel that wrote them."""
FIRST_OVERLAP_ARCH: Final = 90

_LOG: Final = logging.getLogger("paged_trt")

Launch = Callable[[int], None]
LaunchMaker = Callable[..., Launch]
_OPERAND_FIELDS: Final = tuple(operand.name.lower() for operand in Operand)
_WORKSPACE_FIELDS: Final = ("partial_output", "partial_lse", "counters")
_GATHERED_FIELDS: Final = ("gathered_keys", "gathered_values", "gathered_table", "tile_counter")
_ADDRESS_FIELDS: Final = frozenset(
    (*_OPERAND_FIELDS, "output", *_WORKSPACE_FIELDS, *_GATHERED_FIELDS)
)
_DECODE_KERNELS: Final[dict[type[AttentionPlan], tuple[KernelPath, ...]]] = {
    Direct: (KernelPath.DECODE_DIRECT,),
    Cluster: (KernelPath.DECODE_CLUSTER,),
    Counter: (KernelPath.DECODE_COUNTER,),
    Balanced: (KernelPath.DECODE_BALANCED,),
    SplitKv: (KernelPath.DECODE_SPLIT, KernelPath.MERGE),
}


def kernel_paths(
    request: AttentionPlanRequest, plan: AttentionPlan | PrefillPlan
) -> tuple[KernelPath, ...]:
    """Kernels of one step, in launch order.

    Raises:
        KernelLaunchError: the device has no kernel for the plan.
    """
    if isinstance(plan, PrefillPlan):
        gather = (KernelPath.GATHER,) if plan.gathers else ()
        return (KernelPath.APPEND, *gather, _prefill_path(plan))
    if not request.is_decode:
        return (KernelPath.APPEND, KernelPath.PREFILL)
    if isinstance(plan, Cluster) and not has_clusters(request.arch):
        raise KernelLaunchError(
            f"the attention plan {plan} needs sm_90 and the device is {request.arch}; build the "
            f"engine with `--attention-plan counter:{plan.blocks}` or `auto`"
        )
    columns = request.step.num_seqs * block_columns(request.attention)
    if isinstance(plan, Direct) and columns <= multiprocessors(request):
        # No more blocks than multiprocessors: those of the counter kernel are larger, and one is
        # enough.
        return (KernelPath.APPEND, KernelPath.DECODE_COUNTER)
    return (KernelPath.APPEND, *_DECODE_KERNELS[type(plan)])


def kernel_keys(
    request: AttentionPlanRequest, plan: AttentionPlan | PrefillPlan
) -> tuple[KernelKey, ...]:
    """Keys of the kernels of one step, in launch order.

    Raises:
        KernelLaunchError: the device has no kernel for the plan.
    """
    return tuple(KernelKey.of(path, request) for path in kernel_paths(request, plan))


def warm_keys(request: AttentionPlanRequest, *, gathers: bool = False) -> tuple[KernelKey, ...]:
    """Every kernel that a layer may launch, whatever N, T and M are.

    Args:
        request: any step of the layer.
        gathers: whether some of its steps may gather, as `PolicyPlanner.may_gather` says.
    """
    is_covered = refusal(request) is None
    unused = {KernelPath.PREFILL} if is_covered else set(SPECIALISED)
    if gathers:
        unused = set()
    else:
        unused.add(KernelPath.GATHER)
    if not has_clusters(request.arch):
        unused.add(KernelPath.DECODE_CLUSTER)
    return tuple(KernelKey.of(path, request) for path in KernelPath if path not in unused)


def _prefill_path(plan: PrefillPlan) -> KernelPath:
    if plan.kernel == "portable":
        return KernelPath.PREFILL
    return KernelPath.PREFILL_SM90 if plan.partitions == 1 else KernelPath.PREFILL_SM90_SPLIT


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Kernel:
    block: ctypes.Structure
    launch: Launch
    fields: tuple[str, ...]


class PreparedStep:
    """The launches of one attention layer for one (N, T, M).

    Args:
        request: sizes and types.
        operator: geometry of the layer.
        addresses: strides, and where the first launch finds everything.
        planner: chooses the kernels of a decode step.
        registry: where the kernels are.
        make_launch: as `KernelLaunch`.
        encode_map: as `tensor_maps.encode_pool_map`.

    Attributes:
        plan: what the planner chose.
        partitions: blocks that share keys, as `plan_blocks` counts them.

    Raises:
        KernelLaunchError: a kernel is not loaded.
    """

    def __init__(
        self,
        request: AttentionPlanRequest,
        operator: OperatorSpec,
        addresses: CallAddresses,
        *,
        planner: Planner,
        registry: KernelRegistry = KERNELS,
        make_launch: LaunchMaker = KernelLaunch,
        encode_map: EncodeMap | None = None,
    ) -> None:
        self.request = request
        planned = planner.plan(request)
        self.plan = planned.plan
        _LOG.debug("%s: %s, by %s", request.step, planned.plan, planned.source.value)
        self.paths = kernel_paths(request, self.plan)
        self.addresses = addresses
        self._operator = operator
        self._encode_map = encode_map
        self._decode_plan = Direct() if isinstance(self.plan, PrefillPlan) else self.plan
        self.partitions = plan_blocks(self._decode_plan, request)
        self._workspace = decode_workspace(
            self._decode_plan, request.attention, request.step, self.partitions
        )
        gathers = isinstance(self.plan, PrefillPlan) and self.plan.gathers
        self._gathered = gather_workspace(request) if gathers else None
        self._takes_tiles = isinstance(self.plan, PrefillPlan) and self.plan.takes_tiles
        # All are found before one is launched.
        loaded = [registry.find(key) for key in kernel_keys(request, self.plan)]
        self._kernels = [self._make(kernel, make_launch) for kernel in loaded]
        self._launches = tuple(kernel.launch for kernel in self._kernels)

    def bind(self, addresses: CallAddresses) -> None:
        """Write addresses into the argument blocks, for all launches from now on.

        Args:
            addresses: with the strides that the step was made with.
        """
        operands = dict(zip(_OPERAND_FIELDS, addresses.operands, strict=True))
        operands["output"] = addresses.output
        operands["partial_output"] = addresses.workspace
        operands["partial_lse"] = addresses.workspace + self._workspace.lse_offset
        operands["counters"] = addresses.workspace + self._workspace.counter_offset
        operands["tile_counter"] = 0
        operands |= self._gathered_addresses(addresses)
        for kernel in self._kernels:
            block = kernel.block
            for name in kernel.fields:
                setattr(block, name, operands[name])
            if isinstance(block, PrefillSm90Args):
                self._set_prefill_addresses(block, addresses)
        self.addresses = addresses

    def _gathered_addresses(self, addresses: CallAddresses) -> dict[str, int]:
        return {} if self._gathered is None else self._gathered.addresses(addresses.workspace)

    def _set_prefill_addresses(self, block: PrefillSm90Args, addresses: CallAddresses) -> None:
        request, pool = self.request, self._operator.pool
        counter = addresses.workspace + self._workspace.counter_offset
        keys, values = (addresses.operands[op] for op in (Operand.KEY_POOL, Operand.VALUE_POOL))
        if self._gathered is not None:
            request, pool = as_gathered(request), self._gathered.pool(request)
            keys, values, table, counter = self._gathered_addresses(addresses).values()
            block.page_table, block.num_pages = table, pool.num_pages
        block.tile_counter = counter if self._takes_tiles else 0
        set_pool_maps(block, keys, values, request=request, pool=pool, encode_map=self._encode_map)

    def launch(self, stream: int) -> None:
        """Launch every kernel on a stream; nothing waits or allocates.

        Raises:
            KernelLaunchError: the driver refused.
        """
        for launch in self._launches:
            launch(stream)

    def _cluster(self, path: KernelPath) -> int:
        if path is KernelPath.DECODE_CLUSTER:
            return self.partitions
        is_split = path in SPECIALISED and isinstance(self.plan, PrefillPlan)
        return self.plan.partitions if is_split else 1  # type: ignore[union-attr]

    def _make(self, kernel: LoadedKernel, make_launch: LaunchMaker) -> _Kernel:
        request, path = self.request, kernel.key.path
        block = fill_arguments(
            ARGUMENT_STRUCTS[path],
            self.addresses,
            attention=request.attention,
            pool=self._operator.pool,
            step=request.step,
            plan=self._decode_plan,
            blocks=self.partitions,
            gathered=self._gathered_addresses(self.addresses),
        )
        if isinstance(block, PrefillSm90Args):
            self._set_prefill_addresses(block, self.addresses)
        if isinstance(block, AppendArgs) and self._takes_tiles and self._gathered is None:
            block.num_counters = 1  # a gather clears its own
        launch = make_launch(
            kernel.function,
            block,
            grid=grid_of(
                kernel,
                request,
                partitions=self.partitions,
                plan=self.plan,
            ),
            threads=kernel.build.threads,
            shared_bytes=kernel.build.shared_bytes,
            overlaps=path in OVERLAPPING and architecture(request.arch) >= FIRST_OVERLAP_ARCH,
            cluster=self._cluster(path),
            label=str(kernel.key),
        )
        names = (name for name, *_ in block._fields_)
        return _Kernel(
            block=block, launch=launch, fields=tuple(n for n in names if n in _ADDRESS_FIELDS)
        )

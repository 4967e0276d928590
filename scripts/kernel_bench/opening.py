"""Opens a bench on a device: memory, graphs, the machine's limits, our kernels."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Sequence
from typing import Final

from paged_trt.plugins.device import Stream, kept_device
from paged_trt.plugins.dtypes import DType
from paged_trt.plugins.launch.plans import AttentionPlan
from paged_trt.plugins.launch.step_sizes import BYTES_IN_TURN
from paged_trt.plugins.launch.trial import is_attention
from paged_trt.plugins.launch.trial_memory import TrialMemory
from paged_trt.plugins.launch.tuned import TuningTarget
from paged_trt.plugins.launch.tuning_target import tuned_plans
from paged_trt.plugins.timing import DriverGraphs, Graphs
from paged_trt.scripts.kernel_bench.ceilings import measure_ceilings
from paged_trt.scripts.kernel_bench.cells import Cell
from paged_trt.scripts.kernel_bench.ours import OurKernels
from paged_trt.scripts.kernel_bench.peers import PeerData, make_data, our_data, relative_error
from paged_trt.scripts.kernel_bench.run import Bench
from paged_trt.scripts.kernel_bench.sweep import Sweep

FREE_PART: Final = 0.7
"""Of the free memory that the pools may take: other libraries need workspaces of their own."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class OpenKernels:
    """Kernels on a device, ready to be launched.

    Attributes:
        graphs: records and replays.
        memory: pools and operands.
        ours: our kernels.
    """

    graphs: Graphs
    memory: TrialMemory
    ours: OurKernels

    def data_of(self, cell: Cell) -> PeerData:
        """Tensors of a cell for other libraries; the graphs must be torch's."""
        self.memory.fill(cell.kv)
        return make_data(self.graphs, self.memory, cell, self.ours.tables(cell))


@contextlib.contextmanager
def open_kernels(
    ordinal: int,
    target: TuningTarget,
    cells: Sequence[Cell],
    *,
    with_torch: bool,
    explicit: AttentionPlan | None = None,
) -> Iterator[OpenKernels]:
    """Memory, graphs and our kernels on a device; arguments and errors as in `open_bench`."""
    device = kept_device(ordinal)
    with device.current(), contextlib.ExitStack() as stack:
        stream = Stream(device.driver)
        stack.callback(stream.close)
        graphs: Graphs
        if with_torch:
            from paged_trt.scripts.kernel_bench.torch_graphs import TorchGraphs

            graphs = TorchGraphs()
            handle = graphs.handle
        else:
            graphs = own = DriverGraphs(stream, driver=device.driver)
            stack.callback(own.close)
            handle = stream.handle
        size = pool_bytes(cells, device.free_bytes())
        memory = TrialMemory(device, stream, pool_bytes=size)
        stack.callback(memory.close)
        memory.fill(DType.BFLOAT16)
        ours = OurKernels(
            memory,
            graphs,
            stream=handle,
            arch=target.arch,
            num_multiprocessors=target.num_multiprocessors,
            tuned=tuned_plans(),
            explicit=explicit,
        )
        yield OpenKernels(graphs=graphs, memory=memory, ours=ours)


@contextlib.contextmanager
def open_bench(
    ordinal: int,
    target: TuningTarget,
    cells: Sequence[Cell],
    *,
    with_torch: bool,
    explicit: AttentionPlan | None = None,
) -> Iterator[Bench]:
    """A bench on a device, its ceilings measured; peers are added by the caller.

    Args:
        ordinal: number of the device.
        target: the device.
        cells: all that are going to be run.
        with_torch: record graphs with torch, which other libraries need.
        explicit: as in `OurKernels`.

    Raises:
        UnsupportedError: there is no device.
        ExecutionError: there is too little memory.
    """
    with open_kernels(ordinal, target, cells, with_torch=with_torch, explicit=explicit) as opened:
        graphs, memory, ours = opened.graphs, opened.memory, opened.ours
        limits = measure_ceilings(
            graphs,
            memory,
            stream=ours.stream,
            arch=target.arch,
            num_multiprocessors=target.num_multiprocessors,
        )
        yield Bench(
            graphs=graphs,
            memory=memory,
            ours=ours,
            peers=[],
            ceilings=limits,
            data_of=opened.data_of,
            our_error=(lambda cell: _our_error(graphs, memory, ours, cell)) if with_torch else None,
        )


@contextlib.contextmanager
def open_sweep(ordinal: int, target: TuningTarget, cells: Sequence[Cell]) -> Iterator[Sweep]:
    """A sweep on a device, its ceilings measured; no other package is needed.

    Args:
        ordinal: number of the device.
        target: the device.
        cells: all that are going to be run.

    Raises:
        UnsupportedError: there is no device.
        ExecutionError: there is too little memory.
    """
    with open_bench(ordinal, target, cells, with_torch=False) as bench:
        yield Sweep(
            graphs=bench.graphs,
            memory=bench.memory,
            stream=bench.ours.stream,
            arch=target.arch,
            num_multiprocessors=target.num_multiprocessors,
            ceilings=bench.ceilings,
        )


def pool_bytes(cells: Sequence[Cell], free: int) -> int:
    """Bytes of the keys, and of the values, for the largest cell; bounded by what is free."""
    largest = max(cell.sizes.kv_bytes(cell.attention, cell.kv) for cell in cells)
    # Half of a cell's bytes are keys; ragged sequences end inside of pages.
    wanted = max(2 * BYTES_IN_TURN, largest * 9 // 16)
    return min(wanted, int(free * FREE_PART) // 2)


def _our_error(graphs: Graphs, memory: TrialMemory, ours: OurKernels, cell: Cell) -> float:
    """Error of our result, as `relative_error`."""
    try:
        trial = ours.prepare(cell)
        data = our_data(graphs, memory, cell, trial)
        graphs.run(trial.calls(ours.stream, only=is_attention)[0])
        return relative_error(data, data.out, turn=0)
    finally:
        memory.release()

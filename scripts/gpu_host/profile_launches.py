"""What Nsight Compute profiles: one call of each cell and library, a marker kernel ahead of each.

The marker's grid is the number of the section, so that every launch in Nsight Compute's table has
a cell, whatever kernels a library launches.
"""

from __future__ import annotations

import ctypes
import dataclasses
import itertools
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

import click
import pydantic

from paged_trt.plugins import cuda
from paged_trt.plugins.cuda import check
from paged_trt.plugins.device import KernelLaunch, load_function
from paged_trt.plugins.errors import ConfigError, ExecutionError, PagedTrtError
from paged_trt.plugins.files import write_text
from paged_trt.plugins.launch.compiler import compile_arch
from paged_trt.plugins.launch.trial import is_append, is_attention
from paged_trt.plugins.launch.tuning_target import tuning_target
from paged_trt.plugins.timing import Call
from paged_trt.scripts.gpu_host.ending import end
from paged_trt.scripts.kernel_bench.cells import Cell, Family
from paged_trt.scripts.kernel_bench.misses import named_cells
from paged_trt.scripts.kernel_bench.opening import OpenKernels, open_kernels
from paged_trt.scripts.kernel_bench.peers import Peer, PeerError
from paged_trt.scripts.kernel_bench.profiled import PROFILED_PEERS, by_pool, profiled_cells
from paged_trt.scripts.kernel_bench.run import line_of_error

OURS: Final = "ours"
MARKER: Final = "section_marker"
WARM_UPS: Final = 2
MARKER_SOURCE: Final = f"""
struct MarkerArgs {{ unsigned unused; }};
extern "C" __global__ void {MARKER}(const MarkerArgs args) {{}}
"""


class MarkerArgs(ctypes.Structure):
    """As in the source above."""

    _fields_ = (("unused", ctypes.c_uint32),)


class Section(pydantic.BaseModel):
    """One call.

    Attributes:
        library: whose kernels are launched.
        cell: what `str` says of the cell.
        family: of the cell.
        row: the shape, as rows of a results file have it.
        plan: of our kernels; empty for other libraries.
        error: why it was not launched; empty where it was.
    """

    model_config = pydantic.ConfigDict(extra="forbid")

    library: str
    cell: str
    family: Family
    row: dict[str, Any]
    plan: str = ""
    error: str = ""


class Launches(pydantic.BaseModel):
    """Everything that was launched.

    Attributes:
        sections: the grid of a section's marker is its place, counted from 1.
        peers: version of each other library.
        note: why cells are missing; empty where none is.
    """

    model_config = pydantic.ConfigDict(extra="forbid")

    sections: list[Section] = []
    peers: dict[str, str] = {}
    note: str = ""

    def write(self, path: Path) -> None:
        """Write everything as JSON."""
        write_text(path, self.model_dump_json(indent=1) + "\n")


@dataclasses.dataclass(slots=True, kw_only=True)
class Launcher:
    """Launches sections.

    Attributes:
        path: file for `launches`, written anew after each section.
        mark: launches the marker of a section on a stream.
        driver: module of driver calls.
        peers: other libraries.
        launches: what was launched.
    """

    path: Path
    mark: Callable[[int, int], None]
    driver: Any
    peers: Sequence[Peer] = ()
    launches: Launches = dataclasses.field(default_factory=Launches)

    def run(self, opened: OpenKernels, cells: Sequence[Cell], *, deadline: float) -> bool:
        """Launch cells; whether all were begun before the deadline and the device still works."""
        for cell in cells:
            if time.monotonic() > deadline:
                self._note(f"not run from {cell} on: the time ended")
                return False
            try:
                self._cell(opened, cell)
            except ExecutionError as error:
                self._note(f"stopped at {cell}: {error}")
                return False
        return True

    def _cell(self, opened: OpenKernels, cell: Cell) -> None:
        only = is_append if cell.family is Family.APPEND else is_attention
        try:
            trial = opened.ours.prepare(cell)
            calls = trial.calls(opened.ours.stream, only=only)
            self._profile(opened, cell, OURS, calls, plan=opened.ours.plan_text(cell))
        except ExecutionError:
            raise
        except PagedTrtError as error:
            self._add(cell, OURS, error=line_of_error(error))
        finally:
            opened.memory.release()
        wanted = PROFILED_PEERS[cell.family]
        for peer in [each for each in self.peers if each.name in wanted]:
            try:
                calls = peer.prepare(opened.data_of(cell)).calls
                self._profile(opened, cell, peer.name, calls)
            except PeerError:
                # It says beforehand that this is no cell for it.
                continue
            except Exception as error:  # libraries have no base class in common
                self._add(cell, peer.name, error=line_of_error(error))
                opened.memory.stream.synchronize()  # a device that is lost ends the run

    def _profile(
        self, opened: OpenKernels, cell: Cell, library: str, calls: Sequence[Call], plan: str = ""
    ) -> None:
        graphs, stream = opened.graphs, opened.ours.stream
        for index in range(WARM_UPS):
            graphs.run(calls[index % len(calls)])
        number = len(self.launches.sections) + 1
        check(self.driver.cuProfilerStart(), "cuProfilerStart")
        try:
            graphs.run(lambda: self.mark(number, stream))
            graphs.run(calls[-1])
        finally:
            check(self.driver.cuProfilerStop(), "cuProfilerStop")
        self._add(cell, library, plan=plan)

    def _add(self, cell: Cell, library: str, *, plan: str = "", error: str = "") -> None:
        section = Section(
            library=library, cell=str(cell), family=cell.family, row=cell.row(), plan=plan,
            error=error,
        )  # fmt: skip
        self.launches.sections.append(section)
        self.launches.write(self.path)

    def _note(self, text: str) -> None:
        self.launches.note = text
        self.launches.write(self.path)


def marker(arch: str) -> Callable[[int, int], None]:
    """Launches the marker of a section on a stream, in the current context."""
    cubin = cuda.compile_cubin(MARKER_SOURCE, arch=compile_arch(arch))
    function = load_function(cubin.code, MARKER, shared_bytes=0)

    def mark(number: int, stream: int) -> None:
        launch = KernelLaunch(
            function, MarkerArgs(), grid=(number, 1, 1), threads=32, shared_bytes=0,
            overlaps=False, label=MARKER,
        )  # fmt: skip
        launch(stream)

    return mark


def chosen_cells(families: Sequence[str], names: Sequence[str]) -> list[Cell]:
    """Cells of families in turn; instead of the built-in choice those that are named.

    Raises:
        ConfigError: the family has no cell of a name, or there is more than one family.
    """
    if not names:
        # Whatever the time is enough for has cells of each family, the references first.
        turns = itertools.zip_longest(*(profiled_cells(Family(family)) for family in families))
        return [cell for turn in turns for cell in turn if cell is not None]
    if len(families) != 1:
        raise ConfigError(
            f"a cell is of one family and {len(families)} are chosen; pass `--cells` with one"
        )
    return named_cells(Family(families[0]), names)


@click.command()
@click.argument("path", type=click.Path(path_type=Path))
@click.option("--family", "families", multiple=True)
@click.option("--cell", "names", multiple=True)
@click.option("--peers", "with_peers", is_flag=True)
@click.option("--limit-s", type=float, required=True)
@click.option("--device", type=int, required=True)
def main(
    *,
    path: Path,
    families: tuple[str, ...],
    names: tuple[str, ...],
    with_peers: bool,
    limit_s: float,
    device: int,
) -> None:
    """Launch one call of each cell; `gpu_host.profile` runs this under Nsight Compute."""
    deadline = time.monotonic() + limit_s
    target = tuning_target(device)
    launcher: Launcher | None = None
    with tempfile.TemporaryDirectory(prefix="paged-trt-") as folder:
        for group in by_pool(chosen_cells(families, names)):
            with open_kernels(device, target, group, with_torch=with_peers) as opened:
                if launcher is None:
                    launcher = Launcher(path=path, mark=marker(target.arch), driver=cuda.driver())
                    if with_peers:
                        _find_peers(launcher, opened, Path(folder))
                if not launcher.run(opened, group, deadline=deadline):
                    return


def _find_peers(launcher: Launcher, opened: OpenKernels, folder: Path) -> None:
    from paged_trt.scripts.kernel_bench.libraries import find_peers

    wanted = {name for names in PROFILED_PEERS.values() for name in names}
    found = find_peers(opened.ours.stream, folder)
    launcher.peers = [peer for peer in found if peer.name in wanted]
    launcher.launches.peers = {peer.name: peer.version for peer in launcher.peers}


if __name__ == "__main__":
    end(main)

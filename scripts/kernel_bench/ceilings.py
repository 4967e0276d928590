"""Measured limits of the machine: what a kernel could reach at best, in the same run."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any, Final

from paged_trt.plugins import cuda, device
from paged_trt.plugins.device import KernelLaunch
from paged_trt.plugins.launch.compiler import compile_arch
from paged_trt.plugins.launch.trial_memory import TrialMemory
from paged_trt.plugins.timing import Graphs, measure

READ_BYTES: Final = 2**32
"""Over seventy times the largest second-level cache."""
_THREADS: Final = 512
_VARIANTS: Final = ((4, 4), (8, 2), (8, 4), (16, 2))
"""Loads in flight of a thread, blocks of a multiprocessor: the best of them counts."""
_MATMUL: Final = 8192
_SOURCE: Final = """
struct MoveArgs { const uint4* data; unsigned long long tiles; uint4* out; };
template <int kLoads, bool kCopies>
__global__ void __launch_bounds__(512) move_all(const MoveArgs args) {
  unsigned sum = 0;
  for (unsigned long long tile = blockIdx.x; tile < args.tiles; tile += gridDim.x) {
    const uint4* data = args.data + tile * (512ull * kLoads) + threadIdx.x;
    uint4 found[kLoads];
#pragma unroll
    for (int i = 0; i < kLoads; ++i)
      asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0,%1,%2,%3}, [%4];"
                   : "=r"(found[i].x), "=r"(found[i].y), "=r"(found[i].z), "=r"(found[i].w)
                   : "l"(data + i * 512));
#pragma unroll
    for (int i = 0; i < kLoads; ++i) {
      if (kCopies) args.out[tile * (512ull * kLoads) + threadIdx.x + i * 512] = found[i];
      else sum ^= found[i].x ^ found[i].y ^ found[i].z ^ found[i].w;
    }
  }
  // Never true but by chance: a sum that nobody reads would not be computed.
  if (!kCopies && sum == 0x5a17c0deu) args.out->x = sum;
}
"""


class MoveArgs(ctypes.Structure):
    """As in the source above."""

    _fields_ = (
        ("data", ctypes.c_uint64),
        ("tiles", ctypes.c_uint64),
        ("out", ctypes.c_uint64),
    )


def measure_ceilings(
    graphs: Graphs, memory: TrialMemory, *, stream: int, arch: str, num_multiprocessors: int
) -> dict[str, float]:
    """Read and copy bandwidth in GB/s and, where graphs are torch's, matmul TFLOP/s.

    Args:
        graphs: of the run.
        memory: pools with random contents.
        stream: handle of the stream that `graphs` records.
        arch: of the device, such as `sm_90`.
        num_multiprocessors: of the device.
    """
    size = min(READ_BYTES, memory.pool_bytes)
    names = {
        (copies, variant): f"move_all<{variant[0]}, {str(copies).lower()}>"
        for copies in (False, True)
        for variant in _VARIANTS
    }
    cubin = cuda.compile_cubin(
        _SOURCE, arch=compile_arch(arch), name_expressions=[*dict.fromkeys(names.values())]
    )
    best = {False: 0.0, True: 0.0}
    for (copies, (loads, blocks)), name in names.items():
        function = device.load_function(cubin.code, cubin.names[name], shared_bytes=0)
        tile = _THREADS * loads * 16
        # What a copy leaves in the other pool are random numbers as well.
        block = MoveArgs(data=memory.pools[0], tiles=size // tile, out=memory.pools[1])
        launch = KernelLaunch(
            function,
            block,
            grid=(num_multiprocessors * blocks, 1, 1),
            threads=_THREADS,
            shared_bytes=0,
            overlaps=False,
            label=name,
        )
        times = measure(graphs, [_on(launch, stream)], replays=5)
        moved = size // tile * tile * (2 if copies else 1)
        best[copies] = max(best[copies], moved / times.median / 1e3)
    found = {"read_GBs": round(best[False], 1), "copy_GBs": round(best[True], 1)}
    matmul = _matmul(graphs)
    return found if matmul is None else {**found, "matmul_TFLOPs": matmul}


def _on(launch: Callable[[int], None], stream: int) -> Callable[[], None]:
    return lambda: launch(stream)


def _matmul(graphs: Graphs) -> float | None:
    """Bfloat16 product of torch; None where the graphs are not torch's."""
    torch: Any = getattr(graphs, "torch", None)
    if torch is None:
        return None
    left, right = (
        torch.randn(_MATMUL, _MATMUL, device="cuda", dtype=torch.bfloat16) for _ in range(2)
    )
    out = torch.empty_like(left)
    torch.cuda.synchronize()
    times = measure(
        graphs,
        [lambda: torch.matmul(left, right, out=out)],
        replays=5,
        graph_microseconds=15_000,
    )
    return round(2 * _MATMUL**3 / times.median / 1e6, 1)

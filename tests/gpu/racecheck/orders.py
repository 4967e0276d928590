"""Runs `orders.cu` on a device, for racecheck to look at; `tests/README.md` says what it shows.

    compute-sanitizer --tool racecheck python tests/gpu/racecheck/orders.py

Prints whether the results of each order are right. The tool names the kernels of its reports.
"""

from __future__ import annotations

import ctypes
import sys
from pathlib import Path
from typing import Final

import numpy as np
import numpy.typing as npt

from paged_trt.plugins import cuda
from paged_trt.plugins.device import Device, KernelLaunch, Stream
from paged_trt.plugins.launch.sources import KERNEL_DIRECTORY

ORDERS: Final = (
    ("ByEveryThread", "ByEachFiller", "Stores"),
    ("ByEveryThread", "ByEachFiller", "Copies"),
    ("ByOneOfAWarp", "ByEachFiller", "Stores"),
    ("ByOneOfAWarp", "ByEachFiller", "Copies"),
    ("ByEveryThread", "ByOneWarp", "Stores"),
    ("ByEveryThread", "ByOneWarp", "Copies"),
    ("ByOneOfAWarp", "ByOneWarp", "Stores"),
    ("ByOneOfAWarp", "ByOneWarp", "Copies"),
    ("ByOneOfAWarp", "ByOneWarpThenEach", "Copies"),
)
"""Correct ones; the one before the last is the prefill kernel's."""
RACES: Final = (
    ("Early", "ByEachFiller", "Stores"),
    ("Early", "ByOneWarp", "Copies"),
    ("Unordered", "ByEachFiller", "Stores"),
    ("Unordered", "ByOneWarp", "Copies"),
)
BLOCKS, ROUNDS, THREADS, USERS, STAGE_BYTES = 2, 6, 384, 256, 16 * 1024


def name_of(order: tuple[str, str, str]) -> str:
    return f"paged_trt::hand_back<{', '.join('paged_trt::' + part for part in order)}>"


def compile_orders(arch: str = "sm_90a") -> cuda.Cubin:
    """Machine code of all orders."""
    source = Path(__file__).with_suffix(".cu").read_text(encoding="utf-8")
    return cuda.compile_cubin(
        source,
        arch=arch,
        name_expressions=[name_of(order) for order in ORDERS + RACES],
        include_directories=(KERNEL_DIRECTORY,),
    )


class HandBackArgs(ctypes.Structure):
    """As in `orders.cu`."""

    _fields_ = (
        ("source", ctypes.c_void_p),
        ("sums", ctypes.c_void_p),
        ("rounds", ctypes.c_int32),
    )


def expected_sums() -> npt.NDArray[np.uint32]:
    """What each user reads, `[BLOCKS, USERS]`: 16 words a round, of four lanes in a row."""
    lane = np.arange(USERS) % 32
    rounds = np.arange(ROUNDS)[:, None]
    sums = (16 * rounds + 16 * (4 * lane % 32) + 24).sum(axis=0, dtype=np.uint32)
    return np.tile(sums, (BLOCKS, 1))


def run(device: Device, function: object, label: str) -> npt.NDArray[np.uint32]:
    """Sums of one launch, `[BLOCKS, USERS]`."""
    stream = Stream(device.driver)
    sums = np.zeros((BLOCKS, USERS), np.uint32)
    args = HandBackArgs(
        source=device.allocate(STAGE_BYTES, "words"),
        sums=device.allocate(sums.nbytes, "sums"),
        rounds=ROUNDS,
    )
    stream.fill(args.source, STAGE_BYTES, byte=255)
    launch = KernelLaunch(
        function, args, grid=(BLOCKS, 1, 1), threads=THREADS, shared_bytes=0, overlaps=False,
        label=label,
    )  # fmt: skip
    launch(stream.handle)
    stream.download(sums.ctypes.data, args.sums, sums.nbytes)
    stream.synchronize()
    return sums


def main() -> int:
    """Run every order; 1 where one that is no race has a wrong result."""
    wrong = 0
    device = Device()
    with device.current():
        cubin = compile_orders()
        module = cuda.check(device.driver.cuModuleLoadData(cubin.code), "cuModuleLoadData")
        for order in ORDERS + RACES:
            name = cubin.names[name_of(order)].encode()
            function = cuda.check(device.driver.cuModuleGetFunction(module, name), "get function")
            is_right = np.array_equal(run(device, function, " ".join(order)), expected_sums())
            wrong += order in ORDERS and not is_right
            print(*order, "right" if is_right else "other sums")  # noqa: T201
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())

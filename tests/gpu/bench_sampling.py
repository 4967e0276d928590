"""Times the sampling kernel: CUDA-graph replay, median of each cell.

python tests/gpu/bench_sampling.py

Beside it stands the copy of the logits that it saves, and what torch takes for a softmax and one
multinomial draw, which is no top-k and no top-p.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))

from gpu.decode_device import launch, load_kernel, to_device
from sampling_cases import Spec

from paged_trt.plugins.dtypes import DType
from paged_trt.plugins.launch.args import SampleArgs
from paged_trt.plugins.launch.sampling import SampleRow, sample_build
from paged_trt.runtime.sampler import sample_rows

ROWS, VOCABULARIES = (1, 8, 64), (49_152, 128_256, 151_936)
WAYS = {
    "greedy": Spec(0.0, 0, 1.0, 0),
    "temperature": Spec(1.0, 0, 1.0, 1),
    "top-p 0.9": Spec(1.0, 0, 0.9, 1),
    "top-k 50, top-p 0.9": Spec(0.7, 50, 0.9, 1),
}
REPLAYS, LAUNCHES = 9, 20


def microseconds(work: Callable[[], Any]) -> float:
    """Time of one call, from graphs of LAUNCHES calls."""
    import torch

    work()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(LAUNCHES):
            work()
    graph.replay()
    times = []
    for _ in range(REPLAYS):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end) * 1000 / LAUNCHES)
    return statistics.median(times)


def cell(rows: int, vocab: int) -> dict[str, float]:
    """Times of each way, of the copy and of torch."""
    import torch

    build = sample_build(DType.BFLOAT16, DType.INT64, vocab_size=vocab)
    function = load_kernel(build.source, build.name_expression)
    # As a language model's: a few likely tokens over a wide rest.
    logits = (2.5 * torch.randn(rows, vocab, device="cuda")).to(torch.bfloat16)
    host = torch.empty(rows, vocab, dtype=torch.bfloat16, pin_memory=True)
    tokens = torch.zeros(rows, dtype=torch.int64, device="cuda")
    found = {}
    for name, spec in WAYS.items():
        block = (SampleRow * rows)(*sample_rows([spec] * rows, range(rows)))
        parameters = to_device(np.frombuffer(bytes(block), np.uint8))
        args = SampleArgs(
            logits=logits.data_ptr(),
            rows=parameters.data_ptr(),
            tokens=tokens.data_ptr(),
            logprobs=0,
            row_stride=vocab,
            num_seqs=rows,
            vocab_size=vocab,
        )

        def work(args: SampleArgs = args) -> None:
            launch(function, (rows, 1, 1), build.threads, args, is_programmatic=False)

        found[name] = microseconds(work)
    found["copy of the logits"] = microseconds(lambda: host.copy_(logits, non_blocking=True))
    found["torch softmax, multinomial"] = microseconds(
        lambda: torch.multinomial(torch.softmax(logits.float(), -1), 1)
    )
    return found


def main() -> None:
    """Print one line per cell."""
    for vocab in VOCABULARIES:
        for rows in ROWS:
            times = "  ".join(f"{name} {us:.1f}" for name, us in cell(rows, vocab).items())
            print(f"vocab {vocab:7d}  rows {rows:3d}  us: {times}")  # noqa: T201


if __name__ == "__main__":
    main()

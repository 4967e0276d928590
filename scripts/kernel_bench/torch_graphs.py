"""CUDA graphs of torch: libraries on torch record into them, and so do our launches."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from typing import Any

from paged_trt.plugins.timing import Call, Replay


class TorchGraphs:
    """Graphs on one stream of torch; implements `plugins.timing.Graphs`."""

    def __init__(self) -> None:
        self.torch: Any = importlib.import_module("torch")
        self.stream: Any = self.torch.cuda.Stream()
        self.handle = int(self.stream.cuda_stream)

    def record(self, calls: Sequence[Call]) -> Replay:
        """A graph of `calls`, in order; nothing of it has run yet."""
        torch = self.torch
        graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize()
        with torch.cuda.stream(self.stream):
            # torch.cuda.graph() collects garbage and empties the allocator's cache each time.
            graph.capture_begin(capture_error_mode="thread_local")
            try:
                for call in calls:
                    call()
            finally:
                graph.capture_end()
        return _TorchReplay(self, graph)

    def run(self, call: Callable[[], Any]) -> float:
        """Run one call, not recorded; its microseconds."""
        torch = self.torch
        # Tensors of a cell, and plans of libraries, are made on another stream.
        torch.cuda.synchronize()
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        with torch.cuda.stream(self.stream):
            begin.record()
            call()
            end.record()
        end.synchronize()
        return float(begin.elapsed_time(end)) * 1e3


class _TorchReplay:
    def __init__(self, graphs: TorchGraphs, graph: Any) -> None:
        self._graphs, self._graph = graphs, graph

    def __call__(self) -> float:
        return self._graphs.run(self._graph.replay)

    def close(self) -> None:
        self._graph.reset()

"""How exactly TensorRT multiplies float16 matrices here: rounding of its sums, beside float64.

python tests/gpu/bench_matmul.py [OUTPUT.json]

Says which part of the difference between an engine and onnxruntime is TensorRT's own: onnxruntime
on a CPU sums float16 products in float32. torch holds the memory.
"""

from __future__ import annotations

import datetime
import statistics
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from onnx import TensorProto, helper, numpy_helper

from paged_trt.plugins import cuda, trt
from paged_trt.scripts.machine import gpu_and_driver
from paged_trt.scripts.results import Results, commit

METHOD = (
    "y = x @ w of random normal float16 matrices, w / sqrt(K), as a network of one MatMul; error "
    "is the largest difference from the float64 product of the same inputs, in roundings 2^-11 of "
    "the largest value; time is the median of 20 executions of 20 each, by CUDA events"
)
SHAPES = [(8, 576, 1536), (8, 1536, 576), (8, 576, 49152), (256, 576, 1536)]


def model(rows: int, weight: Any, *, float32: bool) -> bytes:
    """One product, or the same with its operands cast to float32 and the result cast back."""
    depth, columns = weight.shape
    x = helper.make_tensor_value_info("x", TensorProto.FLOAT16, [rows, depth])
    y = helper.make_tensor_value_info("y", TensorProto.FLOAT16, [rows, columns])
    nodes = [helper.make_node("MatMul", ["x", "w"], ["y"])]
    if float32:
        nodes = [
            helper.make_node("Cast", ["x"], ["x32"], to=TensorProto.FLOAT),
            helper.make_node("Cast", ["w"], ["w32"], to=TensorProto.FLOAT),
            helper.make_node("MatMul", ["x32", "w32"], ["y32"]),
            helper.make_node("Cast", ["y32"], ["y"], to=TensorProto.FLOAT16),
        ]
    graph = helper.make_graph(nodes, "product", [x], [y], [numpy_helper.from_array(weight, "w")])
    made = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)
    return bytes(made.SerializeToString())


def run(serialized: bytes, x: Any, columns: int) -> tuple[Any, float]:
    """Output and microseconds of one execution."""
    api = trt.load()
    logger = trt.logger(trt.LogLines())
    builder = api.Builder(logger)
    network = trt.create_network(builder)
    parser = api.OnnxParser(network, logger)
    assert parser.parse(serialized)
    plan = builder.build_serialized_network(network, builder.create_builder_config())
    engine = api.Runtime(logger).deserialize_cuda_engine(plan)
    context = engine.create_execution_context()
    given = torch.from_numpy(x).cuda()
    found = torch.empty((len(x), columns), dtype=torch.float16, device="cuda")
    context.set_tensor_address("x", given.data_ptr())
    context.set_tensor_address("y", found.data_ptr())
    stream = torch.cuda.Stream()
    torch.cuda.synchronize()
    times = []
    for _ in range(21):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record(stream)
        for _ in range(20):
            assert context.execute_async_v3(stream.cuda_stream)
        end.record(stream)
        stream.synchronize()
        times.append(begin.elapsed_time(end) * 1e3 / 20)
    return found.cpu().numpy(), statistics.median(times[1:])


def rows() -> list[dict[str, Any]]:
    random = np.random.default_rng(0)
    measured = []
    for count, depth, columns in SHAPES:
        x = random.standard_normal((count, depth)).astype(np.float16)
        w = (random.standard_normal((depth, columns)) / depth**0.5).astype(np.float16)
        exact = x.astype(np.float64) @ w.astype(np.float64)
        unit = 2.0**-11 * np.abs(exact).max()
        for float32 in (False, True):
            found, microseconds = run(model(count, w, float32=float32), x, columns)
            measured.append(
                {
                    "rows": count,
                    "depth": depth,
                    "columns": columns,
                    "operands": "cast to float32" if float32 else "float16",
                    "error_roundings": float(np.abs(found - exact).max() / unit),
                    "us": microseconds,
                }
            )
    return measured


def main() -> None:
    gpu, driver = gpu_and_driver(0)
    results = Results(
        kind="engine",
        commit=commit(),
        date=datetime.datetime.now(tz=datetime.UTC).date(),
        gpu=gpu,
        driver=driver,
        cuda=cuda.nvrtc_version(),
        tensorrt=f"{trt.flavor()} {trt.version()}",
        method=METHOD,
        rows=rows(),
    )
    for row in results.rows:
        print(row)  # noqa: T201
    if len(sys.argv) > 1:
        results.write(Path(sys.argv[1]))


if __name__ == "__main__":
    main()

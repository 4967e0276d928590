"""The rewritten model without pools: it computes each step from the whole history.

`polygraphy run --onnxrt` runs one graph once and keeps nothing, so a paged model cannot carry
its pools there. This model has no pool inputs: pages begin as poison, all tokens of each
sequence are written through the step's page table, and keys and values are gathered in the
order of the tokens. An engine that carries its pools from step to step must agree.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import onnx
from onnx import helper, numpy_helper

from paged_trt.plugins.dtypes import DType
from paged_trt.plugins.errors import UnsupportedError
from paged_trt.plugins.files import write_bytes
from paged_trt.plugins.manifest import MODEL_FILE
from paged_trt.plugins.onnx_tensors import model_tensors
from paged_trt.plugins.tensors import (
    INPUT_IDS,
    LOGITS,
    NUM_SEQS,
    NUM_SEQS_PLUS_1,
    PAGE_TABLE,
    PAST_LENS,
    POSITION_IDS,
    QUERY_START_OFFSETS,
    TABLE_WIDTH,
    EngineSpec,
    LogitsMode,
    TensorSpec,
    key_pool_name,
    kv_scales_name,
    pool_output_name,
    value_pool_name,
)
from paged_trt.runtime.logical_kv import gathered_dtype, key_name, poison_byte, value_name
from paged_trt.runtime.polygraphy_steps import HISTORY_IDS, HISTORY_OFFSETS, HISTORY_POSITIONS
from paged_trt.runtime.reference_model import open_reference_model

Array = npt.NDArray[Any]
_PREFIX: Final = "recompute"
_FLOAT: Final = onnx.TensorProto.FLOAT


def write_recompute_model(
    engine_dir: Path, target: Path, *, spec: EngineSpec, kv_scales: Mapping[str, Array]
) -> Path:
    """Write the model as `target`/model.onnx, with its weights.

    Args:
        engine_dir: holds the rewritten model.
        target: an existing folder.
        spec: interface of the rewritten model.
        kv_scales: become constants of the model; empty unless the pools are quantised.

    Returns:
        Path of the model file.

    Raises:
        ManifestError: the rewritten model is no ONNX model.
        SpecMismatchError: it is not that of the engine.
        OSError: a file cannot be written.
    """
    source = engine_dir / MODEL_FILE
    with open_reference_model(source, spec).file() as file:
        model = onnx.load(file, load_external_data=False)
        _Rewiring(model.graph, spec).apply(kv_scales)
        for location in sorted(_external_files(model)):
            shutil.copyfile(file.parent / location, target / location)
    path = target / MODEL_FILE
    write_bytes(path, model.SerializeToString())
    return path


def _external_files(model: onnx.ModelProto) -> set[str]:
    return {
        entry.value
        for tensor in model_tensors(model)
        for entry in tensor.external_data
        if entry.key == "location"
    }


class _Rewiring:
    """Other inputs in front of a graph and other outputs behind it; its own nodes stay."""

    def __init__(self, graph: onnx.GraphProto, spec: EngineSpec) -> None:
        if any(value.name.startswith(f"{_PREFIX}.") for value in graph.initializer):
            raise UnsupportedError(f"the model has tensors named `{_PREFIX}.*`; rename them")
        self._graph, self._spec = graph, spec
        self._front: list[onnx.NodeProto] = []
        self._back: list[onnx.NodeProto] = []

    def apply(self, kv_scales: Mapping[str, Array]) -> None:
        """Change the graph."""
        for name, array in kv_scales.items():
            self._graph.initializer.append(numpy_helper.from_array(array, name))
        self._step_inputs()
        for pool in self._spec.pools():
            self._poisoned(pool)
        outputs = [self._logits(), *self._gathered()]
        nodes = [*self._front, *self._graph.node, *self._back]
        del self._graph.node[:], self._graph.input[:], self._graph.output[:]
        self._graph.node.extend(nodes)
        self._graph.input.extend(self._inputs())
        self._graph.output.extend(outputs)

    def _inputs(self) -> list[onnx.ValueInfoProto]:
        def value(name: str, element: int, *dims: int | str) -> onnx.ValueInfoProto:
            return helper.make_tensor_value_info(name, element, dims)

        int32, int64 = onnx.TensorProto.INT32, onnx.TensorProto.INT64
        inputs = [value(HISTORY_IDS, int64, 1, "num_history_tokens")]
        if self._spec.reads_position_ids:
            inputs.append(value(HISTORY_POSITIONS, int64, 1, "num_history_tokens"))
        return [
            *inputs,
            value(PAGE_TABLE, int32, NUM_SEQS, TABLE_WIDTH),
            value(HISTORY_OFFSETS, int32, NUM_SEQS_PLUS_1),
        ]

    def _step_inputs(self) -> None:
        """The history takes the place of a step, on pools that hold no token yet."""
        self._add(self._front, "Identity", [HISTORY_IDS], output=INPUT_IDS)
        if self._spec.reads_position_ids:
            self._add(self._front, "Identity", [HISTORY_POSITIONS], output=POSITION_IDS)
        self._add(self._front, "Identity", [HISTORY_OFFSETS], output=QUERY_START_OFFSETS)
        num_seqs = self._add(self._front, "Shape", [PAGE_TABLE], start=0, end=1)
        zero = numpy_helper.from_array(np.zeros(1, np.int32))
        self._add(self._front, "ConstantOfShape", [num_seqs], output=PAST_LENS, value=zero)

    def _poisoned(self, pool: TensorSpec) -> None:
        byte = np.full(pool.dtype.itemsize, poison_byte(pool.dtype), np.uint8)
        # No standard op fills a float8 tensor: a NaN goes by way of float32.
        number = byte.view(pool.dtype.numpy).astype(np.float32)
        filled = self._add(
            self._front,
            "ConstantOfShape",
            [self._constant(np.array([int(dim) for dim in pool.dims], np.int64))],
            value=numpy_helper.from_array(number),
        )
        self._add(self._front, "Cast", [filled], output=pool.name, to=pool.dtype.onnx)

    def _logits(self) -> onnx.ValueInfoProto:
        """Logits of the last token of each row, float32; 0 where a row is padding."""
        inner = f"{_PREFIX}.{LOGITS}"
        for node in self._graph.node:
            node.output[:] = [inner if name == LOGITS else name for name in node.output]
            node.input[:] = [inner if name == LOGITS else name for name in node.input]
        rows = inner
        if self._spec.logits_mode is LogitsMode.ALL:
            one, end = self._constant(np.array([1])), self._constant(np.array([2**31 - 1]))
            ends = self._add(self._back, "Slice", [HISTORY_OFFSETS, one, end])
            last = self._add(self._back, "Sub", [ends, self._constant(np.int32(1))])
            flat = self._add(self._back, "Squeeze", [inner, self._constant(np.array([0]))])
            rows = self._add(self._back, "Gather", [flat, last])
        wide = self._add(self._back, "Cast", [rows], to=_FLOAT)
        is_real = self._add(self._back, "Greater", [self._lengths(), self._constant(np.int32(0))])
        column = self._add(self._back, "Unsqueeze", [is_real, self._constant(np.array([1]))])
        self._where(column, wide, output=LOGITS)
        return helper.make_tensor_value_info(LOGITS, _FLOAT, [NUM_SEQS, self._spec.vocab_size])

    def _gathered(self) -> list[onnx.ValueInfoProto]:
        """Keys and values of each layer, `[N, num_kv_heads, M * 128, head_dim]`."""
        zero = self._constant(np.int32(0))
        table = self._add(self._back, "Max", [PAGE_TABLE, zero])
        values = []
        for index, layer in enumerate(self._spec.layers):
            sides = (
                (key_name(index), key_pool_name(index), layer.head_dim),
                (value_name(index), value_pool_name(index), layer.value_head_dim),
            )
            for side, (output, pool, head_dim) in enumerate(sides):
                dims = (layer.num_kv_heads, head_dim)
                scales = None
                if self._spec.kv_cache_dtype.is_quantised:
                    row = self._constant(np.int64(side))
                    scales = self._add(self._back, "Gather", [kv_scales_name(index), row])
                values.append(self._side(output, pool, table, dims=dims, scales=scales))
        return values

    def _side(
        self, output: str, pool: str, table: str, *, dims: tuple[int, int], scales: str | None
    ) -> onnx.ValueInfoProto:
        back, (heads, head_dim) = self._back, dims
        # onnxruntime gathers no float8.
        wide = self._add(back, "Cast", [pool_output_name(pool)], to=_FLOAT)
        tiles = self._add(back, "Gather", [wide, table])
        ordered = self._add(back, "Transpose", [tiles], perm=[0, 2, 1, 3, 4])
        shape = self._constant(np.array([0, heads, -1, head_dim], np.int64))
        rows = self._add(back, "Reshape", [ordered, shape])
        if scales is not None:
            axes = self._constant(np.array([1, 2], np.int64))
            rows = self._add(back, "Mul", [rows, self._add(back, "Unsqueeze", [scales, axes])])
        kept = self._where(self._is_token(rows), rows)
        element = gathered_dtype(self._spec)
        self._add(back, "Cast", [kept], output=output, to=element.onnx)
        return helper.make_tensor_value_info(
            output, element.onnx, [NUM_SEQS, heads, "table_tokens", head_dim]
        )

    def _is_token(self, rows: str) -> str:
        """`[N, 1, M * 128, 1]`: whether a position is before the end of its sequence."""
        back = self._back
        size = self._add(back, "Shape", [rows], start=2, end=3)
        scalar = self._add(back, "Squeeze", [size])
        zero, one = self._constant(np.int64(0)), self._constant(np.int64(1))
        positions = self._add(back, "Range", [zero, scalar, one])
        column = self._add(back, "Unsqueeze", [positions, self._constant(np.array([1]))])
        lengths = self._add(back, "Cast", [self._lengths()], to=DType.INT64.onnx)
        axes = self._constant(np.array([1, 2, 3], np.int64))
        return self._add(back, "Less", [column, self._add(back, "Unsqueeze", [lengths, axes])])

    def _lengths(self) -> str:
        """`[N]` int32: tokens of each sequence."""
        zero, one = self._constant(np.array([0])), self._constant(np.array([1]))
        ends = self._add(
            self._back, "Slice", [HISTORY_OFFSETS, one, self._constant(np.array([2**31 - 1]))]
        )
        starts = self._add(
            self._back, "Slice", [HISTORY_OFFSETS, zero, self._constant(np.array([-1]))]
        )
        return self._add(self._back, "Sub", [ends, starts])

    def _where(self, condition: str, value: str, *, output: str | None = None) -> str:
        zero = self._constant(np.float32(0))
        return self._add(self._back, "Where", [condition, value, zero], output=output)

    def _constant(self, array: Any) -> str:
        name = f"{_PREFIX}.constant.{len(self._graph.initializer)}"
        self._graph.initializer.append(numpy_helper.from_array(np.asarray(array), name))
        return name

    def _add(
        self,
        nodes: list[onnx.NodeProto],
        op_type: str,
        inputs: list[str],
        *,
        output: str | None = None,
        **attributes: Any,
    ) -> str:
        name = f"{_PREFIX}.{len(self._front)}.{len(self._back)}"
        output = output or name
        nodes.append(helper.make_node(op_type, inputs, [output], name=name, **attributes))
        return output

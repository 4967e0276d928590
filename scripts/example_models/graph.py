"""A thin writer over onnx-ir: named nodes, shared constants, weights that load when saved."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx_ir as ir

from paged_trt.plugins.dtypes import DType
from paged_trt.plugins.errors import ConfigError
from paged_trt.scripts.example_models.config import Dialect, LlamaConfig

FloatArray = npt.NDArray[Any]


class GraphWriter:
    """The graph under construction and what all its parts need to know.

    Args:
        config: shape of the model.
        weights: float arrays by Hugging Face name, `[out, in]`; an entry is read when the
            file is written, so a lazy mapping keeps memory low.
        dialect: how the graph is spelt.
        dtype: type of weights, activations and cache.
    """

    def __init__(
        self,
        config: LlamaConfig,
        weights: Mapping[str, FloatArray],
        *,
        dialect: Dialect,
        dtype: DType,
    ) -> None:
        self.config = config
        self.dialect = dialect
        self.dtype = dtype
        self.element_type = ir.DataType(dtype.onnx)
        self._weights = weights
        self._inputs: dict[str, ir.Value] = {}
        imports = {"": dialect.opset}
        if dialect.is_gqa:
            imports["com.microsoft"] = 1
        self.graph = ir.Graph([], [], nodes=[], opset_imports=imports, name="main_graph")

    def add_input(
        self, name: str, shape: Sequence[int | str], element_type: ir.DataType
    ) -> ir.Value:
        """Declares an input of the graph."""
        value = ir.val(name, dtype=element_type, shape=ir.Shape(shape))
        self.graph.inputs.append(value)
        self._inputs[name] = value
        return value

    def input(self, name: str) -> ir.Value:
        """An input of the graph that was declared before."""
        return self._inputs[name]

    def add_output(self, value: ir.Value, name: str, shape: Sequence[int | str]) -> None:
        """Makes a value an output of the graph, of the model's type."""
        value.name = name
        value.type = ir.TensorType(self.element_type)
        value.shape = ir.Shape(shape)
        self.graph.outputs.append(value)

    def op(
        self,
        op_type: str,
        inputs: Sequence[ir.Value | None],
        name: str,
        attributes: Mapping[str, Any] | None = None,
        *,
        domain: str = "",
    ) -> ir.Value:
        """Appends a node of one output."""
        return self.op_many(op_type, inputs, name, attributes, domain=domain, num_outputs=1)[0]

    def op_many(
        self,
        op_type: str,
        inputs: Sequence[ir.Value | None],
        name: str,
        attributes: Mapping[str, Any] | None = None,
        *,
        num_outputs: int,
        domain: str = "",
    ) -> Sequence[ir.Value]:
        """Appends a node; its outputs are named `<name>/output_<index>`."""
        node = ir.node(
            op_type,
            inputs,
            attributes=dict(attributes or {}),
            domain=domain,
            num_outputs=num_outputs,
            name=name,
        )
        for index, value in enumerate(node.outputs):
            value.name = f"{name}/output_{index}"
        self.graph.append(node)
        return node.outputs

    def integers(self, values: int | Sequence[int]) -> ir.Value:
        """An int64 constant, scalar or `[n]`; equal constants are one initializer."""
        return self.table(
            f"/model/constants/INT64/{values}", np.asarray(values, np.int64), ir.DataType.INT64
        )

    def floating(self, value: float) -> ir.Value:
        """A scalar float32 constant."""
        name = f"/model/constants/FLOAT/{value}"
        return self.table(name, np.asarray(value), ir.DataType.FLOAT)

    def table(self, name: str, array: FloatArray, element_type: ir.DataType) -> ir.Value:
        """An initializer computed here; asked for twice by one name it is the same."""
        if name in self.graph.initializers:
            return self.graph.initializers[name]
        tensor = ir.tensor(array.astype(element_type.numpy(), order="C"), name=name)
        return self._register(name, tensor)

    def weight(self, *names: str, transposed: bool = False, name: str | None = None) -> ir.Value:
        """An initializer of one weight, or of several stacked along `out`.

        Args:
            names: Hugging Face names, each `[out, in]`.
            transposed: store `[in, out]`, ready for MatMul.
            name: of the initializer; by default the first of `names`.
        """
        name = name or names[0]
        if name in self.graph.initializers:
            return self.graph.initializers[name]
        for each in names:
            if each not in self._weights:
                raise ConfigError(f"weight `{each}` is missing; pass all of `weight_shapes()`")
        shapes = [self.config.weight_shapes()[each] for each in names]
        shape = (sum(each[0] for each in shapes), *shapes[0][1:])

        def load() -> ir.TensorProtocol:
            array = np.concatenate([self._checked(each) for each in names])
            array = array.astype(self.dtype.numpy)
            return ir.tensor(np.ascontiguousarray(array.T if transposed else array), name=name)

        if len(shape) == 1:
            # Small, and shape inference reads it: an error in it must not come from there.
            return self._register(name, load())
        tensor = ir.LazyTensor(
            load,
            dtype=self.element_type,
            shape=ir.Shape(shape[::-1] if transposed else shape),
            name=name,
        )
        return self._register(name, tensor)

    def _checked(self, name: str) -> FloatArray:
        array, shape = self._weights[name], self.config.weight_shapes()[name]
        if array.shape != shape:
            raise ConfigError(
                f"weight `{name}` has shape {list(array.shape)}, the configuration says "
                f"{list(shape)}; correct one of them"
            )
        return array

    def _register(self, name: str, tensor: ir.TensorProtocol) -> ir.Value:
        value = ir.Value(
            name=name,
            type=ir.TensorType(tensor.dtype),
            shape=ir.Shape(tensor.shape.numpy()),
            const_value=tensor,
        )
        self.graph.register_initializer(value)
        return value

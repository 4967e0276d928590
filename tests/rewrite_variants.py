"""Changes of toy models, in place: what other exporters write, and what is refused."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import onnx_ir as ir

Change = Callable[[ir.Model], None]


def attention_nodes(model: ir.Model) -> list[ir.Node]:
    names = {"Attention", "GroupQueryAttention", "PagedAttention"}
    return [node for node in model.graph if node.op_type in names]


def constant(model: ir.Model, name: str, array: np.ndarray) -> ir.Value:
    tensor = ir.tensor(array, name=name)
    value = ir.Value(
        name=name, type=ir.TensorType(tensor.dtype), shape=tensor.shape, const_value=tensor
    )
    model.graph.register_initializer(value)
    return value


def add(
    model: ir.Model,
    op_type: str,
    inputs: Sequence[ir.Value | None],
    attributes: dict[str, object] | None = None,
    *,
    shape: Sequence[object] | None = None,
    dtype: ir.DataType | None = None,
) -> ir.Value:
    """A node at the end of the graph, which is to be sorted."""
    node = ir.Node("", op_type, inputs, ir.convenience.convert_attributes(attributes or {}))
    node.name = f"variant_{op_type}_{len(model.graph)}"
    node.outputs[0].name = f"{node.name}_output"
    if shape is not None:
        node.outputs[0].shape = ir.Shape(shape)
    if dtype is not None:
        node.outputs[0].dtype = dtype
    model.graph.append(node)
    return node.outputs[0]


def set_input(node: ir.Node, index: int, value: ir.Value | None) -> None:
    if index >= len(node.inputs):
        node.resize_inputs(index + 1)
    node.replace_input_with(index, value)


def value_named(model: ir.Model, name: str) -> ir.Value:
    for node in model.graph:
        for output in node.outputs:
            if output.name == name:
                return output
    return next(each for each in model.graph.inputs if each.name == name)


def set_attributes(**attributes: object) -> Change:
    def change(model: ir.Model) -> None:
        for node in attention_nodes(model):
            node.attributes.update(
                {a.name: a for a in ir.convenience.convert_attributes(attributes)}
            )

    return change


def drop_mask(model: ir.Model) -> None:
    for node in attention_nodes(model):
        set_input(node, 3, None)


def causal_without_mask(model: ir.Model) -> None:
    drop_mask(model)
    set_attributes(is_causal=1)(model)


def left_window(model: ir.Model) -> None:
    """A window of 100 keys by the attribute of opset 25."""
    model.opset_imports[""] = 25
    model.ir_version = 13
    causal_without_mask(model)
    set_attributes(left_window_size=99)(model)


def right_window(model: ir.Model) -> None:
    """Causal by `right_window_size` alone, with a window of 100 keys."""
    left_window(model)
    set_attributes(is_causal=0, right_window_size=0)(model)


def additive_mask(hidden: float) -> Change:
    def change(model: ir.Model) -> None:
        mask = attention_nodes(model)[0].inputs[3]
        numbers = [
            constant(model, f"variant_{name}", np.array(number, np.float16))
            for name, number in (("visible", 0.0), ("hidden", hidden))
        ]
        additive = add(model, "Where", [mask, *numbers])
        for node in attention_nodes(model):
            set_input(node, 3, additive)
        model.graph.sort()

    return change


def mask_cut_to_the_keys(model: ir.Model) -> None:
    """The mask sliced by the length of a layer's keys, and hidden states reshaped by their own."""
    first = attention_nodes(model)[0]
    present = first.inputs[1]
    while present.producer().op_type != "Concat":
        present = present.producer().inputs[0]
    mask = first.inputs[3]
    shape = add(model, "Shape", [present], {"start": 2, "end": 3})
    start, axis = (constant(model, f"variant_{i}", np.array([i], np.int64)) for i in (0, 3))
    cut = add(model, "Slice", [mask, start, shape, axis])
    for node in attention_nodes(model):
        set_input(node, 3, cut)
    head = model.graph.outputs[0].producer()
    hidden = head.inputs[0]
    set_input(head, 0, add(model, "Reshape", [hidden, add(model, "Shape", [hidden])]))
    model.graph.sort()


def three_dimensional(model: ir.Model) -> None:
    """Query, key, value and output of Attention as `[batch, tokens, heads * size]`."""
    _flatten(model, num_kv_heads=2)


def three_dimensional_repeated(model: ir.Model) -> None:
    """The same behind Concat(past, new) and repeated heads."""
    _flatten(model, num_kv_heads=4)


def three_dimensional_concat(model: ir.Model) -> None:
    """The same behind Concat(past, new) alone."""
    for node in attention_nodes(model):
        for index in (1, 2):
            present = node.inputs[index]
            while present.producer().op_type != "Concat":
                present = present.producer().inputs[0]
            set_input(node, index, present)
    _flatten(model, num_kv_heads=2)


def _flatten(model: ir.Model, *, num_kv_heads: int) -> None:
    flat = constant(model, "variant_flat", np.array([0, 0, -1], np.int64))
    for node in attention_nodes(model):
        for index, heads in enumerate((4, num_kv_heads, num_kv_heads)):
            turned = add(model, "Transpose", [node.inputs[index]], {"perm": [0, 2, 1, 3]})
            shape = ["batch_size", "total" if index else "sequence_length", heads * 64]
            set_input(node, index, add(model, "Reshape", [turned, flat], shape=shape))
        old = node.outputs[0]
        old.shape = None
        readers = list(old.uses())
        split = constant(model, f"variant_split_{node.name}", np.array([0, 0, 4, 64], np.int64))
        heads_last = add(model, "Reshape", [old, split])
        back = add(model, "Transpose", [heads_last], {"perm": [0, 2, 1, 3]})
        for reader, index in readers:
            reader.replace_input_with(index, back)
    set_attributes(q_num_heads=4, kv_num_heads=num_kv_heads)(model)
    model.graph.sort()


def positions_from_past_length(model: ir.Model) -> None:
    """No `position_ids` input: `Range(past, past + new)`."""
    axes = constant(model, "variant_axes", np.array([0], np.int64))
    positions = add(model, "Unsqueeze", [value_named(model, "/model/mask/Range/output_0"), axes])
    _replace_position_ids(model, positions)


def positions_from_attention_mask(model: ir.Model) -> None:
    """No `position_ids` input: the last columns of `CumSum(attention_mask) - 1`."""
    one = constant(model, "variant_one", np.array([1], np.int64))
    axis = constant(model, "variant_axis", np.array(1, np.int64))
    ends = constant(model, "variant_ends", np.array([2**62], np.int64))
    counted = add(model, "CumSum", [value_named(model, "attention_mask"), axis])
    shifted = add(model, "Sub", [counted, one])
    new = add(model, "Neg", [value_named(model, "/model/Shape_2/output_0")])
    _replace_position_ids(model, add(model, "Slice", [shifted, new, ends, one]))


def _replace_position_ids(model: ir.Model, positions: ir.Value) -> None:
    old = value_named(model, "position_ids")
    for node, index in list(old.uses()):
        node.replace_input_with(index, positions)
    model.graph.inputs.remove(old)
    model.graph.sort()


def head_sinks(model: ir.Model) -> None:
    sinks = constant(model, "variant_sinks", np.array([0.5, 2.0, -1.0, 4.0], np.float16))
    for node in attention_nodes(model):
        set_input(node, 11, sinks)


def partial_rotary(model: ir.Model) -> None:
    """Only the first half of each head rotates."""
    for name in ("cos_cache", "sin_cache"):
        value = model.graph.initializers[name]
        tensor = ir.tensor(value.const_value.numpy()[:, :16].copy(), name=name)
        value.const_value, value.shape = tensor, tensor.shape


def layers_that_differ(model: ir.Model) -> None:
    """The second layer has 8 heads of 32 on 4 of the cache, and a window; the first has 4 on 2."""
    node = attention_nodes(model)[1]
    attributes = {"num_heads": 8, "kv_num_heads": 4, "local_window_size": 9}
    node.attributes.update({a.name: a for a in ir.convenience.convert_attributes(attributes)})
    for cache in (*node.inputs[3:5], *node.outputs[1:3]):
        assert cache is not None
        cache.shape = ir.Shape(["batch_size", 4, "past_sequence_length", 32])
    tables = {}
    for name in ("cos_cache", "sin_cache"):
        array = model.graph.initializers[name].const_value.numpy()
        tables[name] = constant(model, f"variant_{name}", array[:, :16].copy())
    rotating = [value.producer() for value in node.inputs[:2] if value is not None]
    for each in (node, *rotating):
        for index, value in enumerate(each.inputs):
            if value is not None and value.name in tables:
                set_input(each, index, tables[value.name])


def group_query_positions(model: ir.Model) -> None:
    """GroupQueryAttention with `position_ids`."""
    positions = ir.Value(
        name="position_ids",
        type=ir.TensorType(ir.DataType.INT64),
        shape=ir.Shape(["batch_size", "sequence_length"]),
    )
    model.graph.inputs.append(positions)
    for node in attention_nodes(model):
        set_input(node, 9, positions)


def no_scale(model: ir.Model) -> None:
    for node in attention_nodes(model):
        node.attributes.pop("scale")


def scaled_logits(model: ir.Model) -> None:
    """`30 * tanh(logits / 30)` behind the head."""
    logits = model.graph.outputs[0]
    bound = constant(model, "variant_bound", np.array(30.0, np.float16))
    divided = add(model, "Div", [logits, bound])
    result = add(model, "Mul", [add(model, "Tanh", [divided]), bound])
    result.type, result.shape = logits.type, logits.shape
    logits.name, result.name = "variant_raw_logits", "logits"
    model.graph.outputs[0] = result


def scatter_cache(model: ir.Model) -> None:
    """Caches of fixed length that TensorScatter writes; the valid length is computed."""
    causal_without_mask(model)
    model.opset_imports[""] = 24
    indices = _length_input(model, "write_indices")
    ids = value_named(model, "input_ids")
    new = add(model, "Shape", [ids], {"start": 1, "end": 2})
    length = add(model, "Add", [indices, new])
    for node in attention_nodes(model):
        for slot in (1, 2):
            cache, present = node.inputs[slot + 3], node.outputs[slot]
            cache.shape = ir.Shape(["batch_size", 2, "max_sequence_length", 64])
            name, type_ = present.name, present.type
            present.name = f"variant_dense_{name}"
            written = add(model, "TensorScatter", [cache, node.inputs[slot], indices])
            set_input(node, slot, written)
            set_input(node, slot + 3, None)
            written.name, written.type, written.shape = name, type_, cache.shape
            position = list(model.graph.outputs).index(present)
            model.graph.outputs[position] = written
        node.resize_outputs(1)
        set_input(node, 6, length)
    model.graph.sort()


def scatter_cache_of_the_caller(model: ir.Model) -> None:
    """The same, with the valid length as an input."""
    scatter_cache(model)
    length = _length_input(model, "nonpad_kv_seqlen")
    for node in attention_nodes(model):
        set_input(node, 6, length)


def scatter_positions(model: ir.Model) -> None:
    """The same, with positions counted from `write_indices`."""
    scatter_cache(model)
    zero, one = (constant(model, f"variant_{i}", np.array(i, np.int64)) for i in (0, 1))
    axis = constant(model, "variant_axis", np.array([0], np.int64))
    ids = value_named(model, "input_ids")
    new = add(model, "Squeeze", [add(model, "Shape", [ids], {"start": 1, "end": 2})])
    counted = add(model, "Range", [zero, new, one])
    shifted = add(model, "Add", [counted, value_named(model, "write_indices")])
    _replace_position_ids(model, add(model, "Unsqueeze", [shifted, axis]))


def _length_input(model: ir.Model, name: str) -> ir.Value:
    value = ir.Value(
        name=name, type=ir.TensorType(ir.DataType.INT64), shape=ir.Shape(["batch_size"])
    )
    model.graph.inputs.append(value)
    return value


def hidden(model: ir.Model) -> ir.Value:
    """What the LM head reads, `[1, tokens, 128]`."""
    found = model.graph.outputs[0].producer().inputs[0]
    assert found is not None
    return found


def replace_hidden(model: ir.Model, value: ir.Value) -> None:
    set_input(model.graph.outputs[0].producer(), 0, value)

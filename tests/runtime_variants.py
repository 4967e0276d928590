"""Toy models as onnxruntime-genai spells them: paged, with head norms, with windowed caches."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
import rewrite_variants as variants

HEADS, KV_HEADS, SIZE = 4, 2, 64
STEP_INPUTS = {
    "block_table": ["batch_size", "max_num_blocks"],
    "cumulative_sequence_lengths": ["batch_size + 1"],
    "past_sequence_lengths": ["batch_size"],
    "attention_metadata": [3],
}
NORM_WEIGHTS = {
    name: np.random.default_rng(seed).uniform(0.5, 1.5, SIZE).astype(np.float16)
    for seed, name in enumerate(("q", "k"))
}


def paged(model: ir.Model) -> None:
    """com.microsoft PagedAttention on packed tokens, of a GroupQueryAttention toy."""
    graph = model.graph
    inputs = {
        name: ir.Value(name=name, type=ir.TensorType(ir.DataType.INT32), shape=ir.Shape(shape))
        for name, shape in STEP_INPUTS.items()
    }
    for node in list(variants.attention_nodes(model)):
        query, key, value, key_cache, value_cache = node.inputs[:5]
        for cache in (key_cache, value_cache, *node.outputs[1:3]):
            cache.shape = ir.Shape(["num_blocks", "block_size", KV_HEADS, SIZE])
        lengths = [
            inputs[name]
            for name in ("cumulative_sequence_lengths", "past_sequence_lengths", "block_table")
        ]
        operands = [query, key, value, key_cache, value_cache, *lengths, *node.inputs[7:9]]
        norms = [node.inputs[index] for index in (14, 15) if index < len(node.inputs)]
        operands += [None] * (12 - len(operands)) + norms
        operands += [None] * (16 - len(operands)) + [inputs["attention_metadata"]]
        node.resize_inputs(len(operands))
        for index, operand in enumerate(operands):
            node.replace_input_with(index, operand)
        node.op_type = "PagedAttention"
    for node in graph:
        for output in node.outputs:
            if not output.is_graph_output():
                output.shape = None
    variants.value_named(model, "input_ids").shape = ir.Shape(["num_tokens"])
    graph.outputs[0].shape = ir.Shape(["num_tokens", 512])
    graph.inputs.remove(variants.value_named(model, "attention_mask"))
    graph.inputs.extend(inputs.values())
    dead = [node for node in graph if "attn_mask_reformat" in str(node.name)]
    graph.remove(dead, safe=False)


def paged_slots(model: ir.Model) -> None:
    """The same, with the place of each token as an input of the graph."""
    paged(model)
    slots = ir.Value(
        name="slot_mapping", type=ir.TensorType(ir.DataType.INT32), shape=ir.Shape(["num_tokens"])
    )
    model.graph.inputs.append(slots)
    for node in variants.attention_nodes(model):
        variants.set_input(node, 10, slots)


def norm_inputs(model: ir.Model) -> None:
    """Head norms as inputs of GroupQueryAttention, which onnxruntime's CPU kernel refuses."""
    for node in variants.attention_nodes(model):
        for index, (name, weight) in enumerate(NORM_WEIGHTS.items(), start=14):
            variants.set_input(node, index, _weight(model, name, weight))
    variants.set_attributes(qk_norm_epsilon=1e-3)(model)


def norm_nodes(model: ir.Model) -> None:
    """The same norms as nodes before GroupQueryAttention."""
    widths = [HEADS * SIZE, KV_HEADS * SIZE, KV_HEADS * SIZE]
    sizes = variants.constant(model, "variant_widths", np.array(widths, np.int64))
    for node in variants.attention_nodes(model):
        split = ir.Node("", "Split", [node.inputs[0], sizes], [ir.AttrInt64("axis", 2)],
                        num_outputs=3, name=f"variant_split_{node.name}")  # fmt: skip
        model.graph.append(split)
        heads = variants.constant(model, f"h_{node.name}", np.array([0, 0, -1, SIZE], np.int64))
        flat = variants.constant(model, f"f_{node.name}", np.array([0, 0, -1], np.int64))
        for index, value in enumerate(split.outputs):
            value.name = f"{split.name}_{index}"
            if index < 2:
                name = "qk"[index]
                normed = variants.add(
                    model,
                    "SimplifiedLayerNormalization",
                    [
                        variants.add(model, "Reshape", [value, heads]),
                        _weight(model, name, NORM_WEIGHTS[name]),
                    ],
                    {"axis": -1, "epsilon": 1e-3},
                )
                value = variants.add(model, "Reshape", [normed, flat])
            variants.set_input(node, index, value)
    model.graph.sort()


def _weight(model: ir.Model, name: str, array: np.ndarray) -> ir.Value:
    full = f"variant_{name}_norm"
    found = model.graph.initializers.get(full)
    return variants.constant(model, full, array) if found is None else found


def window(model: ir.Model) -> None:
    variants.set_attributes(local_window_size=90)(model)


def windowed_cache(model: ir.Model) -> None:
    window(model)
    variants.set_attributes(sliding_window_cache=1)(model)


def open_head_size(model: ir.Model) -> None:
    """Caches whose last dimension has a name, as quantised ones share the export."""
    for node in variants.attention_nodes(model):
        query = node.inputs[0]
        query.shape = ir.Shape(["b", "s", (HEADS + 2 * KV_HEADS) * SIZE])
        for cache in (*node.inputs[3:5], *node.outputs[1:3]):
            cache.shape = ir.Shape([*cache.shape.dims[:3], "kv_cache_dim"])


def multi_head(model: ir.Model) -> None:
    """com.microsoft MultiHeadAttention after Concat and repeated heads, with an additive mask."""
    variants.additive_mask(-65504.0)(model)
    flat = variants.constant(model, "variant_flat", np.array([0, 0, -1], np.int64))
    split = variants.constant(model, "variant_heads", np.array([0, 0, HEADS, SIZE], np.int64))
    dense = list(variants.attention_nodes(model))
    for node in dense:
        operands = []
        for value in node.inputs[:3]:
            turned = variants.add(model, "Transpose", [value], {"perm": [0, 2, 1, 3]})
            operands.append(variants.add(model, "Reshape", [turned, flat]))
        operands[0].shape = ir.Shape(["b", "s", HEADS * SIZE])
        operands[0].dtype = ir.DataType.FLOAT16
        scale = node.attributes["scale"]
        fused = ir.Node(
            "com.microsoft",
            "MultiHeadAttention",
            [*operands, None, None, node.inputs[3]],
            [ir.AttrInt64("num_heads", HEADS), scale],
            name=f"{node.name}_multi_head",
        )
        fused.outputs[0].name = f"{fused.name}_output"
        model.graph.append(fused)
        heads = variants.add(model, "Reshape", [fused.outputs[0], split])
        back = variants.add(model, "Transpose", [heads], {"perm": [0, 2, 1, 3]})
        ir.convenience.replace_all_uses_with(node.outputs[0], back)
    # At the end: nodes are named by their number.
    model.graph.remove(dense, safe=True)
    model.opset_imports["com.microsoft"] = 1
    model.graph.sort()

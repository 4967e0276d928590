"""Cases that need a real TensorRT, one process each: `python child.py CASE JSON`.

A fault inside TensorRT can end the process, so the test runner only reads the JSON line that
a case prints last: what the case returned, or the error that it met.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import signal
import sys
import tempfile
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

sys.path.insert(0, str(Path(__file__).parent.parent))

import numpy as np
import onnx
import paged_models

from paged_trt.builder import engine
from paged_trt.builder.onnx import lowering
from paged_trt.builder.progress import BuildProgress
from paged_trt.plugins import trt
from paged_trt.plugins.attention import Rope
from paged_trt.plugins.dtypes import DType
from paged_trt.plugins.errors import BuildCancelledError
from paged_trt.plugins.operands import LAYOUTS, Operand
from paged_trt.plugins.plugin_spec import PluginSpec
from paged_trt.plugins.tensors import EngineSpec, Role

SPEC = paged_models.make_spec()
PAGES = SPEC.pool.num_pages


def build(model: Any = None, spec: EngineSpec = SPEC, **kwargs: Any) -> engine.BuiltPlan:
    with tempfile.TemporaryDirectory() as directory:
        model = model or paged_models.make_model(spec)
        return engine.build_plan(paged_models.write_model(model, Path(directory)), spec, **kwargs)


def plugin_spec(spec: EngineSpec = SPEC) -> PluginSpec:
    from paged_trt.plugins.fields import OperatorSpec

    return PluginSpec(
        operator=OperatorSpec(pool=spec.pool, attention=spec.layers[0]),
        activation_dtype=spec.activation_dtype,
        kv_cache_dtype=spec.kv_cache_dtype,
        attention_plan=None,
        route=trt.route(),
    )


def input_descriptions(spec: PluginSpec, *, tokens: int = 2, seqs: int = 2, width: int = 2) -> list:
    """Descriptions of all plugin inputs, right for `spec`, as TensorRT gives them at run time."""
    from paged_trt.plugins import operands

    step = operands.StepShape(num_tokens=tokens, num_seqs=seqs, table_width=width)
    dims = operands._expected_dims(spec.layout, spec.operator, step)
    rope_index = spec.layout.index[Operand.ROPE_COS_SIN]
    dims[rope_index] = (384, 2, spec.operator.attention.rotary_dim // 2)
    dtypes = operands.input_dtypes(spec.layout, spec.activation_dtype, spec.kv_cache_dtype)
    linear = trt.load().TensorFormat.LINEAR
    return [
        types.SimpleNamespace(dims=dims[index], type=trt.to_api_dtype(dtype), format=linear)
        for index, dtype in enumerate(dtypes)
    ]


def case_build(
    kv: str,
    activation: str = "float16",
    value_head_dim: int = 16,
    rope: int = 1,
    attention_plan: str | None = None,
) -> dict[str, Any]:
    """Build, and report the page count at every hop that can be seen without a GPU."""
    from paged_trt.plugins.plugin import PagedAttentionPlugin

    spec = paged_models.make_spec(
        kv_cache_dtype=DType(kv),
        activation_dtype=DType(activation),
        value_head_dim=value_head_dim,
        rope=Rope(rope),
    )
    seen: dict[str, set[int]] = {"configured": set(), "serialized": set()}
    tables = []

    def configure(plugin: Any, inputs: Any, outputs: Any, original: Any) -> None:
        original(plugin, inputs, outputs)
        seen["configured"] |= {
            next(iter(getattr(inputs[index], bound)))
            for index in (Operand.KEY_POOL, Operand.VALUE_POOL)
            for bound in ("min", "opt", "max")
        }

    def serialize(plugin: Any, original: Any) -> Any:
        fields = original(plugin)
        seen["serialized"] |= {int(plugin.spec.to_fields()["num_pages"][0])}
        assert [field.name for field in fields][1 : 1 + 5][-1] == "num_pages"
        return fields

    patched = {"configure_plugin": configure, "get_fields_to_serialize": serialize}
    check = engine.check_engine_table
    with contextlib.ExitStack() as stack:
        for name, replacement in patched.items():
            original = getattr(PagedAttentionPlugin, name)
            wrapped = _wrap(replacement, original)
            stack.enter_context(mock.patch.object(PagedAttentionPlugin, name, wrapped))
        stack.enter_context(
            mock.patch.object(
                engine,
                "check_engine_table",
                lambda spec, table: (tables.append(table), check(spec, table)),
            )
        )
        built = build(spec=spec, attention_plan=attention_plan)
    (table,) = tables
    pools = {tensor.name for tensor in spec.tensors() if tensor.role is Role.POOL_INPUT}
    found = [tensor for tensor in table.tensors if tensor.name in pools]
    return {
        "pages": spec.pool.num_pages,
        "plan_bytes": len(built.plan),
        "record": built.build.model_dump(mode="json"),
        "name": table.name,
        "hops": {
            **{hop: sorted(pages) for hop, pages in seen.items()},
            "network": sorted({tensor.dims[0] for tensor in found}),
            "profiles": sorted(
                {dims[0] for tensor in found for profile in tensor.profiles for dims in profile}
            ),
        },
        "io": {tensor.name: list(tensor.dims) for tensor in table.tensors},
    }


def _wrap(replacement: Callable[..., Any], original: Callable[..., Any]) -> Callable[..., Any]:
    def method(*args: Any) -> Any:
        return replacement(*args, original)

    return method


def case_extra_page_in_attribute() -> None:
    model = paged_models.make_model(SPEC)
    attribute = next(
        item for item in paged_models.paged_nodes(model)[1].attribute if item.name == "num_pages"
    )
    attribute.i += 1
    build(model)


def case_extra_page_in_pool_dim(name: str) -> None:
    model = paged_models.make_model(SPEC)
    for value in (*model.graph.input, *model.graph.output):
        if value.name == name:
            value.type.tensor_type.shape.dim[0].dim_value += 1
    build(model)


def case_extra_page_in_network(name: str) -> None:
    """As before, but past the check of model.onnx: the parsed network tells."""
    with mock.patch.object(lowering, "_check_pool_dims"):
        case_extra_page_in_pool_dim(name)


def case_extra_page_in_profile(bound: int) -> None:
    original = engine.make_profiles

    def tampered(spec: EngineSpec, dims: Any) -> Any:
        context, generation = original(spec, dims)
        shapes = dict(generation.shapes)
        three = list(shapes["key_pool.1"])
        three[bound] = (three[bound][0] + 1, *three[bound][1:])
        shapes["key_pool.1"] = tuple(three)
        return context, dataclasses.replace(generation, shapes=shapes)

    with mock.patch.object(engine, "make_profiles", tampered):
        build()


def case_extra_page_in_plugin() -> None:
    """The plugin believes in one page more than the network has."""
    from paged_trt.plugins import creator

    def tampered(spec: PluginSpec) -> Any:
        pool = dataclasses.replace(spec.operator.pool, num_pages=PAGES + 1)
        operator = dataclasses.replace(spec.operator, pool=pool)
        return original(dataclasses.replace(spec, operator=operator))

    original = creator.PagedAttentionPlugin
    with mock.patch.object(creator, "PagedAttentionPlugin", tampered):
        build()


def case_ranged_pool() -> None:
    """A pool whose profile is a range is refused by the plugin, not only by the table check."""
    model = paged_models.make_model(SPEC)
    pools = {tensor.name for tensor in SPEC.tensors() if "pool" in tensor.name}
    for value in (*model.graph.input, *model.graph.output):
        if value.name in pools:
            value.type.tensor_type.shape.dim[0].dim_param = "num_pages"
    original = engine.make_profiles

    def ranged(spec: EngineSpec, dims: Any) -> Any:
        return tuple(
            dataclasses.replace(
                profile,
                shapes={
                    name: tuple(
                        (PAGES - (bound == 0), *dims[1:]) if name in pools else dims
                        for bound, dims in enumerate(three)
                    )
                    for name, three in profile.shapes.items()
                },
            )
            for profile in original(spec, dims)
        )

    with (
        mock.patch.object(lowering, "_check_pool_dims"),
        mock.patch.object(engine, "make_profiles", ranged),
        mock.patch.object(engine, "check_engine_table"),
    ):
        build(model)


def case_extra_page_in_serialized_fields() -> None:
    """A plan's plugin with another count meets the real pool at the first shape."""
    from paged_trt.plugins import creator

    runtime_plugin(creator, {"num_pages": PAGES + 1}).on_shape_change(
        input_descriptions(plugin_spec()), []
    )


def runtime_plugin(creator: Any, changes: dict[str, Any]) -> Any:
    """Plugin made by the creator from a plan's fields, after `changes` (None removes)."""
    from paged_trt.plugins.plugin import PagedAttentionPlugin

    creator.register()
    api = creator.api
    kinds = {"int32": "INT32", "float32": "FLOAT32"}
    arrays = PagedAttentionPlugin(plugin_spec()).spec.to_fields()
    for name, value in changes.items():
        arrays.pop(name, None)
        if value is not None:
            arrays[name] = np.array([value], np.int32)
    fields = api.PluginFieldCollection(
        [
            api.PluginField(name, array, getattr(api.PluginFieldType, kinds[array.dtype.name]))
            for name, array in arrays.items()
        ]
    )
    return creator._registered[0].create_plugin("p", fields, api.TensorRTPhase.RUNTIME)


def case_round_trip_of_fields() -> dict[str, Any]:
    from paged_trt.plugins import creator

    plugin = runtime_plugin(creator, {})
    plugin.on_shape_change(input_descriptions(plugin.spec), [])
    listed = [field.name for field in plugin.get_fields_to_serialize()]
    decoded = {
        field.name: creator.decode_field(field) for field in plugin.get_fields_to_serialize()
    }
    return {
        "equal": plugin.spec == plugin_spec(),
        "clone": plugin.clone().spec == plugin.spec and plugin.clone() is not plugin,
        "fields": listed,
        "decoded_equal": PluginSpec.from_fields(decoded, where="test") == plugin.spec,
        "aliases": [plugin.get_aliased_input(output) for output in range(4)],
        "tactics": plugin.get_valid_tactics(),
    }


def case_fields_of_a_plan(changes: dict[str, Any]) -> None:
    from paged_trt.plugins import creator

    runtime_plugin(creator, changes)


def case_enqueue(*, moved_pool: bool = False, tokens: int = 2) -> None:
    from paged_trt.plugins import creator

    plugin = runtime_plugin(creator, {})
    descriptions = input_descriptions(plugin.spec, tokens=tokens)
    plugin.on_shape_change(descriptions, [])
    inputs = [(index + 1) << 20 for index in range(len(descriptions))]
    outputs = [1 << 30, inputs[3], inputs[4] + moved_pool]
    plugin.enqueue(descriptions, [], inputs, outputs, 0, 0)


def case_formats() -> dict[str, Any]:
    from paged_trt.plugins.plugin import PagedAttentionPlugin

    plugin = PagedAttentionPlugin(plugin_spec())
    entries = input_descriptions(plugin.spec)
    half = entries[0]
    described = [types.SimpleNamespace(desc=entry) for entry in (*entries, half, half, half)]
    right = [
        plugin.supports_format_combination(position, described, len(entries))
        for position in range(len(described))
    ]
    wrong = [
        types.SimpleNamespace(desc=types.SimpleNamespace(**vars(item.desc))) for item in described
    ]
    for item in wrong:
        item.desc.type = trt.to_api_dtype(DType.INT64)
    return {
        "right": right,
        "wrong": [
            plugin.supports_format_combination(position, wrong, len(entries))
            for position in range(len(wrong))
        ],
        "layout_inputs": len(LAYOUTS[trt.route()].names),
    }


def case_missing_plugin_attribute(name: str) -> None:
    model = paged_models.make_model(SPEC)
    remove_attributes(model, name)
    build(model)


def remove_attributes(model: onnx.ModelProto, name: str) -> None:
    for node in paged_models.paged_nodes(model):
        kept = [item for item in node.attribute if item.name != name]
        del node.attribute[:]
        node.attribute.extend(kept)


def case_inlined() -> None:
    """A node without `plugin_namespace`, or one that is not lowered, is inlined silently.

    The function is a stand-in that TensorRT can run, so that nothing but the count tells.
    """
    spec = paged_models.make_spec(value_head_dim=32)
    model = paged_models.make_model(spec)
    remove_attributes(model, "plugin_namespace")
    function = model.functions[0]
    del function.node[:]
    for source, target in zip(("query", "key_pool", "value_pool"), function.output, strict=True):
        function.node.add(op_type="Identity", input=[source], output=[target])
    with (
        mock.patch.object(engine, "lower_to_gqa"),
        mock.patch.object(lowering, "_require_plugin_attributes"),
    ):
        build(model, spec)


def case_no_preview_feature() -> None:
    with mock.patch.object(engine._Session, "_allow_aliases"):
        build()


def case_callback_raises(callback: str) -> None:
    """`boom` inside a callback; a process that ends here has no JSON line."""
    from paged_trt.plugins import plugin
    from paged_trt.plugins.launch.planner import PolicyPlanner

    boom = mock.PropertyMock(side_effect=ValueError("boom"))
    api = types.SimpleNamespace(DimsExprs=plugin.api.DimsExprs, TensorFormat=mock.Mock())
    type(api.TensorFormat).LINEAR = boom
    patches = {
        "get_workspace_size": mock.patch.object(PolicyPlanner, "workspace_bytes", boom),
        "attach_to_context": mock.patch.object(plugin.cuda, "driver_available", boom),
        "supports_format_combination": mock.patch.object(plugin, "api", api),
    }
    with patches[callback]:
        build()


def case_wrong_activation_dtype() -> None:
    """The model computes in float16, the spec says bfloat16."""
    build(paged_models.make_model(SPEC), paged_models.make_spec(activation_dtype=DType.BFLOAT16))


def case_unused_input() -> None:
    """What the GQA parser drops from a node, and what no node reads, ends as a log line only."""
    spec = paged_models.make_spec(kv_cache_dtype=DType.INT8)
    model = paged_models.make_model(spec)
    ones = np.ones((2, spec.layers[0].num_kv_heads), np.float32)
    model.graph.initializer.append(onnx.numpy_helper.from_array(ones, "ones"))
    for node in paged_models.paged_nodes(model):
        node.input[Operand.KV_SCALES] = "ones"
    build(model, spec)


def case_refused_node() -> None:
    """TensorRT's own parse error is in the message."""
    model = paged_models.make_model(SPEC)
    next(node for node in model.graph.node if node.op_type == "MatMul").op_type = "NoSuchOp"
    build(model)


def case_foreign_creator() -> None:
    from paged_trt.plugins import creator

    name, namespace = creator.PLUGIN_NAMES[trt.route()]
    foreign = creator._Creator(trt.route())
    assert creator.api.get_plugin_registry().register_creator(foreign, namespace), name
    creator.register()


def case_build_twice() -> int:
    return sum(len(build().plan) > 0 for _ in range(2))


def case_tactics(offered: list[int]) -> dict[str, Any]:
    """What TensorRT does with custom tactics: when it asks, what it sets, whether it times any."""
    from paged_trt.plugins.plugin import PagedAttentionPlugin

    asked: list[Any] = []
    taken: list[int] = []
    ran: list[str] = []
    replaced = {
        "get_valid_tactics": lambda plugin: asked.append(plugin) or list(offered),
        "set_tactic": lambda plugin, tactic: taken.append(tactic),
        "on_shape_change": lambda plugin, *rest: ran.append("on_shape_change"),
        "enqueue": lambda plugin, *rest: ran.append("enqueue"),
    }
    with contextlib.ExitStack() as stack:
        for name, replacement in replaced.items():
            stack.enter_context(mock.patch.object(PagedAttentionPlugin, name, replacement))
        build()
    return {"asked": len(asked), "taken": taken, "ran": ran}


def case_unchanged_directory() -> list[str]:
    """A build writes nothing beside the model."""
    with tempfile.TemporaryDirectory() as directory:
        path = paged_models.write_model(paged_models.make_model(SPEC), Path(directory))
        Path(directory).chmod(0o500)
        engine.build_plan(path, SPEC)
        return sorted(os.listdir(directory))


def case_interrupt(temporary: str) -> None:
    """A real SIGINT in the middle of a build; the process ends as the command line does."""
    tempfile.tempdir = temporary

    class Interrupted(BuildProgress):
        def step_complete(self, phase: str, step: int) -> bool:
            os.kill(os.getpid(), signal.SIGINT)
            return super().step_complete(phase, step)

    try:
        build(progress=Interrupted())
    except BuildCancelledError as error:
        report(error=error)
        os._exit(error.exit_code)


def report(result: Any = None, error: BaseException | None = None) -> None:
    data: dict[str, Any] = {"result": result}
    if error is not None:
        data = {
            "error": type(error).__name__,
            "message": str(error),
            "field": getattr(error, "field", None),
            "cause": type(error.__cause__).__name__ if error.__cause__ else None,
            "cause_field": getattr(error.__cause__, "field", None),
            "cause_message": str(error.__cause__),
        }
    print(json.dumps(data), flush=True)  # noqa: T201


def main() -> None:
    case, arguments = sys.argv[1:]
    try:
        report(result=globals()[f"case_{case}"](**json.loads(arguments)))
    except Exception as error:  # the runner decides which error is right
        report(error=error)


if __name__ == "__main__":
    main()

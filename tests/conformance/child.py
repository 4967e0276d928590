"""Checks uses against the full TensorRT's bindings: `python child.py`, JSON in, JSON out.

The bindings are imported as `tensorrt` from PYTHONPATH; the libraries that they need are empty
stubs on LD_LIBRARY_PATH, so nothing but looking at classes and deriving from them works.
"""

from __future__ import annotations

import inspect
import json
import re
import sys
from typing import Any

NOT_IN_BINDINGS = object()


def resolve(module: Any, dotted: str) -> Any:
    """Object of a dotted name; where a property hides the rest, the property."""
    current = module
    for name in dotted.split("."):
        if isinstance(current, property):
            return current
        current = inspect.getattr_static(current, name, NOT_IN_BINDINGS)
        if current is NOT_IN_BINDINGS:
            # Enum members and inherited names are not found statically.
            return NOT_IN_BINDINGS
    return current


def lookup(module: Any, dotted: str) -> Any:
    found = resolve(module, dotted)
    if found is not NOT_IN_BINDINGS:
        return found
    current = module
    for name in dotted.split("."):
        if isinstance(current, property):
            return current
        if not hasattr(current, name):
            return NOT_IN_BINDINGS
        current = getattr(current, name)
    return current


def signatures(found: Any) -> list[tuple[list[str], int]]:
    """(parameter names, number without default) of each overload in a pybind docstring."""
    doc = (found.__init__ if isinstance(found, type) else found).__doc__ or ""
    result = []
    for match in re.finditer(r"^(?:\d+\. )?\w+\((.*)\) -> ", doc, re.MULTILINE):
        parts = _split(match.group(1))
        if parts and parts[0].startswith("self"):
            parts = parts[1:]
        names = [part.split(":")[0].strip() for part in parts]
        result.append((names, sum(" = " not in part for part in parts)))
    return result


def _split(text: str) -> list[str]:
    parts, depth = [""], 0
    for character in text:
        depth += (character in "([{<") - (character in ")]}>")
        if character == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += character
    return [part.strip() for part in parts if part.strip()]


def is_callable_with(found: Any, num_arguments: int, keywords: list[str]) -> bool:
    known = signatures(found)
    if not known:
        return True
    given = num_arguments + len(keywords)
    return any(
        required <= given <= len(names) and set(keywords) <= set(names) for names, required in known
    )


def problems(module: Any, uses: list[dict[str, Any]]) -> list[str]:
    found_problems = []
    for use in uses:
        found = lookup(module, use["name"])
        if found is NOT_IN_BINDINGS:
            found_problems.append(f"{use['place']}: {use['name']} does not exist")
        elif use["num_arguments"] >= 0 and not is_callable_with(
            found, use["num_arguments"], use["keywords"]
        ):
            found_problems.append(
                f"{use['place']}: {use['name']} is called with {use['num_arguments']} arguments "
                f"and {use['keywords']}, known are {signatures(found)}"
            )
    return found_problems


def our_objects() -> list[Any]:
    """One object of every class of ours that derives from TensorRT's."""
    from paged_trt.plugins import creator, operands, trt
    from paged_trt.plugins.attention import AttentionSpec
    from paged_trt.plugins.dtypes import DType
    from paged_trt.plugins.fields import OperatorSpec
    from paged_trt.plugins.kv import KvPoolSpec
    from paged_trt.plugins.launch.plans import SplitKv
    from paged_trt.plugins.plugin import PagedAttentionPlugin
    from paged_trt.plugins.plugin_spec import SERIALIZED_FIELDS, PluginSpec

    attention = AttentionSpec(
        num_q_heads=2, num_kv_heads=1, head_dim=64, value_head_dim=64, softmax_scale=0.125
    )
    pool = KvPoolSpec.plan(max_batch_size=1, max_kv_cache_capacity=128)
    spec = PluginSpec(
        operator=OperatorSpec(pool=pool, attention=attention),
        activation_dtype=DType.BFLOAT16,
        kv_cache_dtype=DType.FLOAT8,
        attention_plan=SplitKv(partition_tokens=256, threshold_tokens=512),
        route=trt.Route.PLUGIN,
    )
    plugin = PagedAttentionPlugin(spec)
    fields = list(plugin.get_fields_to_serialize())
    assert [field.name for field in fields] == list(SERIALIZED_FIELDS)
    decoded = {field.name: creator.decode_field(field) for field in fields}
    assert PluginSpec.from_fields(decoded, where="test") == spec
    assert plugin.clone().spec == spec
    assert plugin.num_outputs == len(operands.Output)
    assert all(trt.from_api_dtype(trt.to_api_dtype(dtype)) is dtype for dtype in DType)
    return [
        plugin,
        creator._Creator(trt.Route.PLUGIN),
        trt.logger(trt.LogLines()),
        trt.progress_monitor(object()),  # type: ignore[arg-type]
    ]


def override_problems(objects: list[Any]) -> list[str]:
    """Methods of ours that do not take the arguments that TensorRT passes."""
    found = []
    for item in objects:
        for name, method in vars(type(item)).items():
            base = getattr(super(type(item), item), name, None)
            # The docstring of get_aliased_input names its one argument `self`.
            if name.startswith("_") or not callable(method) or name == "get_aliased_input":
                continue
            known = [len(names) for names, _ in signatures(base)]
            given = len(inspect.signature(method).parameters) - 1
            if known and given not in known:
                found.append(f"{type(item).__name__}.{name} takes {given} arguments, not {known}")
    return found


def main() -> None:
    import tensorrt

    request = json.load(sys.stdin)
    objects = our_objects()
    if request["bogus_override"]:
        type(objects[0]).configure_plugin = lambda self, inputs: None
    answer = {
        "problems": problems(tensorrt, request["uses"]),
        "classes": [type(item).__name__ for item in objects],
        "overrides": override_problems(objects),
    }
    print(json.dumps(answer))  # noqa: T201


if __name__ == "__main__":
    main()

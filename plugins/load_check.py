"""One pure check of a network or an engine against the spec.

The builder runs it on the network before it builds, a runtime on the engine that it
deserialized: both bring an `EngineTable`, so the check needs neither a GPU nor TensorRT.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any, Final

from paged_trt.plugins.engine_table import Dims, EngineTable, EngineTensor
from paged_trt.plugins.errors import SpecMismatchError
from paged_trt.plugins.manifest import network_name
from paged_trt.plugins.tensors import EngineSpec, Role, TensorSpec
from paged_trt.plugins.trt import from_api_dtype, load

NUM_PROFILES: Final = 2
"""Context and generation."""
_BOUND_NAMES: Final = ("min", "opt", "max")
_FIXED_ROLES: Final = frozenset({Role.POOL_INPUT, Role.SCALES})


def check_engine_table(spec: EngineSpec, table: EngineTable) -> None:
    """Compare a network or an engine with the spec.

    Raises:
        SpecMismatchError: the page count or hash in the name, the set of tensors, a type, a
            dim, a profile bound of a fixed tensor or an alias differs; the message names both.
    """
    _check_name(spec, table)
    want = {tensor.name: tensor for tensor in spec.tensors()}
    found = {tensor.name: tensor for tensor in table.tensors}
    if want.keys() != found.keys():
        missing = sorted(want.keys() - found.keys())
        unknown = sorted(found.keys() - want.keys())
        raise SpecMismatchError(
            "tensors",
            f"{len(want)} tensors",
            f"{len(found)}: missing {missing}, unknown {unknown}",
            where=table.source,
        )
    for name, tensor in want.items():
        _check_tensor(tensor, found[name], table.source)


def _check_name(spec: EngineSpec, table: EngineTable) -> None:
    want = network_name(spec)
    if want == table.name:
        return
    where = f"name of the {table.source}"
    mine, theirs = _name_parts(want), _name_parts(table.name)
    for key, value in mine.items():
        if theirs.get(key) != value:
            field = "num_pages" if key == "pages" else key
            raise SpecMismatchError(field, value, theirs.get(key), where=where)
    raise SpecMismatchError("name", want, table.name, where=where)


def _name_parts(name: str) -> dict[str, str]:
    return dict(part.split("=", 1) for part in name.split(" ") if "=" in part)


def _check_tensor(want: TensorSpec, found: EngineTensor, source: str) -> None:
    where = f"{source}, tensor `{want.name}`"
    if found.is_input != want.role.is_input:
        raise SpecMismatchError("is_input", want.role.is_input, found.is_input, where=where)
    if found.dtype is not want.dtype:
        raise SpecMismatchError("dtype", want.dtype.value, found.dtype.value, where=where)
    # A symbol is DYNAMIC in the network, or a number where the model fixes it.
    fixed = len(found.dims) == len(want.dims) and all(
        isinstance(dim, str) or dim == number
        for dim, number in zip(want.dims, found.dims, strict=True)
    )
    if not fixed:
        raise SpecMismatchError(_dims_field(want), want.dims, found.dims, where=where)
    if want.role.is_input:
        _check_profiles(want, found, where)
    if found.alias_of is not None and found.alias_of != want.alias_of:
        raise SpecMismatchError("alias_of", want.alias_of, found.alias_of, where=where)


def _check_profiles(want: TensorSpec, found: EngineTensor, where: str) -> None:
    if len(found.profiles) != NUM_PROFILES:
        raise SpecMismatchError("profiles", NUM_PROFILES, len(found.profiles), where=where)
    if want.role not in _FIXED_ROLES:
        return
    for index, profile in enumerate(found.profiles):
        for bound, dims in zip(_BOUND_NAMES, profile, strict=True):
            if dims != want.dims:
                place = f"{where}, profile {index} {bound}"
                raise SpecMismatchError(_dims_field(want), want.dims, dims, where=place)


def _dims_field(want: TensorSpec) -> str:
    is_pool = want.role in {Role.POOL_INPUT, Role.POOL_OUTPUT}
    return "pool_shape" if is_pool else "dims"


def table_from_network(network: Any, profiles: Sequence[Any]) -> EngineTable:
    """Table of a parsed network with its profiles; needs no GPU.

    Args:
        network: TensorRT network with its name set.
        profiles: TensorRT profiles with the shapes of every input.
    """
    tensors = []
    for is_input, count, get in (
        (True, network.num_inputs, network.get_input),
        (False, network.num_outputs, network.get_output),
    ):
        for index in range(count):
            tensor = get(index)
            # A profile without shapes for an input gives an empty list.
            shapes = [profile.get_shape(tensor.name) for profile in profiles] if is_input else []
            tensors.append(
                EngineTensor(
                    name=tensor.name,
                    is_input=is_input,
                    dtype=from_api_dtype(tensor.dtype),
                    dims=tuple(tensor.shape),
                    profiles=tuple(_bounds(three) for three in shapes if three),
                )
            )
    return EngineTable(source="network", name=network.name, tensors=tuple(tensors))


def table_from_engine(engine: Any) -> EngineTable:
    """Table of a deserialized engine.

    Args:
        engine: TensorRT engine.
    """
    api = load()
    names = [engine.get_tensor_name(index) for index in range(engine.num_io_tensors)]
    tensors = []
    for name in names:
        is_input = engine.get_tensor_mode(name) == api.TensorIOMode.INPUT
        # TensorRT raises where an output is asked for its profiles.
        profiles = range(engine.num_optimization_profiles if is_input else 0)
        tensors.append(
            EngineTensor(
                name=name,
                is_input=is_input,
                dtype=from_api_dtype(engine.get_tensor_dtype(name)),
                dims=tuple(engine.get_tensor_shape(name)),
                profiles=tuple(
                    _bounds(engine.get_tensor_profile_shape(name, index)) for index in profiles
                ),
                alias_of=None if is_input else _alias(engine, name),
            )
        )
    return EngineTable(source="engine", name=engine.name, tensors=tuple(tensors))


def engine_information(engine: Any) -> dict[str, Any]:
    """What TensorRT itself says of a deserialized engine: layers, memory, aliases.

    Args:
        engine: TensorRT engine.
    """
    api = load()
    table = table_from_engine(engine)
    inspector = engine.create_engine_inspector()
    layers = json.loads(inspector.get_engine_information(api.LayerInformationFormat.JSON))
    return {
        "name": engine.name,
        "num_layers": int(engine.num_layers),
        "num_profiles": int(engine.num_optimization_profiles),
        "device_memory_bytes": int(engine.device_memory_size_v2),
        "aliases": {each.name: each.alias_of for each in table.tensors if each.alias_of},
        "layers": layers.get("Layers", []),
    }


def _alias(engine: Any, name: str) -> str | None:
    # TensorRT 10 has no such method in Python.
    get_aliased: Callable[[str], str | None] | None = getattr(
        engine, "get_aliased_input_tensor", None
    )
    return None if get_aliased is None else get_aliased(name) or None


def _bounds(shapes: Sequence[Any]) -> tuple[Dims, Dims, Dims]:
    smallest, tuned, largest = (tuple(shape) for shape in shapes)
    return smallest, tuned, largest

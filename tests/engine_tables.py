"""What TensorRT would report of a sound engine, as data."""

from __future__ import annotations

from paged_trt.builder.profile import make_profiles
from paged_trt.plugins.engine_table import EngineTable, EngineTensor
from paged_trt.plugins.manifest import network_name
from paged_trt.plugins.tensors import EngineSpec


def parsed_dims(spec: EngineSpec) -> dict[str, tuple[int, ...]]:
    return {
        tensor.name: tuple(-1 if isinstance(dim, str) else dim for dim in tensor.dims)
        for tensor in spec.tensors()
    }


def make_table(spec: EngineSpec) -> EngineTable:
    dims = parsed_dims(spec)
    profiles = make_profiles(spec, dims)
    return EngineTable(
        source="engine",
        name=network_name(spec),
        tensors=tuple(
            EngineTensor(
                name=tensor.name,
                is_input=tensor.role.is_input,
                dtype=tensor.dtype,
                dims=dims[tensor.name],
                profiles=tuple(profile.shapes[tensor.name] for profile in profiles)
                if tensor.role.is_input
                else (),
                alias_of=tensor.alias_of,
            )
            for tensor in spec.tensors()
        ),
    )

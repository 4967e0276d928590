"""The hops of the page count that need no GPU: each one is read afresh and compared.

`check_hops` is what `paged-trt inspect` shows and what a runtime runs before it opens a
plan. The hops that need a deserialized engine are in `load_check`.
"""

from __future__ import annotations

import dataclasses
import mmap
from pathlib import Path

import google.protobuf.message
import onnx

from paged_trt.plugins.errors import ManifestError, SpecMismatchError
from paged_trt.plugins.fields import OP_DOMAIN, OP_TYPE, STRING_ATTRIBUTES, OperatorSpec
from paged_trt.plugins.load_check import check_engine_table
from paged_trt.plugins.manifest import MODEL_FILE, PLAN_FILE, EngineManifest, network_name
from paged_trt.plugins.tensors import Role


@dataclasses.dataclass(frozen=True, slots=True)
class Hop:
    """One place that carries the page count, and what it says."""

    name: str
    carrier: str
    num_pages: int


def check_hops(directory: Path, manifest: EngineManifest) -> tuple[Hop, ...]:
    """Read the page count at every hop that a machine without a GPU can see.

    Args:
        directory: an engine directory whose file hashes were checked.
        manifest: its manifest.

    Returns:
        The hops, all with one count.

    Raises:
        SpecMismatchError: two hops disagree; names both numbers and the hop.
        ManifestError: a file cannot be read.
    """
    pool = manifest.spec.pool
    hops = [
        Hop("manifest", "`pool.num_pages` of manifest.json", manifest.pool.num_pages),
        Hop("spec", "`spec.pool.num_pages` of manifest.json", pool.num_pages),
    ]
    for tensor in manifest.tensors:
        if tensor.role in {Role.POOL_INPUT, Role.POOL_OUTPUT}:
            count = tensor.dims[0]
            _require_count(manifest, count, where=f"tensor table, `{tensor.name}`")
    hops.append(Hop("tensor table", "dim 0 of every pool tensor", pool.num_pages))
    check_engine_table(manifest.spec, manifest.engine)
    hops.append(
        Hop("profiles", "min = opt = max of every pool, as TensorRT took them", pool.num_pages)
    )
    if MODEL_FILE in manifest.files:
        _check_model(directory / MODEL_FILE, manifest)
        hops.append(Hop("ONNX model", "literal pool dims and node attributes", pool.num_pages))
    _check_plan(directory / PLAN_FILE, manifest)
    hops.append(Hop("plan", "network name inside model.plan", pool.num_pages))
    return tuple(hops)


def _require_count(manifest: EngineManifest, found: object, *, where: str) -> None:
    expected = manifest.spec.pool.num_pages
    if found != expected:
        raise SpecMismatchError("num_pages", expected, found, where=where)


def _check_model(path: Path, manifest: EngineManifest) -> None:
    try:
        model = onnx.load(path, load_external_data=False)
    except (OSError, google.protobuf.message.DecodeError) as error:
        raise ManifestError(
            f"{path} is no readable ONNX model ({error}); rebuild the engine"
        ) from error
    expected = {t.name: t for t in manifest.tensors}
    for value in (*model.graph.input, *model.graph.output):
        tensor = expected.get(value.name)
        if tensor is not None and tensor.role in {Role.POOL_INPUT, Role.POOL_OUTPUT}:
            dims = value.type.tensor_type.shape.dim
            found = dims[0].dim_value if dims else None
            _require_count(manifest, found, where=f"{MODEL_FILE}, `{value.name}`")
    nodes = [n for n in model.graph.node if (n.domain, n.op_type) == (OP_DOMAIN, OP_TYPE)]
    layers = manifest.spec.layers
    if len(nodes) != len(layers):
        raise SpecMismatchError(f"{OP_TYPE} nodes", len(layers), len(nodes), where=MODEL_FILE)
    for node, layer in zip(nodes, layers, strict=True):
        where = f"{MODEL_FILE}, node `{node.name}`"
        expected_node = OperatorSpec(pool=manifest.spec.pool, attention=layer)
        expected_node.require_equal(_operator(node, where), where=where)


def _operator(node: onnx.NodeProto, where: str) -> OperatorSpec:
    try:
        fields = {
            attribute.name: onnx.helper.get_attribute_value(attribute)
            for attribute in node.attribute
            if attribute.name not in STRING_ATTRIBUTES
        }
        return OperatorSpec.from_fields(fields, where=where)
    # The user's options are not to blame for a number or type that no build writes.
    except (ValueError, TypeError, OverflowError) as error:
        raise ManifestError(f"{where}: {error}; rebuild the engine") from error


def _check_plan(path: Path, manifest: EngineManifest) -> None:
    """Find the network name in the plan's bytes: deserializing one needs a driver."""
    name = network_name(manifest.spec).encode()
    prefix = name.split(b" ")[0] + b" pages="
    try:
        with (
            path.open("rb") as stream,
            mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ) as plan,
        ):
            start = plan.find(prefix)
            found = bytes(plan[start : start + len(name)]) if start >= 0 else b""
    except (OSError, ValueError) as error:
        raise ManifestError(f"{path} is no readable plan ({error}); rebuild the engine") from error
    if found != name:
        raise SpecMismatchError(
            "network name",
            f"`{name.decode()}`",
            f"`{found.decode(errors='replace')}`",
            where=str(path),
        )

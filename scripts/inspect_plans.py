"""What `paged-trt inspect` says of an engine's steps: profiles, attention plans, bytes."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from rich.table import Table

from paged_trt.builder.pipeline import workspace_bounds
from paged_trt.plugins.attention import AttentionSpec
from paged_trt.plugins.dtypes import DType
from paged_trt.plugins.errors import SpecMismatchError
from paged_trt.plugins.launch.planner import PolicyPlanner
from paged_trt.plugins.launch.plans import AUTO, PlanSource, parse_attention_plan
from paged_trt.plugins.launch.tuned import NO_TUNED_PLANS, TunedPlans
from paged_trt.plugins.launch.tuner import engine_requests
from paged_trt.plugins.manifest import EngineManifest
from paged_trt.plugins.tensors import EngineSpec, TensorSpec
from paged_trt.scripts.error_output import plain

PROFILE_NAMES: Final = ("context (prefill)", "generation (decode)")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """What a plan depends on: architecture and multiprocessors."""

    arch: str
    multiprocessors: int


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class StepPlan:
    """The attention plan of one decode step of one kind of layer.

    Attributes:
        layers: numbers of the layers.
        num_seqs: N.
        table_width: M.
        plan: such as `direct` or `split:512:512`.
        source: who chose it.
        reason: why, in words.
    """

    layers: tuple[int, ...]
    num_seqs: int
    table_width: int
    plan: str
    source: str
    reason: str

    def text_key(self) -> tuple[str, str, str]:
        """Equal where two steps are one line: a measured plan says a time of its own."""
        is_tuned = self.source == PlanSource.TUNED.value
        return self.plan, self.source, self.reason if is_tuned else ""


def step_plans(
    manifest: EngineManifest, device: Device | None, tuned: TunedPlans = NO_TUNED_PLANS
) -> list[StepPlan]:
    """What the planner chooses for every (N, M) bucket of decode steps.

    Args:
        manifest: of the engine.
        device: None takes what the planner takes where the device is not known.
        tuned: plans that were measured on the device.
    """
    spec = manifest.spec
    explicit = parse_attention_plan(manifest.build.attention_plan or AUTO)
    planner = PolicyPlanner(explicit=explicit, tuned=tuned)
    numbers = layer_kinds(spec)
    plans = []
    for request in engine_requests(
        spec,
        arch=device.arch if device else None,
        num_multiprocessors=device.multiprocessors if device else None,
    ):
        planned = planner.plan(request)
        plans.append(
            StepPlan(
                layers=numbers[request.attention],
                num_seqs=request.step.num_seqs,
                table_width=request.step.table_width,
                plan=str(planned.plan),
                source=planned.source.value,
                reason=planned.reason,
            )
        )
    return plans


def layer_kinds(spec: EngineSpec) -> dict[AttentionSpec, tuple[int, ...]]:
    """Numbers of the layers of each kind."""
    kinds: dict[AttentionSpec, tuple[int, ...]] = {}
    for number, layer in enumerate(spec.layers):
        kinds[layer] = (*kinds.get(layer, ()), number)
    return kinds


def plans_table(plans: list[StepPlan], device: Device | None) -> Table:
    """One line per run of steps with one plan; its reason is that of the run's largest step."""
    where = (
        f"{device.arch}, {device.multiprocessors} multiprocessors"
        if device
        else "no GPU here: as for a device that the planner does not know"
    )
    table = Table(title=f"Plugin layers and their decode plans ({where})", title_justify="left")
    for name in ("layers", "sequences N", "table width M", "plan", "source", "why"):
        table.add_column(name)
    # Each N as runs of M, then the N with equal runs as one.
    steps = [
        (key, _runs(list(group)))
        for key, group in itertools.groupby(plans, lambda each: (each.layers, each.num_seqs))
    ]
    for (layers, runs), same in itertools.groupby(
        steps, lambda step: (step[0][0], [(span, plan.text_key()) for span, plan in step[1]])
    ):
        group = list(same)
        seqs = _span([num_seqs for (_, num_seqs), _ in group])
        for (span, _), (_, largest) in zip(runs, group[-1][1], strict=True):
            cells = (largest.plan, largest.source, largest.reason)
            table.add_row(ranges(layers), seqs, span, *map(plain, cells))
    return table


def _runs(plans: list[StepPlan]) -> list[tuple[str, StepPlan]]:
    """Widths with one plan, and the largest of these steps."""
    runs = []
    for _, run in itertools.groupby(plans, StepPlan.text_key):
        group = list(run)
        runs.append((_span([each.table_width for each in group]), group[-1]))
    return runs


def ranges(numbers: tuple[int, ...]) -> str:
    """`0..3, 7` of 0, 1, 2, 3, 7."""
    parts = []
    for _, run in itertools.groupby(enumerate(numbers), lambda pair: pair[1] - pair[0]):
        group = [number for _, number in run]
        parts.append(str(group[0]) if len(group) == 1 else f"{group[0]}..{group[-1]}")
    return ", ".join(parts)


def folded_names(names: Sequence[str]) -> str:
    """`key_pool.{0..29}` of the names of the layers' tensors; one name stays as it is."""
    if len(names) == 1:
        return names[0]
    kind = names[0].rpartition(".")[0]
    return f"{kind}.{{{ranges(tuple(int(name.rpartition('.')[2]) for name in names))}}}"


def folded_tensors(tensors: Sequence[TensorSpec]) -> list[list[TensorSpec]]:
    """Tensors that differ in nothing but the number of their layer, together; in order."""
    groups: dict[Any, list[TensorSpec]] = {}
    for tensor in tensors:
        kind, dot, layer = tensor.name.rpartition(".")
        is_layer = bool(dot) and layer.isdecimal()
        alias = (tensor.alias_of or "").rpartition(".")[0]
        key = (kind, tensor.role, tensor.dtype, tensor.dims, alias) if is_layer else tensor.name
        groups.setdefault(key, []).append(tensor)
    return list(groups.values())


def _span(values: list[int]) -> str:
    return str(values[0]) if len(values) == 1 else f"{values[0]} to {values[-1]}"


def profiles_table(manifest: EngineManifest) -> Table:
    """Bounds of the inputs whose shape varies; the fixed ones are one line."""
    table = Table(title="Optimization profiles (min / opt / max)", title_justify="left")
    table.add_column("input")
    for name in PROFILE_NAMES:
        table.add_column(name)
    fixed = []
    for tensor in manifest.engine.tensors:
        if not tensor.is_input:
            continue
        if all(len(set(profile)) == 1 for profile in tensor.profiles):
            fixed.append(tensor.name)
            continue
        cells = [" / ".join(map(_dims, profile)) for profile in tensor.profiles]
        table.add_row(plain(tensor.name), *cells)
    if fixed:
        table.add_row(plain(f"{fixed[0]} and {len(fixed) - 1} more"), "fixed", "fixed")
    return table


def _dims(dims: tuple[int, ...]) -> str:
    return "x".join(map(str, dims))


def byte_counts(manifest: EngineManifest) -> dict[str, int]:
    """Bytes of everything that an engine holds or needs."""
    spec = manifest.spec
    explicit = parse_attention_plan(manifest.build.attention_plan or AUTO)
    itemsize = spec.kv_cache_dtype.itemsize
    return {
        "KV pools": spec.pool_bytes(),
        "KV cache of one token": sum(layer.kv_elements for layer in spec.layers) * itemsize,
        "page table": spec.pool.table_entries() * DType.INT32.itemsize,
        "attention workspace bound": max(workspace_bounds(spec, explicit)),
        **({"layer outputs": spec.layer_output_bytes()} if spec.layer_outputs else {}),
        **{f"file {name}": record.size for name, record in sorted(manifest.files.items())},
    }


def page_plan_table(manifest: EngineManifest) -> Table:
    """Pages and bytes."""
    pool = manifest.spec.pool
    table = Table(title="Page plan", show_header=False, title_justify="left")
    rows: list[tuple[str, Any]] = [
        ("pages, minimum", pool.minimum_pages),
        ("pages, retained", pool.retained_pages),
        ("pages of every pool", pool.num_pages),
        ("page-table width", pool.max_pages_per_seq),
    ]
    rows += [(f"bytes, {name}", f"{count:,}") for name, count in byte_counts(manifest).items()]
    for name, value in rows:
        table.add_row(plain(name), plain(value))
    return table


def information_table(information: dict[str, Any]) -> Table:
    """What TensorRT says of the engine."""
    table = Table(title="TensorRT's own engine information", show_header=False)
    table.title_justify = "left"
    layers = [_layer_name(each) for each in information["layers"]]
    attention = [name for name in layers if "PagedAttention" in name]
    for name, value in (
        ("name", information["name"]),
        ("layers", information["num_layers"]),
        ("layers with PagedAttention in their name", len(attention)),
        ("profiles", information["num_profiles"]),
        ("bytes, activations", f"{information['device_memory_bytes']:,}"),
        ("aliases that it reports", len(information["aliases"])),
    ):
        table.add_row(name, plain(value))
    return table


def _layer_name(layer: Any) -> str:
    return str(layer.get("Name", "")) if isinstance(layer, dict) else str(layer)


def device_of(probe: dict[str, Any], number: int) -> Device | None:
    """The device that a probe found; None where there is none of that number."""
    devices = probe.get("devices", [])
    if not 0 <= number < len(devices):
        return None
    found = devices[number]
    return Device(arch=found["arch"], multiprocessors=found["multiprocessors"])


def plans_json(plans: list[StepPlan]) -> list[dict[str, Any]]:
    """The plans as JSON."""
    return [dataclasses.asdict(each) for each in plans]


def require_same_engine(manifest: EngineManifest, geometry_sha256: str, path: Path) -> None:
    """Refuse the record of a session of another engine.

    Raises:
        SpecMismatchError: it was recorded with another geometry.
    """
    if geometry_sha256 != manifest.geometry_sha256:
        raise SpecMismatchError(
            "geometry_sha256",
            manifest.geometry_sha256[:12],
            geometry_sha256[:12],
            where=str(path),
            remedy="record a session of this engine with `paged-trt run ENGINE_DIR --record FILE`",
        )

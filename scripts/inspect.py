"""`paged-trt inspect`: what an engine directory is, checked, with no GPU."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.table import Table

from paged_trt.plugins.errors import ConfigError
from paged_trt.plugins.hops import Hop, check_hops
from paged_trt.plugins.manifest import EngineManifest, check_files, read_manifest
from paged_trt.runtime.snapshot import SessionRecord, read_record
from paged_trt.scripts.attention_cells import ATTENTION_COLUMNS, attention_cells
from paged_trt.scripts.doctor_probes import run_probe
from paged_trt.scripts.error_output import json_option, plain
from paged_trt.scripts.files import require_writable
from paged_trt.scripts.inspect_plans import (
    StepPlan,
    byte_counts,
    device_of,
    folded_names,
    folded_tensors,
    information_table,
    layer_kinds,
    page_plan_table,
    plans_json,
    plans_table,
    profiles_table,
    ranges,
    require_same_engine,
    step_plans,
)
from paged_trt.scripts.inspect_tuned import TunedSource, tuned_source
from paged_trt.scripts.pool_picture import write_picture


@click.command(name="inspect")
@click.argument("engine_dir", type=click.Path(path_type=Path))
@click.option("--device", type=int, default=0, show_default=True, help="CUDA device to plan for.")
@click.option(
    "--session",
    type=click.Path(path_type=Path),
    help="Record of a session, of `paged-trt run --record`; it may still be running.",
)
@click.option(
    "--picture",
    type=click.Path(path_type=Path),
    help="Draw the session's page table and pool occupancy to this PNG file.",
)
@click.option(
    "--tuned",
    type=click.Path(path_type=Path),
    help="Plans that `paged-trt tune` wrote to this file, on another machine perhaps: decode plans "
    "are those of its device.",
)
@json_option
def command(
    engine_dir: Path,
    device: int,
    session: Path | None,
    picture: Path | None,
    tuned: Path | None,
    as_json: bool,
) -> None:
    """Check ENGINE_DIR and show its geometry, tensors, plans and the hops of the page count.

    No GPU is needed; with one, decode plans are those of the device, tuned ones included, and
    what TensorRT itself says of the engine is shown, too. Layers and tensors that differ in
    nothing but their number share a line; --json names each.

    \b
    Example:
      paged-trt inspect engine
      paged-trt inspect engine --json | jq .pool.num_pages
      paged-trt inspect engine --session session.json --picture pages.png
    """
    require_writable(picture, option="--picture")
    if picture is not None and session is None:
        raise ConfigError(
            "`--picture` draws a session: record one with `paged-trt run ENGINE_DIR --record FILE` "
            "and pass it with `--session FILE`"
        )
    manifest = read_manifest(engine_dir)
    check_files(engine_dir, manifest)
    found = _look(engine_dir, manifest, device, session, tuned)
    if picture is not None and found.session is not None:
        write_picture(found.session, picture)
    if as_json:
        click.echo(json.dumps(report(found), indent=2))
    else:
        show(found, Console())


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Inspection:
    """An engine directory, looked at.

    Attributes:
        manifest: what it says of itself.
        hops: the page count at every hop.
        tuned: the GPU that plans are for, and what was measured on it.
        plans: attention plans of decode steps.
        information: what TensorRT says of the engine; None where it was not asked.
        note: why it was not asked.
        session: record of a session; None where none was given.
    """

    manifest: EngineManifest
    hops: tuple[Hop, ...]
    tuned: TunedSource
    plans: list[StepPlan]
    information: dict[str, Any] | None
    note: str
    session: SessionRecord | None


def _look(
    engine_dir: Path,
    manifest: EngineManifest,
    number: int,
    session: Path | None,
    tuned: Path | None,
) -> Inspection:
    hops = check_hops(engine_dir, manifest)
    record = None if session is None else read_record(session)
    if record is not None and session is not None:
        require_same_engine(manifest, record.geometry_sha256, session)
    named = None if tuned is None else tuned_source(manifest, None, number, tuned)
    probe = run_probe("device")
    device = device_of(probe, number)
    reason = probe.get("error", {}).get("message", f"there is no CUDA device {number}")
    note = f"TensorRT was not asked about the plan: {reason}"
    information = None
    if device is not None:
        answer = run_probe("engine", str(engine_dir), str(number))
        information = None if "error" in answer else answer
        note = answer.get("error", {}).get("message", "")
    source = named or tuned_source(manifest, device, number, None)
    return Inspection(
        manifest=manifest,
        hops=hops,
        tuned=source,
        plans=step_plans(manifest, source.device, source.plans),
        information=information,
        note=note,
        session=record,
    )


def report(found: Inspection) -> dict[str, Any]:
    """The manifest, with hops, plans and bytes added."""
    manifest = found.manifest
    data = manifest.model_dump(mode="json")
    data["hops"] = [
        {"name": hop.name, "carrier": hop.carrier, "num_pages": hop.num_pages} for hop in found.hops
    ]
    data["pool_bytes"] = manifest.spec.pool_bytes()
    data["bytes"] = byte_counts(manifest)
    data["device"] = None if found.tuned.device is None else dataclasses.asdict(found.tuned.device)
    data["tuned_plans"] = found.tuned.to_json()
    data["decode_plans"] = plans_json(found.plans)
    data["tensorrt_engine"] = found.information
    data["session"] = None if found.session is None else found.session.model_dump(mode="json")
    return data


def show(found: Inspection, console: Console) -> None:
    """Print the tables."""
    manifest = found.manifest
    tables = [
        _summary(manifest),
        _layers(manifest),
        _tensors(manifest),
        profiles_table(manifest),
        plans_table(found.plans, found.tuned.device),
        page_plan_table(manifest),
        _hops(found.hops),
    ]
    if found.information is not None:
        tables.append(information_table(found.information))
    if found.session is not None:
        tables.append(_session(found.session))
    for table in tables:
        console.print(table)
    for note in filter(None, (found.tuned.note, found.note)):
        console.print(plain(f"note: {note}"), soft_wrap=True)


def _session(record: SessionRecord) -> Table:
    """The fullest step of a session, slot by slot."""
    snapshot = record.fullest
    state = "running" if record.is_running else "ended"
    title = (
        f"Session ({state}), fullest step: {snapshot.pages_in_use} of "
        f"{len(snapshot.references)} pages in use"
    )
    table = Table(title=title, title_justify="left")
    for name in ("slot", "tokens", "pages"):
        table.add_column(name)
    for slot in snapshot.slots:
        table.add_row(str(slot.slot), str(slot.tokens), ", ".join(map(str, slot.pages)))
    return table


def _summary(manifest: EngineManifest) -> Table:
    spec, build = manifest.spec, manifest.build
    table = Table(title="Engine", show_header=False, title_justify="left")
    for name, value in (
        ("pages", f"{spec.pool.num_pages} of {manifest.pool.tokens_per_page} tokens"),
        ("pool bytes", f"{spec.pool_bytes():,}"),
        ("max batch size", spec.pool.max_batch_size),
        ("max KV-cache capacity", f"{spec.pool.max_kv_cache_capacity} tokens"),
        ("page-table width", spec.pool.max_pages_per_seq),
        ("max input length", spec.max_input_len),
        ("max tokens per step", spec.max_num_tokens),
        ("activations, KV cache", f"{spec.activation_dtype.value}, {spec.kv_cache_dtype.value}"),
        ("logits", f"{spec.logits_mode.value} token rows, {spec.logits_dtype.value}"),
        ("next tokens", f"chosen by the {'engine' if spec.greedy_in_engine else 'runtime'}"),
        ("layer outputs", "attention of each layer" if spec.layer_outputs else "none"),
        ("TensorRT", f"{build.flavor} {build.tensorrt_version}, route {build.route}"),
        ("compute capabilities", ", ".join(build.compute_capabilities)),
        ("source", f"{manifest.source.name} ({manifest.source.dialect})"),
        ("made by", manifest.created_by),
    ):
        table.add_row(name, plain(value))
    return table


def _layers(manifest: EngineManifest) -> Table:
    table = Table(title="Attention layers", title_justify="left")
    for name in ("layers", *ATTENTION_COLUMNS):
        table.add_column(name)
    for layer, numbers in layer_kinds(manifest.spec).items():
        table.add_row(ranges(numbers), *attention_cells(layer))
    return table


def _tensors(manifest: EngineManifest) -> Table:
    table = Table(title="Tensors", title_justify="left")
    for name in ("name", "role", "type", "dims", "alias of"):
        table.add_column(name)
    for group in folded_tensors(manifest.tensors):
        first = group[0]
        aliases = [tensor.alias_of for tensor in group if tensor.alias_of]
        table.add_row(
            plain(folded_names([tensor.name for tensor in group])),
            first.role.value,
            first.dtype.value,
            plain(" x ".join(map(str, first.dims))),
            plain(folded_names(aliases) if aliases else ""),
        )
    return table


def _hops(hops: tuple[Hop, ...]) -> Table:
    table = Table(title="Hops of the page count", title_justify="left")
    for name in ("hop", "carrier", "pages", ""):
        table.add_column(name)
    for hop in hops:
        table.add_row(hop.name, hop.carrier, str(hop.num_pages), "[green]✓[/green]")
    return table

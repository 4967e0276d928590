"""`paged-trt inspect`: what an engine directory is, checked, with no GPU."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.table import Table

from paged_trt.plugins.hops import Hop, check_hops
from paged_trt.plugins.manifest import EngineManifest, check_files, read_manifest
from paged_trt.scripts.attention_cells import ATTENTION_COLUMNS, attention_cells
from paged_trt.scripts.error_output import json_option, plain


@click.command(name="inspect")
@click.argument("engine_dir", type=click.Path(path_type=Path))
@json_option
def command(engine_dir: Path, as_json: bool) -> None:
    """Check ENGINE_DIR and show its geometry, tensors and the hops of the page count.

    \b
    Example:
      paged-trt inspect engine
      paged-trt inspect engine --json | jq .pool.num_pages
    """
    manifest = read_manifest(engine_dir)
    check_files(engine_dir, manifest)
    hops = check_hops(engine_dir, manifest)
    if as_json:
        click.echo(json.dumps(report(manifest, hops), indent=2))
    else:
        show(manifest, hops, Console())


def report(manifest: EngineManifest, hops: tuple[Hop, ...]) -> dict[str, Any]:
    """The manifest, with the hops and the bytes of the pools added."""
    data = manifest.model_dump(mode="json")
    data["hops"] = [
        {"name": hop.name, "carrier": hop.carrier, "num_pages": hop.num_pages} for hop in hops
    ]
    data["pool_bytes"] = manifest.spec.pool_bytes()
    return data


def show(manifest: EngineManifest, hops: tuple[Hop, ...], console: Console) -> None:
    """Print the tables."""
    for table in (_summary(manifest), _layers(manifest), _tensors(manifest), _hops(hops)):
        console.print(table)


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
    groups: list[tuple[int, int]] = []
    layers = manifest.spec.layers
    for index, layer in enumerate(layers):
        if groups and layers[groups[-1][0]] == layer:
            groups[-1] = (groups[-1][0], index)
        else:
            groups.append((index, index))
    for first, last in groups:
        table.add_row(f"{first}..{last}", *attention_cells(layers[first]))
    return table


def _tensors(manifest: EngineManifest) -> Table:
    table = Table(title="Tensors", title_justify="left")
    for name in ("name", "role", "type", "dims", "alias of"):
        table.add_column(name)
    for tensor in manifest.tensors:
        table.add_row(
            plain(tensor.name),
            tensor.role.value,
            tensor.dtype.value,
            plain(" x ".join(map(str, tensor.dims))),
            plain(tensor.alias_of or ""),
        )
    return table


def _hops(hops: tuple[Hop, ...]) -> Table:
    table = Table(title="Hops of the page count", title_justify="left")
    for name in ("hop", "carrier", "pages", ""):
        table.add_column(name)
    for hop in hops:
        table.add_row(hop.name, hop.carrier, str(hop.num_pages), "[green]✓[/green]")
    return table

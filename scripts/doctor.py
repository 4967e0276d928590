"""`paged-trt doctor`: what this machine can run, what it lacks, and what to do about it."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
from pathlib import Path
from typing import Any, Final

import click
from rich import box
from rich.console import Console
from rich.table import Table

from paged_trt.plugins import trt
from paged_trt.plugins.error_catalog import ErrorPage, pages
from paged_trt.plugins.errors import (
    ConfigError,
    ManifestError,
    PagedTrtError,
    TensorRtMissingError,
    UnsupportedError,
)
from paged_trt.plugins.hops import check_hops
from paged_trt.plugins.manifest import MODEL_FILE, EngineManifest, check_files, read_manifest
from paged_trt.scripts import doctor_findings as findings
from paged_trt.scripts.doctor_findings import NOTE, OK, PROBLEM, Finding
from paged_trt.scripts.doctor_probes import Probe, flavor_environment, run_probes
from paged_trt.scripts.error_output import Output, error_record, fail, json_option, plain

EXIT_NOTHING_SERVES: Final = UnsupportedError.exit_code
_MARKS: Final = {OK: "[green]✓[/green]", NOTE: "[yellow]·[/yellow]", PROBLEM: "[red]✗[/red]"}
_DEVICE, _KERNELS, _RUNTIME = "GPU and driver", "NVRTC and kernels", "onnxruntime"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Diagnosis:
    """What was found.

    Attributes:
        findings: in the order in which they are shown.
        executors: executor -> what keeps it from serving a model; None where nothing does.
    """

    findings: tuple[Finding, ...]
    executors: dict[str, Finding | None]

    @property
    def can_serve(self) -> bool:
        """Whether some executor can serve a model here."""
        return None in self.executors.values()


@click.command(name="doctor")
@click.argument("engine_dir", required=False, type=click.Path(path_type=Path))
@click.option("--device", type=int, default=0, show_default=True, help="CUDA device to look at.")
@click.option("--error", "code", help="Show the page of an error code, such as PTRT-K001.")
@json_option
@click.pass_context
def command(
    ctx: click.Context, engine_dir: Path | None, device: int, code: str | None, as_json: bool
) -> None:
    """Say what this machine can run, what it lacks, and what to do about it.

    Looks at GPU and driver, every TensorRT that is installed, the kernel compiler, onnxruntime
    and caches, each in a process of its own, and with ENGINE_DIR at an engine, too. The exit
    code is 0 where some executor can serve a model, else 2.

    \b
    Example:
      paged-trt doctor
      paged-trt doctor engine --json | jq .executors
      paged-trt doctor --error PTRT-U003
    """
    if code is not None:
        _show_page(code, as_json=as_json)
        return
    diagnosis = examine(engine_dir, device)
    if as_json:
        click.echo(json.dumps(report(diagnosis), indent=2))
    else:
        show(diagnosis, Console())
    if not diagnosis.can_serve:
        ctx.exit(EXIT_NOTHING_SERVES)


def examine(engine_dir: Path | None, device: int) -> Diagnosis:
    """Look at the machine, and at an engine directory where one is given."""
    installed = [name for name in trt.FLAVORS if importlib.util.find_spec(name) is not None]
    wanted: dict[str, tuple[tuple[str, ...], dict[str, str]]] = {
        "device": (("device",), {}),
        "kernels": (("kernels",), {}),
        "onnxruntime": (("onnxruntime",), {}),
        **{name: (("tensorrt",), flavor_environment(name)) for name in installed},
    }
    manifest, engine_finding = _read_engine(engine_dir)
    if manifest is not None:
        wanted["plan"] = (("plan", str(engine_dir), str(device)), {})
    probes = run_probes(wanted)
    gpu = findings.device_finding(probes["device"], device)
    arch = probes["device"]["devices"][device]["arch"] if gpu.status == OK else None
    chosen, flavors = _flavors(installed, probes, arch)
    engine = [] if engine_finding is None else [engine_finding]
    found = [
        *findings.system_findings(),
        gpu,
        *flavors,
        findings.kernels_finding(probes["kernels"]),
        findings.onnxruntime_finding(probes["onnxruntime"]),
        findings.cache_finding(),
        *engine,
    ]
    if manifest is not None:
        found.append(_plan_finding(manifest, probes["plan"]))
    return Diagnosis(findings=tuple(found), executors=_executors(found, chosen, manifest))


def _flavors(
    installed: list[str], probes: dict[str, Probe], arch: str | None
) -> tuple[str, list[Finding]]:
    """The flavour that commands use, and what was found of each one."""
    if not installed:
        page = pages()[TensorRtMissingError.code]
        missing = Finding(
            topic="TensorRT",
            status=NOTE,
            found="no flavour is installed: no plan can be built or run",
            remedy=page.remedy,
            code=page.code,
        )
        return missing.topic, [missing]
    found = [
        each for name in installed for each in findings.flavor_findings(name, probes[name], arch)
    ]
    try:
        return trt.flavor(), found
    except ConfigError as error:
        wrong = Finding(
            topic="environment",
            status=PROBLEM,
            found=str(error),
            remedy=f"unset {trt.FLAVOR_VARIABLE}, or set it to {' or '.join(installed)}",
            code=error.code,
        )
        return wrong.topic, [*found, wrong]


def _read_engine(engine_dir: Path | None) -> tuple[EngineManifest | None, Finding | None]:
    if engine_dir is None:
        return None, None
    topic = "engine directory"
    try:
        manifest = read_manifest(engine_dir)
        check_files(engine_dir, manifest)
        check_hops(engine_dir, manifest)
    except PagedTrtError as error:
        remedy = pages()[error.code].remedy
        return None, Finding(
            topic=topic, status=PROBLEM, found=str(error), remedy=remedy, code=error.code
        )
    pages_of_pool = manifest.spec.pool.num_pages
    found = f"{engine_dir}: files and page count ({pages_of_pool}) agree at every hop"
    return manifest, Finding(topic=topic, status=OK, found=found)


def _plan_finding(manifest: EngineManifest, probe: Probe) -> Finding:
    build = manifest.build
    made_by = f"built by {build.flavor} {build.tensorrt_version}, route {build.route}"
    if "error" not in probe:
        return Finding(topic="plan", status=OK, found=f"{made_by}, fits this machine")
    code, message = probe["error"]["code"], probe["error"]["message"]
    page = pages().get(code)
    remedy = "" if page is None else page.remedy
    return Finding(
        topic="plan", status=NOTE, found=f"{made_by}: {message}", remedy=remedy, code=code
    )


def _executors(
    found: list[Finding], chosen: str, manifest: EngineManifest | None
) -> dict[str, Finding | None]:
    """What keeps each executor from serving."""
    reference = {_RUNTIME, "engine directory"}
    tensorrt = {_DEVICE, chosen, f"{chosen} library", _KERNELS, "engine directory", "plan"}
    blocked = {
        name: next((each for each in found if each.topic in topics and each.status != OK), None)
        for name, topics in (("reference", reference), ("tensorrt", tensorrt))
    }
    if manifest is not None and MODEL_FILE not in manifest.files and not blocked["reference"]:
        blocked["reference"] = Finding(
            topic="engine directory",
            status=NOTE,
            found=f"it holds no {MODEL_FILE}",
            remedy="rebuild without `--no-reference`",
            code=ManifestError.code,
        )
    return blocked


def report(diagnosis: Diagnosis) -> dict[str, Any]:
    """The diagnosis as JSON."""
    data: dict[str, Any] = {
        "can_serve": diagnosis.can_serve,
        "executors": {
            name: {
                "can_serve": reason is None,
                "reason": None if reason is None else dataclasses.asdict(reason),
            }
            for name, reason in diagnosis.executors.items()
        },
        "findings": [dataclasses.asdict(each) for each in diagnosis.findings],
    }
    if not diagnosis.can_serve:
        data["error"] = error_record(
            _nothing_serves(diagnosis), _code(diagnosis), EXIT_NOTHING_SERVES
        )
    return data


def show(diagnosis: Diagnosis, console: Console) -> None:
    """Print the findings with their remedies, then the verdict."""
    table = Table(title="This machine", title_justify="left", box=box.SIMPLE_HEAD)
    for name in ("", "what", "found, and what to do"):
        table.add_column(name)
    for each in diagnosis.findings:
        code = f" [{each.code}]" if each.code else ""
        text = plain(each.found + code)
        if each.remedy:
            text.append_text(plain(f"\n→ {each.remedy}"))
        table.add_row(_MARKS[each.status], each.topic, text)
    console.print(table)
    for name, reason in diagnosis.executors.items():
        because = "can serve a model here" if reason is None else f"cannot: {reason.found}"
        console.print(plain(f"{name} executor: {because}"), soft_wrap=True)
    if not diagnosis.can_serve:
        message = _nothing_serves(diagnosis)
        fail(message, EXIT_NOTHING_SERVES, _code(diagnosis), Output(), names_doctor=False)


def _nothing_serves(diagnosis: Diagnosis) -> str:
    # An error of ours says what to do already, behind its semicolon.
    reasons = [
        f"{name}: {reason.found}" + ("" if "; " in reason.found else f"; {reason.remedy}")
        for name, reason in diagnosis.executors.items()
        if reason is not None
    ]
    return "no executor can serve a model here. " + " | ".join(reasons)


def _code(diagnosis: Diagnosis) -> str:
    """Code of the first reason: the reference executor asks for least."""
    codes = [reason.code for reason in diagnosis.executors.values() if reason and reason.code]
    return codes[0] if codes else UnsupportedError.code


def _show_page(code: str, *, as_json: bool) -> None:
    page = pages().get(code.upper())
    if page is None:
        raise ConfigError(f"`{code}` is no error code; they are {', '.join(pages())}")
    if as_json:
        click.echo(json.dumps(dataclasses.asdict(page), indent=2))
        return
    click.echo(_page_text(page))


def _page_text(page: ErrorPage) -> str:
    code = "of the failing step" if page.exit_code is None else page.exit_code
    return (
        f"{page.code}  {page.name}, exit code {code}\n\n{page.meaning}\n\nExample:\n  "
        f"{page.example}\n\nWhat to do:\n  {page.remedy}"
    )

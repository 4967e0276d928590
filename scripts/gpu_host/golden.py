"""Golden files: what the reference executor computes here, for `polygraphy --paged-trt` there.

`make` runs on a machine without a GPU that has the TensorRT of the host: it builds a toy engine
for each type of pool and saves inputs and outputs of some steps. `check` runs on the host.
"""

from __future__ import annotations

import importlib.metadata
import json
import re
import subprocess
import sys
import tarfile
import tempfile
import time
from pathlib import Path
from typing import Any, Final

import click

from paged_trt.plugins.errors import ConfigError
from paged_trt.plugins.files import write_bytes, write_text
from paged_trt.plugins.manifest import KV_SCALES_FILE, MODEL_FILE, PLAN_FILE
from paged_trt.runtime.polygraphy_files import write_polygraphy_files
from paged_trt.scripts.example_models.config import Dialect
from paged_trt.scripts.example_models.toy import write_toy
from paged_trt.scripts.files import require_writable
from paged_trt.scripts.gpu_host.ending import end
from paged_trt.scripts.gpu_host.host_results import (
    results_path,
    tensorrt_in_use,
    write_results,
)

LIMITS: Final = ("--max-batch-size=4", "--max-input-len=300", "--max-kv-cache-capacity=400")
PROMPT_LENS: Final = (1, 127, 129, 300)
POOLS: Final[dict[str, tuple[str, ...]]] = {
    "float16": (),
    "bfloat16": ("--dtype=bfloat16",),
    "float8": ("--kv-cache-dtype=float8",),
    "int8": ("--kv-cache-dtype=int8",),
}
"""Options of `paged-trt build` for each engine."""
QUANTISED: Final = ("float8", "int8")
PROMPTS: Final = ("--input-ids=1,2,3,4,5,6,7,8,9", "--input-ids=11,7,5,3,2", "--input-ids=4,4,8")
"""What the scales are made from."""
OPTIONS_FILE: Final = "polygraphy.json"
POLYGRAPHY: Final = "import sys; from polygraphy.tools import main; sys.exit(main())"


@click.group()
def main() -> None:
    """Golden files for an engine on a GPU.

    \b
    Example:
      python -m paged_trt.scripts.gpu_host.golden make golden.tar.xz
    """


@main.command()
@click.argument("archive", type=click.Path(path_type=Path))
def make(archive: Path) -> None:
    """Build engines, save golden files and write both as ARCHIVE, such as golden.tar.xz.

    \b
    Example:
      python -m paged_trt.scripts.gpu_host.golden make golden.tar.xz
    """
    require_writable(archive, option="ARCHIVE")
    with tempfile.TemporaryDirectory() as folder:
        staged = Path(folder, "golden.tar.xz")
        write_toy(Path(folder) / "toy", Dialect.ATTENTION23_PAST)
        with tarfile.open(staged, "w:xz") as tar:
            for name in POOLS:
                _make_one(Path(folder), name, tar)
        write_bytes(archive, staged.read_bytes())
    click.echo(f"{archive}: {archive.stat().st_size:,} bytes")


def _make_one(folder: Path, name: str, tar: tarfile.TarFile) -> None:
    model = folder / "toy" / MODEL_FILE
    target = folder / name
    target.mkdir()
    engine = target / "engine"
    scales: tuple[str, ...] = ()
    if name in QUANTISED:
        file = target / KV_SCALES_FILE
        scales = (f"--kv-scales={file}",)
        _paged_trt("calibrate", str(model), "-o", str(file), f"--kv-cache-dtype={name}", *PROMPTS)
    _paged_trt("build", str(model), "-o", str(engine), *LIMITS, *POOLS[name], *scales)
    # Its folder holds what only the CPU needs.
    files = write_polygraphy_files(engine, folder / f"{name}-check", prompt_lens=PROMPT_LENS)
    saved = [f"--save-{kind}={target / kind}" for kind in ("inputs", "outputs")]
    words = [str(engine / MODEL_FILE), "--paged-ref", f"--data-loader-script={files.loader}"]
    done = _polygraphy([*words, *saved])
    if done.returncode:
        raise ConfigError(f"Polygraphy made no golden files:\n{done.stdout[-3000:]}")
    found = {"options": files.options, "steps": files.num_steps, "tensorrt": tensorrt_in_use()}
    write_text(target / OPTIONS_FILE, json.dumps(found, indent=1) + "\n")
    tar.add(target, arcname=name)
    click.echo(f"{name}: {files.num_steps} steps")


@main.command()
@click.argument("archive", type=click.Path(path_type=Path))
@click.option("-o", "--output", type=click.Path(path_type=Path), required=True)
@click.option("--on-cpu", is_flag=True, help="The reference executor in the place of the plan.")
@click.option("--device", type=int, default=0)
@click.option("--commit", "tree")
def check(archive: Path, *, output: Path, on_cpu: bool, device: int, tree: str | None) -> None:
    """Hold plans against the golden files in ARCHIVE; exit 1 where one differs.

    \b
    Example:
      python -m paged_trt.scripts.gpu_host.golden check golden.tar.xz -o results
    """
    output.mkdir(parents=True, exist_ok=True)
    path = results_path(output, "polygraphy", device=device)
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        for each in _unpacked(archive, Path(folder)):
            rows.append(checked(each, on_cpu=on_cpu))
            # What was checked by now is kept.
            write_results(
                path, "polygraphy", rows, tensorrt=tensorrt_in_use(), device=device, tree=tree
            )
            click.echo(f"{each.name}: {'passed' if rows[-1]['passed'] else 'FAILED'}")
    sys.exit(0 if all(row["passed"] for row in rows) else 1)


def _unpacked(archive: Path, folder: Path) -> list[Path]:
    """Folders of the engines in an archive."""
    try:
        with tarfile.open(archive) as tar:
            tar.extractall(folder, filter="data")
    except (OSError, tarfile.TarError) as error:
        raise ConfigError(f"{archive} cannot be read ({error}); copy it again") from error
    found = sorted(path.parent for path in folder.glob(f"*/{OPTIONS_FILE}"))
    if not found:
        raise ConfigError(f"{archive} holds no golden files; make them with `golden make`")
    return found


def checked(folder: Path, *, on_cpu: bool) -> dict[str, Any]:
    """Run Polygraphy over the golden files of one engine.

    Args:
        folder: with the engine and its golden files.
        on_cpu: run the engine's model instead of its plan.
    """
    known = json.loads((folder / OPTIONS_FILE).read_text(encoding="utf-8"))
    runner = (MODEL_FILE, "--paged-ref") if on_cpu else (PLAN_FILE, "--paged-trt")
    saved = [f"--load-{kind}={folder / kind}" for kind in ("inputs", "outputs")]
    begin = time.monotonic()
    words = [str(folder / "engine" / runner[0]), runner[1], *saved, *known["options"]]
    done = _polygraphy(words)
    rate = re.findall(r"Pass Rate: ([\d.]+)%", done.stdout)
    return {
        "engine": folder.name,
        "runner": runner[1],
        "steps": known["steps"],
        "golden_files_by": known["tensorrt"],
        "options": known["options"],
        "exit_code": done.returncode,
        "pass_rate": float(rate[-1]) if rate else None,
        "passed": done.returncode == 0 and rate[-1:] == ["100.00"],
        "seconds": round(time.monotonic() - begin, 1),
        "output": "" if done.returncode == 0 else done.stdout[-4000:],
    }


def _paged_trt(*words: str) -> None:
    command = [sys.executable, "-m", "paged_trt.scripts.cli", *words]
    done = subprocess.run(  # noqa: S603 - our own words
        command, capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise ConfigError(f"`paged-trt {words[0]}` failed:\n{done.stderr[-3000:]}")


def _polygraphy(words: list[str]) -> subprocess.CompletedProcess[str]:
    """`polygraphy run`, its output as one text."""
    if not importlib.metadata.entry_points(group="polygraphy.run.plugins", name="paged-trt"):
        raise ConfigError(
            "Polygraphy does not know the runners of paged-trt, for it is not installed; install "
            "this checkout, or `unpack` the kit"
        )
    return subprocess.run(  # noqa: S603 - our own words
        [sys.executable, "-c", POLYGRAPHY, "run", *words],
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False,
    )  # fmt: skip


if __name__ == "__main__":
    end(main)

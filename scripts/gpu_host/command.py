"""The command line of the kit.

Until it has unpacked, the host has nothing of ours: `pack` and `unpack` need only Python's
standard library and pip. That is why this command does not use click.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from paged_trt.plugins.errors import PagedTrtError
from paged_trt.scripts.gpu_host.kit import EXAMPLE_MODEL, ROOT, KitError, download, install, pack

MIB: Final = 1 << 20
_DESCRIPTION: Final = """\
Brings the project to a GPU host that has no network, and runs it there.

On a machine with a network, `pack` downloads what such a host lacks into numbered folders of a
bounded size. On the host, `unpack` joins and checks the files and installs them into a folder
of their own, and `run` runs tests, engines and benchmarks, phase by phase:

    python -m paged_trt.scripts.gpu_host pack .whl/host --example-model
    # copy the checkout and .whl/host to the host, folder by folder where a copy is limited
    PYTHONPATH=.typing python -m paged_trt.scripts.gpu_host unpack .whl/host .venv-host
    PYTHONPATH=.typing:.venv-host python -m paged_trt.scripts.gpu_host run results --model smollm2
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; the exit code is 0, 1 where a step of `run` did not pass, or 2."""
    options = make_parser().parse_args(arguments)
    try:
        if options.command == "pack":
            return _pack(options)
        if options.command == "unpack":
            done = install(options.source, options.target)
            sys.stdout.write(f"{options.target}: {'installed' if done else 'is up to date'}\n")
            return 0
        return _run(options)
    except (KitError, PagedTrtError, OSError, ValueError) as error:
        sys.stderr.write(f"gpu_host: error: {error}\n")
        return 2


def make_parser() -> argparse.ArgumentParser:
    """The options of all commands."""
    parser = argparse.ArgumentParser(
        prog="gpu_host",
        description=_DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(dest="command", required=True)
    packing = _add_command(
        commands, "pack", "download and split, on a machine with a network",
        example="pack .whl/host --example-model",
    )  # fmt: skip
    packing.add_argument("output", type=Path, help="folder to write; must be empty or missing")
    packing.add_argument("--python", default="3.12", help="Python of the host [%(default)s]")
    packing.add_argument(
        "--batch-mib", type=int, default=56, help="size of a folder at most [%(default)s]"
    )
    packing.add_argument(
        "--example-model", action="store_true", help="also what `run --model smollm2` needs"
    )
    unpacking = _add_command(
        commands, "unpack", "join, check and install, on the host",
        example="unpack .whl/host .venv-host",
    )  # fmt: skip
    unpacking.add_argument("source", type=Path, help="what `pack` wrote")
    unpacking.add_argument("target", type=Path, help="folder to install into, for PYTHONPATH")
    running = _add_command(
        commands, "run", "tests, engines, benchmarks, on the host",
        example="run results --model smollm2",
    )  # fmt: skip
    _add_run_options(running)
    return parser


def _add_command(
    commands: argparse._SubParsersAction[argparse.ArgumentParser],
    name: str,
    text: str,
    *,
    example: str,
) -> argparse.ArgumentParser:
    return commands.add_parser(
        name,
        help=text,
        description=text,
        epilog=f"Example:\n  python -m paged_trt.scripts.gpu_host {example}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )


def _add_run_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("output", type=Path, help="folder for the results")
    parser.add_argument(
        "--phases",
        nargs="+",
        metavar="PHASE[/STEP]",
        help="tests, polygraphy, e2e, serving, engine, sanitize, or steps of them [all]",
    )
    parser.add_argument(
        "--seconds", type=float, default=3600, help="for everything; the rest is not run [3600]"
    )
    parser.add_argument(
        "--limit", nargs="+", default=[], metavar="PHASE/STEP=SECONDS", help="other time limits"
    )
    parser.add_argument("--model", help="ONNX model, or `smollm2` [a random toy]")
    parser.add_argument("--golden", type=Path, help="what `golden make` wrote, for `polygraphy`")
    parser.add_argument(
        "--workspace",
        type=Path,
        default=ROOT / ".work" / "gpu_host",
        help="models and engines; what is there is used again [.work/gpu_host]",
    )
    parser.add_argument("--archive", type=Path, help="all results as one .tar.gz")
    parser.add_argument("--parallel", type=int, default=16, help="processes of tests [16]")
    parser.add_argument("--device", type=int, default=0, help="CUDA device [%(default)s]")
    parser.add_argument("--commit", help="commit for the results [git describe]")
    parser.add_argument(
        "--dry-run", action="store_true", help="without a GPU: everything small, on the CPU"
    )
    parser.add_argument("--list", action="store_true", help="print the commands and run nothing")


def _pack(options: argparse.Namespace) -> int:
    more = EXAMPLE_MODEL if options.example_model else ()
    with tempfile.TemporaryDirectory() as folder:
        download(Path(folder), python=options.python, more=more)
        entries = pack(Path(folder), options.output, batch_bytes=options.batch_mib * MIB)
    size = sum(entry["size"] for entry in entries)
    folders = sum(path.is_dir() for path in options.output.iterdir())
    sys.stdout.write(f"{len(entries)} wheels, {size:,} bytes, {folders} folders\n")
    return 0


def _run(options: argparse.Namespace) -> int:
    # What runs an engine needs what `unpack` installs.
    from paged_trt.scripts.gpu_host.phases import PHASES, describe, steps_of
    from paged_trt.scripts.gpu_host.running import run_phases
    from paged_trt.scripts.gpu_host.settings import Settings

    settings = Settings(
        output=options.output.resolve(),
        workspace=options.workspace.resolve(),
        model=_model(options.model),
        golden=options.golden and options.golden.resolve(),
        device=options.device,
        parallel=options.parallel,
        tree=options.commit,
        dry_run=options.dry_run,
    )
    chosen = options.phases or list(PHASES)
    if options.list:
        sys.stdout.write(describe(steps_of(settings, chosen)) + "\n")
        return 0
    outcomes = run_phases(
        settings,
        chosen,
        seconds=options.seconds,
        limits=dict(map(_limit, options.limit)),
        archive=options.archive,
    )
    return 0 if all(outcome.is_good for outcome in outcomes) else 1


def _model(text: str | None) -> str | None:
    """`smollm2`, or the absolute path of a file."""
    return text if text in (None, "smollm2") else str(Path(str(text)).resolve())


def _limit(text: str) -> tuple[str, float]:
    """`tests/kernels=90` as a name and seconds."""
    name, _, seconds = text.partition("=")
    try:
        return name, float(seconds)
    except ValueError:
        raise ValueError(f"`--limit {text}` is no PHASE/STEP=SECONDS") from None

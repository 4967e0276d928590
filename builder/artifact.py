"""The engine directory: written under a temporary name beside its place, then renamed."""

from __future__ import annotations

import contextlib
import os
import shutil
import uuid
from collections.abc import Iterable, Iterator
from pathlib import Path

from paged_trt.plugins.errors import ConfigError
from paged_trt.plugins.files import naming
from paged_trt.plugins.manifest import (
    ENGINE_FILES,
    MANIFEST_FILE,
    TOKENIZER_FILES,
    EngineManifest,
    FileRecord,
    file_record,
)


def require_target(target: Path, *, force: bool) -> None:
    """Check that an engine directory may be written at `target`, before any work is done.

    Raises:
        ConfigError: something is there and `force` is off, or it is no engine directory.
    """
    if not target.parent.is_dir():
        raise ConfigError(f"{target.parent} is no directory; create it first")
    if not target.exists() and not target.is_symlink():
        return
    if not force:
        raise ConfigError(f"{target} exists; pass `--force` to replace it, or another `-o`")
    # A typing slip must not delete somebody's files: only our own directory is replaced.
    strangers = (
        sorted(path.name for path in target.iterdir() if path.name not in ENGINE_FILES)
        if target.is_dir() and not target.is_symlink()
        else [target.name]
    )
    # A model's own folder holds nothing but names of ours, and is no engine either.
    if not strangers and any(target.iterdir()) and not (target / MANIFEST_FILE).is_file():
        strangers = [path.name for path in target.iterdir()]
    if strangers:
        raise ConfigError(
            f"{target} is no engine directory (it holds `{strangers[0]}`); "
            "`--force` replaces engine directories only"
        )


def require_outside(target: Path, paths: Iterable[Path]) -> None:
    """Check that replacing `target` loses nothing that the build reads or writes beside it.

    Raises:
        ConfigError: one of `paths` lies in `target`.
    """
    folder = target.resolve()
    for path in paths:
        if path.resolve().is_relative_to(folder):
            raise ConfigError(
                f"{path} lies in {target}, which this build replaces; pass another `-o`, or move "
                "the file"
            )


@contextlib.contextmanager
def staged_directory(target: Path, *, force: bool) -> Iterator[Path]:
    """Yield a fresh directory beside `target` that takes its place when the block ends.

    On any exception, Ctrl-C included, the fresh directory is removed and `target` stays.

    Raises:
        ConfigError: as `require_target`, of what came to `target` while the block ran.
    """
    staging = _sibling(target)
    try:
        # Named before it is made: an interrupt cannot come between the making and this block.
        with naming(target, staged=staging):
            staging.mkdir(mode=0o700)
            yield staging
        staging.chmod(0o755)
        for path in staging.iterdir():
            _flush(path)
        # A build takes minutes: another one may have finished here meanwhile.
        require_target(target, force=force)
        _replace(staging, target)
    except BaseException:
        shutil.rmtree(staging, ignore_errors=True)
        raise


def _sibling(target: Path) -> Path:
    """A hidden path beside `target` that nobody has."""
    return target.with_name(f".{target.name[:64]}.{uuid.uuid4().hex}")


def _flush(path: Path) -> None:
    with path.open("rb") as stream:
        os.fsync(stream.fileno())


def _replace(staging: Path, target: Path) -> None:
    if not target.exists():
        staging.rename(target)
        return
    # A directory cannot be renamed over a full one: the old one steps aside first.
    aside = _sibling(target)
    old = aside / target.name
    try:
        aside.mkdir(mode=0o700)
        target.rename(old)
        staging.rename(target)
    finally:
        # Where the old one cannot go back, it stays aside: an error must not delete it.
        if staging.exists() and old.exists():
            old.rename(target)
        shutil.rmtree(aside, ignore_errors=True)


def tokenizer_sources(tokenizer: Path | None, model: Path) -> list[Path]:
    """Files that travel with the engine so that it can read and write text.

    Args:
        tokenizer: a directory or a `tokenizer.json`; None looks beside `model`.
        model: the source model.

    Raises:
        ConfigError: `tokenizer` is given and holds no `tokenizer.json`.
    """
    folder = model.parent if tokenizer is None else tokenizer
    if folder.is_file():
        folder = folder.parent
    found = [folder / name for name in TOKENIZER_FILES if (folder / name).is_file()]
    if tokenizer is not None and folder / TOKENIZER_FILES[0] not in found:
        raise ConfigError(
            f"{tokenizer} holds no `tokenizer.json`; pass the folder that a tokenizer was saved to"
        )
    return found


def file_records(staging: Path) -> dict[str, FileRecord]:
    """Hashes of every file of a staged engine directory but the manifest."""
    return {
        path.name: file_record(path)
        for path in sorted(staging.iterdir())
        if path.name != MANIFEST_FILE
    }


def write_manifest(staging: Path, manifest: EngineManifest) -> None:
    """Write `manifest.json` into a staged directory, as its last file."""
    (staging / MANIFEST_FILE).write_text(manifest.to_json(), encoding="utf-8")

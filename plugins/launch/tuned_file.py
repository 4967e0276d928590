"""The file that `paged-trt tune` writes, and its reader.

One file per device model in the directory of the kernel cache, trusted as that is: it is not
read where another user may write. It names the driver, the kernel sources and the compiler of
the measurement; where one of them is another now, the file is stale and nothing of it is used.
A damaged or stale file costs one log line and never an error: the planner's heuristic is left.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import logging
import os
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Final, Literal

import filelock
import pydantic

from paged_trt.plugins.errors import ConfigError
from paged_trt.plugins.files import PRIVATE_MODE, write_text
from paged_trt.plugins.launch.compiler import cache_directory, require_private
from paged_trt.plugins.launch.tuned import (
    NO_TUNED_PLANS,
    Count,
    Record,
    TunedPlan,
    TunedPlans,
    TuningTarget,
)
from paged_trt.plugins.version import version

MAX_FILE_BYTES: Final = 2**24
LOCK_SECONDS: Final = 60
_LOG: Final = logging.getLogger("paged_trt")
_AGAIN: Final = "run `paged-trt tune` again"


class _TunedFile(Record):
    schema_version: Literal[1] = 1
    created_by: str
    gpu: str
    arch: str
    num_multiprocessors: Count
    driver: str
    kernels: str
    compiler: str
    plans: tuple[TunedPlan, ...]

    def target(self) -> TuningTarget:
        names = [field.name for field in dataclasses.fields(TuningTarget)]
        return TuningTarget(**{name: getattr(self, name) for name in names})


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TunedLookup:
    """What was found where the plans of a device would be.

    Attributes:
        path: the file; None where the user has no cache directory.
        plans: those that hold; none where there are none.
        problem: why a file that is there is not used; None where there is none or it is used.
    """

    path: Path | None
    plans: TunedPlans = NO_TUNED_PLANS
    problem: str | None = None


def tuned_path(target: TuningTarget, directory: Path | None = None) -> Path:
    """File of a device model.

    Args:
        target: name and architecture count.
        directory: None takes the directory of the kernel cache.

    Raises:
        OSError: the user has no home directory.
    """
    words = re.sub(r"[^a-z0-9]+", "-", target.gpu.lower()).strip("-")[:40]
    # Two names may shorten to the same words.
    mark = hashlib.sha256(f"{target.gpu}\0{target.num_multiprocessors}".encode()).hexdigest()[:8]
    folder = cache_directory() if directory is None else directory
    return folder / f"tuned-{words}-{target.arch}-{mark}.json"


def look_up_tuned(target: TuningTarget, directory: Path | None = None) -> TunedLookup:
    """The file of `target`, and the plans in it that hold now.

    Args:
        target: device, driver and kernels of now.
        directory: as in `tuned_path`.
    """
    path = None
    try:
        path = tuned_path(target, directory)
        if not path.is_file():
            return TunedLookup(path=path)
        require_private(path.parent)
        found = _read(path)
    except (OSError, ValueError) as error:
        reason = " ".join(str(error).split())[:200]
        return TunedLookup(path=path, problem=f"tuned plans are not used, {reason}; {_AGAIN}")
    if stale := _difference(found, target):
        problem = f"{len(found.plans)} tuned plans of {path} are stale, {stale}; {_AGAIN}"
        return TunedLookup(path=path, problem=problem)
    return TunedLookup(path=path, plans=TunedPlans(found.plans))


def read_tuned(target: TuningTarget, directory: Path | None = None) -> TunedPlans:
    """Plans that were measured for `target`; none where there are none that hold for it.

    Whatever is wrong with the file is one log line.

    Args:
        target: as in `look_up_tuned`.
        directory: as in `tuned_path`.
    """
    found = look_up_tuned(target, directory)
    if found.problem is not None:
        _LOG.warning("%s", found.problem)
    return found.plans


def open_tuned(path: Path) -> tuple[TuningTarget, TunedPlans]:
    """A file that the user names, of whatever device.

    Raises:
        ConfigError: it cannot be read, or is no such file.
    """
    try:
        found = _read(path)
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"{error}; pass a file that `paged-trt tune` wrote, its last line names it"
        ) from error
    return found.target(), TunedPlans(found.plans)


def require_tuned_place(target: TuningTarget, directory: Path | None = None) -> Path:
    """Refuse a directory that `write_tuned` would refuse, before minutes of timing are lost.

    Returns:
        The file of `tuned_path`, whose directory is there.

    Raises:
        OSError: its directory cannot be made or written, or others may write it.
    """
    path = tuned_path(target, directory)
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    require_private(path.parent)
    if not os.access(path.parent, os.W_OK):
        raise OSError(f"{path.parent} cannot be written")
    return path


def write_tuned(
    plans: Iterable[TunedPlan], target: TuningTarget, directory: Path | None = None
) -> Path:
    """Add measured plans to the file of a device; stale ones in it are dropped.

    Returns:
        The file.

    Raises:
        OSError: it cannot be written, or others may write its directory.
        ConfigError: another process holds the file.
    """
    path = require_tuned_place(target, directory)
    try:
        with filelock.FileLock(path.with_suffix(".lock"), timeout=LOCK_SECONDS):
            kept = TunedPlans((*read_tuned(target, directory).all(), *plans)).all()
            _write(path, _TunedFile(
                created_by=f"paged-trt {version()}", plans=kept, **dataclasses.asdict(target)
            ))  # fmt: skip
    except filelock.Timeout as error:
        raise ConfigError(
            f"another process has held {path} for {LOCK_SECONDS} s; end it, or set "
            "PAGED_TRT_CACHE_DIR to another directory"
        ) from error
    return path


def _read(path: Path) -> _TunedFile:
    """The file, checked.

    Raises:
        OSError: it cannot be read.
        ValueError: it is too large or no such file (`pydantic.ValidationError` is one).
    """
    size = path.stat().st_size
    if size > MAX_FILE_BYTES:
        raise ValueError(f"{path} has {size} bytes and may have {MAX_FILE_BYTES}")
    try:
        return _TunedFile.model_validate_json(path.read_bytes())
    except pydantic.ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        place = ".".join(str(part) for part in first["loc"])
        what = f"`{place}`: {first['msg']}" if place else first["msg"]
        raise ValueError(f"{path} is damaged: {what}") from error


def _difference(found: _TunedFile, target: TuningTarget) -> str | None:
    for field in dataclasses.fields(target):
        was, now = getattr(found, field.name), getattr(target, field.name)
        if was != now:
            shown = [str(value)[:40] for value in (was, now)]
            return f"their {field.name} is {shown[0]} and now it is {shown[1]}"
    return None


def _write(path: Path, content: _TunedFile) -> None:
    text = json.dumps(content.model_dump(mode="json"), indent=1)
    write_text(path, text + "\n", mode=PRIVATE_MODE)

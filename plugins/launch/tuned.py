"""Plans that were measured on a device: the file that `paged-trt tune` writes, and its reader.

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
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, Final, Literal

import filelock
import pydantic

from paged_trt.plugins.errors import ConfigError
from paged_trt.plugins.files import PRIVATE_MODE, write_text
from paged_trt.plugins.launch.compiler import cache_directory, require_private
from paged_trt.plugins.launch.plans import AttentionPlan, parse_attention_plan
from paged_trt.plugins.launch.requests import AttentionPlanRequest
from paged_trt.plugins.version import version

MAX_FILE_BYTES: Final = 2**24
LOCK_SECONDS: Final = 60
_LOG: Final = logging.getLogger("paged_trt")
_AGAIN: Final = "run `paged-trt tune` again"
_Count = Annotated[int, pydantic.Field(ge=1, lt=2**31)]
_Microseconds = Annotated[float, pydantic.Field(gt=0, allow_inf_nan=False)]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TuningTarget:
    """What a measurement holds for.

    Attributes:
        gpu: name of the device.
        arch: architecture, such as `sm_90`.
        num_multiprocessors: of the device.
        driver: version of the driver.
        kernels: SHA-256 of the kernel sources.
        compiler: version of NVRTC.
    """

    gpu: str
    arch: str
    num_multiprocessors: int
    driver: str
    kernels: str
    compiler: str


class _Record(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(frozen=True, strict=True, extra="forbid")


class RequestKey(_Record):
    """What of a request decides how fast a plan is; the device is the file's."""

    activation_dtype: str
    kv_cache_dtype: str
    num_q_heads: _Count
    num_kv_heads: _Count
    head_dim: _Count
    value_head_dim: _Count
    window: int
    has_softcap: bool
    rope: int
    num_tokens: _Count
    num_seqs: _Count
    table_width: _Count

    @classmethod
    def of(cls, request: AttentionPlanRequest) -> RequestKey:
        """Key of a request. The tokens of a prefill step are rounded up to a power of two."""
        attention, step = request.attention, request.step
        tokens = step.num_tokens
        return cls(
            activation_dtype=request.activation_dtype.value,
            kv_cache_dtype=request.kv_cache_dtype.value,
            num_q_heads=attention.num_q_heads,
            num_kv_heads=attention.num_kv_heads,
            head_dim=attention.head_dim,
            value_head_dim=attention.value_head_dim,
            window=attention.window,
            has_softcap=attention.softcap > 0,
            rope=int(attention.rope),
            num_tokens=tokens if request.is_decode else 1 << (tokens - 1).bit_length(),
            num_seqs=step.num_seqs,
            table_width=step.table_width,
        )


class TunedPlan(_Record):
    """The fastest plan of one request.

    Attributes:
        request: what was measured.
        plan_text: the plan, as `parse_attention_plan` reads it.
        microseconds: median time of the plan.
        heuristic_text: what the heuristic would have taken.
        heuristic_microseconds: median time of that.
    """

    request: RequestKey
    plan_text: str
    microseconds: _Microseconds
    heuristic_text: str
    heuristic_microseconds: _Microseconds

    @pydantic.field_validator("plan_text", "heuristic_text")
    @classmethod
    def _is_plan(cls, text: str) -> str:
        try:
            if parse_attention_plan(text) is None:
                raise ValueError("`auto` is no measured plan")
        except ConfigError as error:
            raise ValueError(str(error)) from error
        return text

    @property
    def plan(self) -> AttentionPlan:
        """The plan itself."""
        plan = parse_attention_plan(self.plan_text)
        if plan is None:
            raise ConfigError("`auto` is no measured plan")
        return plan

    def explain(self) -> str:
        """Why this plan, in words."""
        if self.plan_text == self.heuristic_text:
            return f"measured: the heuristic's own, {self.microseconds:.2f} us, is the fastest"
        return (
            f"measured: {self.microseconds:.2f} us, the heuristic's {self.heuristic_text} "
            f"{self.heuristic_microseconds:.2f} us"
        )


class _TunedFile(_Record):
    schema_version: Literal[1] = 1
    created_by: str
    gpu: str
    arch: str
    num_multiprocessors: _Count
    driver: str
    kernels: str
    compiler: str
    plans: tuple[TunedPlan, ...]


class TunedPlans:
    """Measured plans by request; empty where nothing was measured.

    Args:
        plans: a later plan of the same request wins.
    """

    def __init__(self, plans: Iterable[TunedPlan] = ()) -> None:
        self._plans: Mapping[RequestKey, TunedPlan] = {plan.request: plan for plan in plans}

    def __len__(self) -> int:
        return len(self._plans)

    def find(self, request: AttentionPlanRequest) -> TunedPlan | None:
        """The fastest plan of a request; None where it was not measured."""
        return self._plans.get(RequestKey.of(request)) if self._plans else None

    def all(self) -> tuple[TunedPlan, ...]:
        """Every plan, in the order in which requests came first."""
        return tuple(self._plans.values())


NO_TUNED_PLANS: Final = TunedPlans()


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


def read_tuned(target: TuningTarget, directory: Path | None = None) -> TunedPlans:
    """Plans that were measured for `target`; none where there are none that hold for it.

    Whatever is wrong with the file is one log line.

    Args:
        target: device, driver and kernels of now.
        directory: as in `tuned_path`.
    """
    try:
        path = tuned_path(target, directory)
        if not path.is_file():
            return NO_TUNED_PLANS
        require_private(path.parent)
        found = _read(path)
    except (OSError, ValueError) as error:
        reason = " ".join(str(error).split())[:200]
        _LOG.warning("tuned plans are not used, %s; %s", reason, _AGAIN)
        return NO_TUNED_PLANS
    if stale := _difference(found, target):
        _LOG.warning(
            "%d tuned plans of %s are stale, %s; %s", len(found.plans), path, stale, _AGAIN
        )
        return NO_TUNED_PLANS
    return TunedPlans(found.plans)


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
        raise ValueError(f"{path} is damaged: {error}") from error


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

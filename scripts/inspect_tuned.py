"""Where `paged-trt inspect` takes measured plans from, and what it says of that."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from paged_trt.plugins.errors import ConfigError
from paged_trt.plugins.launch.sources import kernel_source_sha256
from paged_trt.plugins.launch.tuned import NO_TUNED_PLANS, TunedPlans, TuningTarget
from paged_trt.plugins.launch.tuned_file import look_up_tuned, open_tuned
from paged_trt.plugins.manifest import EngineManifest
from paged_trt.scripts.doctor_probes import run_probe
from paged_trt.scripts.inspect_plans import Device


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TunedSource:
    """Measured plans of a device.

    Attributes:
        device: that plans are for; None where there is none.
        plans: those that are used.
        file: where they come from, or would come from; None where nothing was looked for.
        note: which file is used, or why none is.
    """

    device: Device | None
    plans: TunedPlans = NO_TUNED_PLANS
    file: Path | None = None
    note: str

    def to_json(self) -> dict[str, Any]:
        """Everything as JSON types but the plans, which the steps name."""
        file = None if self.file is None else str(self.file)
        return {"file": file, "plans": len(self.plans), "note": self.note}


def tuned_source(
    manifest: EngineManifest, device: Device | None, number: int, file: Path | None
) -> TunedSource:
    """The file that holds for the device at hand, or the one that the user names.

    Args:
        manifest: of the engine.
        device: the one at hand; None where there is none.
        number: of that device.
        file: written on another machine perhaps; plans are those of its device.

    Raises:
        ConfigError: `file` is no file of measured plans, or one of other kernels.
    """
    if file is not None:
        return _named(file)
    if manifest.build.attention_plan is not None:
        note = "tuned plans are not looked up: the engine was built with `--attention-plan`"
        return TunedSource(device=device, note=note)
    if device is None:
        note = (
            "tuned plans belong to a GPU, and there is none here; `--tuned FILE` takes those that "
            "`paged-trt tune` wrote on another machine"
        )
        return TunedSource(device=None, note=note)
    probe = run_probe("tuning", str(number))
    if "error" in probe:
        note = f"tuned plans are not looked up: {probe['error']['message']}"
        return TunedSource(device=device, note=note)
    found = look_up_tuned(TuningTarget(**probe))
    note = found.problem or (
        f"{len(found.plans)} plans were measured on this device: {found.path}"
        if found.plans
        else f"nothing was tuned on this device: {found.path} does not exist; `paged-trt tune "
        "ENGINE_DIR` makes it"
    )
    return TunedSource(device=device, plans=found.plans, file=found.path, note=note)


def _named(file: Path) -> TunedSource:
    target, plans = open_tuned(file)
    kernels = kernel_source_sha256()
    if target.kernels != kernels:
        raise ConfigError(
            f"{file} was measured with kernels {target.kernels[:12]} and these are {kernels[:12]}; "
            "run `paged-trt tune` again with this version"
        )
    return TunedSource(
        device=Device(arch=target.arch, multiprocessors=target.num_multiprocessors),
        plans=plans,
        file=file,
        note=f"{len(plans)} plans were measured on {target.gpu}, driver {target.driver}: {file}; "
        "an engine takes them there, as long as that driver is in use",
    )

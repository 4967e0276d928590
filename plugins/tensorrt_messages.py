"""TensorRT's opaque messages, told in words that name the remedy: one table.

Every pattern was seen in a log of TensorRT-RTX 1.6 or 1.7, or stands as text in its library; a
test makes the messages that a machine without a GPU can make, and finds the others there.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable
from typing import Final, TypeVar

from paged_trt.plugins.errors import ComputeCapabilityError, PagedTrtError, PlanVersionError

_Error = TypeVar("_Error", bound=PagedTrtError)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Translation:
    """One kind of message.

    Attributes:
        code: stable code, which an error with such a message carries instead of its class's.
        name: the kind in a few words.
        pattern: regular expression of a line of TensorRT's log.
        example: such a line.
        meaning: what it says.
        remedy: what to do.
    """

    code: str
    name: str
    pattern: re.Pattern[str]
    example: str
    meaning: str
    remedy: str


TRANSLATIONS: Final = (
    Translation(
        code="PTRT-T001",
        name="plugin creator not found",
        pattern=re.compile(
            r"Plugin not found|Cannot find plugin|IPluginCreator\w* not found"
            r"|Op type PagedAttention is not supported|could not find plugin"
            r"|plugin creator version \S+ was not found|failed to load \w+ plugin"
        ),
        example="Plugin not found, are the plugin name, version, and namespace correct?",
        meaning="TensorRT met a plugin that no code of this process has registered",
        remedy=(
            "build and open engines with `paged-trt` or `paged_trt.runtime.engine.load_engine`, "
            "which register PagedAttention first; it is a Python plugin, so trtexec cannot load "
            "it. Where the message names another one, the model holds an operator that this "
            "TensorRT lacks"
        ),
    ),
    Translation(
        code=PlanVersionError.code,
        name="plan of another TensorRT version",
        pattern=re.compile(
            r"Version tag does not match|old deserialization call on a newer plan"
            r"|plan file is not compatible with this version"
            r"|plan major version does not match|does not match the runtime TensorRT version"
        ),
        example="Failed due to an old deserialization call on a newer plan file.",
        meaning="the plan was written by another version or flavour of TensorRT than the one here",
        remedy=(
            "install the version that `paged-trt inspect` names, or rebuild the engine with "
            "`paged-trt build` on the version that is installed"
        ),
    ),
    Translation(
        code="PTRT-T003",
        name="shapes and profiles disagree",
        pattern=re.compile(
            r"Dimension mismatch for tensor .* and profile|MIN<=OPT<=MAX"
            r"|is missing dimensions in profile|no optimization profile has been defined"
            r"|does not satisfy any optimization profiles"
        ),
        example=(
            "Dimension mismatch for tensor x and profile 0. At dimension axis 1, profile has "
            "min=5, opt=5, max=5 but tensor has 4."
        ),
        meaning="the shape of a tensor lies outside of the engine's optimization profiles",
        remedy=(
            "compare the dims with those of `paged-trt inspect ENGINE_DIR`; profiles come from "
            "`--max-batch-size`, `--max-num-tokens` and `--max-kv-cache-capacity` of the build"
        ),
    ),
    Translation(
        code="PTRT-T004",
        name="no supported formats",
        pattern=re.compile(r"could not find any supported formats|No supported formats for"),
        example="could not find any supported formats consistent with input/output data types",
        meaning=(
            "the types of the tensors at a plugin are not those that it was built for: its query, "
            "key and value must be of one float16 or bfloat16 type, its pools of the KV type"
        ),
        remedy="build again with `--dtype float16` or `--dtype bfloat16`",
    ),
    Translation(
        code=ComputeCapabilityError.code,
        name="unsupported compute capability",
        pattern=re.compile(
            r"cannot run on this GPU, which has compute capability|Target GPU SM .* not supported"
            r"|does not support this compute capability|Expected compute capability >="
        ),
        example="The engine cannot run on this GPU, which has compute capability 9.0.",
        meaning="this version of TensorRT, or this plan, does not run on the GPU that is here",
        remedy=(
            'on a Hopper GPU install `pip install "paged-trt[rtx-hopper]"` or NVIDIA\'s full '
            "TensorRT and rebuild; `paged-trt doctor` says which flavour runs here"
        ),
    ),
    Translation(
        code="PTRT-T007",
        name="the file is no plan",
        pattern=re.compile(
            r"Serialization assertion|Magic tag does not match|No engine found in plan"
        ),
        example="Serialization assertion header.magicTag == kEXPECTED_MAGIC_TAG failed.",
        meaning="the bytes are not those of a TensorRT plan",
        remedy="copy the file again in binary mode, or rebuild the engine with `paged-trt build`",
    ),
    Translation(
        code="PTRT-T006",
        name="no driver for TensorRT",
        pattern=re.compile(r"deserializeCudaEngine: .*(cudaError 35|driver version is insuffici)"),
        example="CUDA driver version is insufficient for CUDA runtime version",
        meaning="opening a plan needs an NVIDIA driver, and there is none or it is too old",
        remedy=(
            "install or update the driver, or pass `--executor reference` to run the model on the "
            "CPU"
        ),
    ),
)
"""In order of precedence: one cause often ends in several messages."""


def translate(lines: Iterable[str]) -> Translation | None:
    """What lines of a log mean; None where no line is known."""
    text = "\n".join(lines)
    return next((each for each in TRANSLATIONS if each.pattern.search(text)), None)


def tensorrt_error(
    kind: type[_Error], problem: str, *, log: str, cause: BaseException | None = None
) -> _Error:
    """An error about a failure inside TensorRT.

    Args:
        kind: class of the error.
        problem: what failed, without a full stop.
        log: last lines of TensorRT's log; may be empty.
        cause: what a plugin callback raised; it says more than TensorRT's log.

    Returns:
        The error, with the code of the translated message where there is one, or of a cause
        that ends in the same exit code.
    """
    found = translate(log.splitlines()) if cause is None else None
    message = problem if cause is None else f"{problem}: {cause}"
    if found is not None:
        message += f": {found.meaning}; {found.remedy}"
    error = kind(message + (f"\nlast lines of its log:\n{log}" if log else ""))
    if found is not None:
        error.code = found.code
    elif isinstance(cause, PagedTrtError) and cause.exit_code == kind.exit_code:
        error.code = cause.code
    error.__cause__ = cause
    return error

"""Error codes: one per kind, never changed, each with a page, and the catalogue is current."""

from __future__ import annotations

import collections
import re

import pytest

from paged_trt.plugins import errors
from paged_trt.plugins.error_catalog import error_classes, pages
from paged_trt.plugins.errors import PagedTrtError
from paged_trt.plugins.tensorrt_messages import TRANSLATIONS, tensorrt_error, translate
from paged_trt.scripts.error_pages import CATALOGUE, render

# Scripts and posts name these. Add lines; never change, reuse or remove one.
FROZEN = {
    "PTRT-B001": "BuildError",
    "PTRT-B002": "BuildCancelledError",
    "PTRT-C001": "ConfigError",
    "PTRT-C002": "KvPoolError",
    "PTRT-E001": "ExecutionError",
    "PTRT-K001": "KernelError",
    "PTRT-K002": "KernelCompileError",
    "PTRT-K003": "KernelLaunchError",
    "PTRT-M001": "ManifestError",
    "PTRT-M002": "SpecMismatchError",
    "PTRT-P001": "PagesExhausted",
    "PTRT-R001": "OnnxRewriteError",
    "PTRT-S001": "SequenceError",
    "PTRT-S002": "QueueFullError",
    "PTRT-T001": "plugin creator not found",
    "PTRT-T002": "PlanVersionError",
    "PTRT-T003": "shapes and profiles disagree",
    "PTRT-T004": "no supported formats",
    "PTRT-T005": "ComputeCapabilityError",
    "PTRT-T006": "no driver for TensorRT",
    "PTRT-T007": "the file is no plan",
    "PTRT-U001": "UnsupportedError",
    "PTRT-U002": "DeviceMissingError",
    "PTRT-U003": "TensorRtMissingError",
    "PTRT-U004": "PackageMissingError",
    "PTRT-X001": "usage",
    "PTRT-X002": "input or output",
    "PTRT-X003": "out of host memory",
    "PTRT-X004": "interrupted",
}


def test_codes_are_frozen() -> None:
    assert {code: page.name for code, page in pages().items()} == FROZEN


def test_a_class_has_a_code_of_its_own() -> None:
    """A new class that inherits its parent's code needs one, a page and a line in FROZEN."""
    counted = collections.Counter(kind.code for kind in error_classes())
    assert [code for code, times in counted.items() if times > 1] == []
    assert {kind.__name__ for kind in error_classes()} == {
        name
        for name, value in vars(errors).items()
        if isinstance(value, type) and issubclass(value, PagedTrtError) and name != "PagedTrtError"
    }


def test_message_codes_are_unique() -> None:
    codes = [each.code for each in TRANSLATIONS]
    assert len(set(codes)) == len(codes)


@pytest.mark.parametrize("code", sorted(FROZEN))
def test_a_page_says_what_to_do(code: str) -> None:
    page = pages()[code]
    assert re.fullmatch(r"PTRT-[A-Z]\d{3}", code)
    assert page.meaning
    assert page.example
    assert page.remedy.endswith(".")


def test_the_catalogue_is_current() -> None:
    assert CATALOGUE.read_text(encoding="utf-8") == render(), (
        "run `python -m paged_trt.scripts.error_pages`"
    )


@pytest.mark.parametrize("translation", TRANSLATIONS, ids=lambda each: each.code)
def test_a_translated_message_keeps_tensorrts_words(translation: object) -> None:
    from paged_trt.plugins.tensorrt_messages import Translation

    assert isinstance(translation, Translation)
    log = f"first line\n{_line(translation)}\nlast line"
    error = tensorrt_error(errors.BuildError, "TensorRT built no engine", log=log)
    assert error.code == translation.code
    assert error.exit_code == errors.BuildError.exit_code
    text = str(error)
    assert translation.remedy in text
    assert text.endswith("last line")


def _line(translation: object) -> str:
    example: str = translation.example  # type: ignore[attr-defined]
    # Said of the call that opens a plan only: a build without a GPU says it of other calls.
    return f"IRuntime::deserializeCudaEngine: {example} (cudaError 35)"


def test_a_callbacks_own_error_is_no_riddle() -> None:
    cause = errors.SpecMismatchError("num_pages", 4, 5, where="here")
    error = tensorrt_error(
        errors.BuildError, "TensorRT built no engine", log="Plugin not found", cause=cause
    )
    assert error.code == errors.BuildError.code
    assert error.__cause__ is cause
    assert str(cause) in str(error)


def test_a_kernel_that_fails_in_a_step_keeps_its_code() -> None:
    cause = errors.KernelLaunchError("no kernel for append")
    error = tensorrt_error(errors.ExecutionError, "TensorRT failed", log="", cause=cause)
    assert error.code == errors.KernelLaunchError.code


def test_an_unknown_message_stays_as_it_is() -> None:
    assert translate(["Local timing cache in use.", "cudaError 35: CUDA driver version"]) is None
    error = tensorrt_error(errors.ExecutionError, "TensorRT failed", log="strange")
    assert (error.code, str(error)) == (
        errors.ExecutionError.code,
        "TensorRT failed\nlast lines of its log:\nstrange",
    )

"""Tests marked `gpu` need a CUDA device: they skip without one, or fail under `--require-gpu`."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from paged_trt.plugins import cuda
from paged_trt.plugins.callback_errors import CALLBACK_ERRORS
from paged_trt.plugins.errors import UnsupportedError

MATRIX = "gpu-matrix"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--require-gpu",
        action="store_true",
        help="fail the tests marked `gpu` where no CUDA device can be used, instead of skipping",
    )
    parser.addoption(
        "--serving-engine",
        type=Path,
        metavar="DIR",
        help="engine directory that the device tests of serving run, instead of a toy",
    )
    parser.addoption(
        "--gpu-matrix",
        type=Path,
        metavar="FILE",
        help="write what the device tests compared, one row per combination, to this JSON file",
    )


def pytest_configure(config: pytest.Config) -> None:
    # A shell starts background jobs with SIGINT ignored; tests of Ctrl-C need it.
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    _tell_hypothesis()
    # Workers of pytest-xdist report to the controller, which writes.
    if config.getoption("--gpu-matrix") and not hasattr(config, "workerinput"):
        config.pluginmanager.register(MatrixWriter(config.getoption("--gpu-matrix")))


def _tell_hypothesis() -> None:
    """The same examples in every run, and no limit of time that a busy machine could miss."""
    try:
        import hypothesis
    except ImportError:
        # The tests on a GPU need none.
        return
    slow = [hypothesis.HealthCheck.too_slow]
    hypothesis.settings.register_profile(
        "paged-trt", deadline=None, derandomize=True, database=None, suppress_health_check=slow
    )
    hypothesis.settings.load_profile("paged-trt")


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("gpu") is None:
        return
    try:
        cuda.device_arch()
    except UnsupportedError as error:
        if item.config.getoption("--require-gpu"):
            pytest.fail(str(error), pytrace=False)
        pytest.skip(str(error))


@pytest.fixture(autouse=True)
def _no_kept_error() -> None:
    """Callbacks keep their first error for the process: no test sees that of an earlier one."""
    CALLBACK_ERRORS.clear()


@pytest.fixture(autouse=True)
def _matrix(request: pytest.FixtureRequest) -> Iterator[None]:
    """Hand what a device test noted to the report."""
    if request.node.get_closest_marker("gpu") is None:
        yield
        return
    from gpu import matrix

    matrix.NOTED.clear()
    yield
    request.node.user_properties.append((MATRIX, list(matrix.NOTED)))


class MatrixWriter:
    """Gathers the rows of all tests that passed."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._rows: list[dict[str, Any]] = []
        self._failed: set[str] = set()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self._failed.add(report.nodeid)
        if report.when == "teardown" and report.nodeid not in self._failed:
            for name, rows in report.user_properties:
                if name == MATRIX:
                    self._rows += rows

    def pytest_sessionfinish(self) -> None:
        from gpu import matrix

        matrix.write(self._path, self._rows)

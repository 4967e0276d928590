"""Tests marked `gpu` need a CUDA device: they skip without one, or fail under `--require-gpu`."""

from __future__ import annotations

import pytest

from paged_trt.plugins import cuda
from paged_trt.plugins.errors import UnsupportedError


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--require-gpu",
        action="store_true",
        help="fail the tests marked `gpu` where no CUDA device can be used, instead of skipping",
    )


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("gpu") is None:
        return
    try:
        cuda.device_arch()
    except UnsupportedError as error:
        if item.config.getoption("--require-gpu"):
            pytest.fail(str(error), pytrace=False)
        pytest.skip(str(error))

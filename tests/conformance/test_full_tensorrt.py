"""Every name of TensorRT that we use exists in NVIDIA's full TensorRT as well.

The full TensorRT is not on PyPI, but its Python bindings are. They are downloaded once per
cache, and import over empty libraries: enough to look at classes and to derive from them.
"""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest
from conformance import api_uses

ROOT = Path(__file__).resolve().parents[2]
CHILD = Path(__file__).parent / "child.py"
VERSIONS = ["10.13.3.9", "11.4.0.106"]
DISTRIBUTION = "tensorrt-cu13-bindings"
FUNCTIONS = [
    "createInferBuilder_INTERNAL",
    "createInferRefitter_INTERNAL",
    "createInferRuntime_INTERNAL",
    "createNvOnnxParserRefitter_INTERNAL",
    "createNvOnnxParser_INTERNAL",
    "getBuilderPluginRegistry",
    "getNvOnnxParserVersion",
    "getPluginRegistry",
    "initLibNvInferPlugins",
]
LIBRARIES = ["nvinfer", "nvinfer_plugin", "nvonnxparser"]


def cache_directory() -> Path:
    base = os.environ.get("PAGED_TRT_CACHE_DIR") or Path.home() / ".cache" / "paged-trt"
    return Path(base) / "conformance"


def download(version: str) -> Path:
    """The wheel of the bindings, from the cache or from the configured index."""
    folder = cache_directory() / version
    if not list(folder.glob("*.whl")):
        folder.mkdir(parents=True, exist_ok=True)
        command = [
            sys.executable,
            "-m",
            "pip",
            "download",
            "-q",
            "--no-deps",
            "--retries=1",
            "-d",
            folder,
        ]
        done = subprocess.run(
            [*map(str, command), f"{DISTRIBUTION}=={version}"], capture_output=True, text=True
        )
        if done.returncode:
            pytest.skip(f"{DISTRIBUTION} {version} cannot be downloaded: {done.stderr[-200:]}")
    return next(folder.glob("*.whl"))


@pytest.fixture(scope="module", params=VERSIONS)
def bindings(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, str]:
    """Environment of a process that imports the bindings as `tensorrt`."""
    compiler = shutil.which("gcc")
    if compiler is None:
        pytest.skip("gcc is not installed: the stub libraries cannot be made")
    wheel = download(request.param)
    directory = tmp_path_factory.mktemp("bindings")
    with zipfile.ZipFile(wheel) as archive:
        archive.extract("tensorrt_bindings/tensorrt.so", directory)
    package = directory / "tensorrt"
    (directory / "tensorrt_bindings").rename(package)
    (package / "__init__.py").write_text(
        f"from tensorrt.tensorrt import *\n__version__ = {request.param!r}\n"
    )
    source = directory / "stub.c"
    source.write_text("".join(f"void* {name}(void) {{ return 0; }}\n" for name in FUNCTIONS))
    major = request.param.split(".")[0]
    for library in LIBRARIES:
        name = f"lib{library}.so.{major}"
        options = ["-shared", "-fPIC", f"-Wl,-soname,{name}", "-o", str(directory / name)]
        subprocess.run([compiler, *options, str(source)], check=True)
    return {
        **os.environ,
        "LD_LIBRARY_PATH": str(directory),
        "PYTHONPATH": str(directory),
        "PAGED_TRT_FLAVOR": "tensorrt",
    }


def ask(
    environment: dict[str, str], uses: list[api_uses.Use], *, bogus_override: bool = False
) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, str(CHILD)],
        input=json.dumps(
            {
                "uses": [dataclasses.asdict(use) for use in uses],
                "bogus_override": bogus_override,
            }
        ),
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    answer: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return answer


def test_everything_that_we_use_exists(bindings: dict[str, str]) -> None:
    assert ask(bindings, api_uses.uses_in(ROOT))["problems"] == []


def test_our_classes_derive_from_these(bindings: dict[str, str]) -> None:
    expected = ["PagedAttentionPlugin", "_Creator", "Logger", "Monitor"]
    answer = ask(bindings, [])
    assert answer["classes"] == expected
    assert answer["overrides"] == []


def test_a_callback_with_other_arguments_is_reported(bindings: dict[str, str]) -> None:
    (found,) = ask(bindings, [], bogus_override=True)["overrides"]
    assert found == "PagedAttentionPlugin.configure_plugin takes 1 arguments, not [2]"


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ("api.PreviewFeature.NO_SUCH_FEATURE", "PreviewFeature.NO_SUCH_FEATURE does not exist"),
        ("load().NoSuchClass", "NoSuchClass does not exist"),
        ("engine.no_such_method(1)", "ICudaEngine.no_such_method does not exist"),
        ("self._network.nam = 1", "INetworkDefinition.nam does not exist"),
        ("severity = api.ILogger\nseverity.LOUD", "ILogger.LOUD does not exist"),
        ("profile.set_shape('x', (1,))", "set_shape is called with 2 arguments"),
        ("parser.parse(model, pathh='x')", "parse is called with 1 arguments and ['pathh']"),
    ],
)
def test_a_bogus_use_is_reported(bindings: dict[str, str], line: str, problem: str) -> None:
    source = f"from {api_uses.SEAM} import load\napi = load()\n{line}\n"
    (found,) = ask(bindings, api_uses.uses_in_source(source, "x.py"))["problems"]
    assert problem in found


def test_the_reader_sees_our_uses() -> None:
    """The list is long, and holds one of each kind: it does not pass by being empty."""
    names = {use.name for use in api_uses.uses_in(ROOT)}
    assert len(names) > 60
    assert names >= {
        "PreviewFeature.ALIASED_PLUGIN_IO_10_03",
        "Builder.build_serialized_network",
        "IBuilderConfig.progress_monitor",
        "ICudaEngine.get_tensor_profile_shape",
        "ILogger.INTERNAL_ERROR",
        "INetworkDefinition.name",
        "IPluginV3OneBuildV2",
        "PluginFieldType.FLOAT32",
        "TensorRTPhase.RUNTIME",
    }

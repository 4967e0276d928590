"""Real engine builds without a GPU, on the route of the version that is installed."""

from __future__ import annotations

import importlib.util
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import paged_models
import pytest

from paged_trt.plugins.dtypes import DType
from paged_trt.plugins.errors import ConfigError, UnsupportedError
from paged_trt.plugins.manifest import network_name
from paged_trt.plugins.trt import flavor

CHILD = Path(__file__).parent / "child.py"
PAGES = paged_models.make_spec().pool.num_pages
# onnx_ir and pydantic are imported anew by every child: most of its second is that.
TIMEOUT_S = 300


def tensorrt_is_missing() -> bool:
    try:
        return importlib.util.find_spec(flavor()) is None
    except UnsupportedError:
        return True


def flavor_is(name: str) -> bool:
    return not tensorrt_is_missing() and flavor() == name


pytestmark = pytest.mark.skipif(tensorrt_is_missing(), reason="TensorRT is not installed")


def run_case(case: str, *, exit_code: int = 0, **arguments: Any) -> dict[str, Any]:
    """Run one case of child.py and give its last line."""
    done = subprocess.run(
        [sys.executable, str(CHILD), case, json.dumps(arguments)],
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    assert done.returncode == exit_code, done.stderr
    lines = done.stdout.strip().splitlines()
    assert lines, done.stderr
    data: dict[str, Any] = json.loads(lines[-1])
    return data


def expect_error(case: str, error: str, *parts: str, **arguments: Any) -> dict[str, Any]:
    data = run_case(case, **arguments)
    assert data.get("error") == error, data
    for part in parts:
        assert part in data["message"]
    return data


@pytest.mark.parametrize(
    ("activation", "kv"),
    [
        ("float16", "float16"),
        ("bfloat16", "bfloat16"),
        ("float16", "float8"),
        ("bfloat16", "int8"),
    ],
)
def test_every_hop_holds_one_page_count(activation: str, kv: str) -> None:
    result = run_case("build", activation=activation, kv=kv)["result"]
    spec = paged_models.make_spec(activation_dtype=DType(activation), kv_cache_dtype=DType(kv))
    assert result["pages"] == PAGES
    assert result["hops"] == {
        "configured": [PAGES],
        "serialized": [PAGES],
        "network": [PAGES],
        "profiles": [PAGES],
    }
    assert result["name"] == network_name(spec)
    assert f"pages={PAGES} " in result["name"]
    assert result["plan_bytes"] > 0
    # Engine I/O is that of the contract on either route.
    assert sorted(result["io"]) == sorted(tensor.name for tensor in spec.tensors())


@pytest.mark.skipif(flavor_is("tensorrt"), reason="full TensorRT times tactics, on a GPU")
@pytest.mark.parametrize(("offered", "taken"), [([5, 2, 9], 5), ([], 0)])
def test_rtx_times_no_tactic_and_takes_the_first(offered: list[int], taken: int) -> None:
    """Why the plugin offers one tactic: with more, RTX would let the order decide."""
    result = run_case("tactics", offered=offered)["result"]
    layers_and_profiles = 2 * 2
    assert result == {
        "asked": layers_and_profiles,
        "taken": [taken] * layers_and_profiles,
        "ran": [],
    }


@pytest.mark.parametrize(
    "shape",
    [
        {"value_head_dim": 48},
        {"value_head_dim": 32, "rope": 0},
        {"rope": 2, "attention_plan": "split:256"},
    ],
    ids=["wide values", "no rope", "interleaved, split"],
)
def test_other_heads_and_ropes_build(shape: dict[str, Any]) -> None:
    result = run_case("build", kv="float16", **shape)["result"]
    assert result["record"]["attention_plan"] == shape.get("attention_plan")
    assert result["record"]["route"] in ("plugin", "gqa")


def test_an_extra_page_in_an_attribute() -> None:
    data = expect_error("extra_page_in_attribute", "SpecMismatchError", f"must be {PAGES}, ")
    assert data["field"] == "num_pages"
    assert f"found {PAGES + 1};" in data["message"]


@pytest.mark.parametrize("case", ["extra_page_in_pool_dim", "extra_page_in_network"])
@pytest.mark.parametrize("name", ["key_pool.0", "value_pool.1"])
def test_an_extra_page_in_a_pool(case: str, name: str) -> None:
    data = expect_error(case, "SpecMismatchError", f"`{name}`", f"({PAGES + 1}, ", name=name)
    assert data["field"] == "pool_shape"


def test_an_extra_page_in_a_pool_output() -> None:
    name = "value_pool_out.1"
    expect_error("extra_page_in_pool_dim", "SpecMismatchError", f"`{name}`", name=name)


@pytest.mark.parametrize("bound", [0, 1, 2])
def test_an_extra_page_in_a_profile(bound: int) -> None:
    place = f"profile 1 {('min', 'opt', 'max')[bound]}"
    expect_error(
        "extra_page_in_profile", "SpecMismatchError", place, f"found ({PAGES + 1}, ", bound=bound
    )


@pytest.mark.parametrize(
    ("case", "numbers"),
    [
        ("extra_page_in_plugin", (f"must be ({PAGES + 1}, ", f"found ({PAGES}, ")),
        ("ranged_pool", (f"must be ({PAGES}, ", f"found ({PAGES - 1}, ")),
    ],
)
def test_the_plugin_compares_the_profile_with_its_count(
    case: str, numbers: tuple[str, str]
) -> None:
    data = expect_error(case, "BuildError", *numbers)
    assert (data["cause"], data["cause_field"]) == ("SpecMismatchError", "key_pool.dims")


def test_an_extra_page_in_the_serialized_fields() -> None:
    numbers = (f"must be ({PAGES + 1}, ", f"found ({PAGES}, ")
    expect_error("extra_page_in_serialized_fields", "SpecMismatchError", *numbers)


def test_serialized_fields_round_trip() -> None:
    result = run_case("round_trip_of_fields")["result"]
    assert result["equal"]
    assert result["decoded_equal"]
    assert result["clone"]
    assert result["aliases"] == [-1, 3, 4, -1]
    assert result["tactics"] == [1]
    assert "num_pages" in result["fields"]


@pytest.mark.parametrize(
    ("changes", "part"),
    [
        ({"window": None}, "missing ['window']"),
        ({"surprise": 1}, "unknown ['surprise']"),
        ({"abi_version": 4}, "`abi_version` must be 3, found 4"),
        ({"route": 3}, "`route` must be one of [0, 1], found 3"),
        ({"attention_plan": 9}, "`attention_plan` must be one of [0, 1, 2, 3, 4, 5, 6], found 9"),
        ({"kv_cache_dtype": 99}, "`kv_cache_dtype` must be one of"),
    ],
)
def test_fields_of_another_plan_are_refused(changes: dict[str, Any], part: str) -> None:
    expect_error("fields_of_a_plan", "SpecMismatchError", part, changes=changes)


@pytest.mark.parametrize("name", ["plugin_namespace", "plugin_version"])
def test_a_node_without_plugin_attributes_is_refused(name: str) -> None:
    expect_error("missing_plugin_attribute", "SpecMismatchError", f"`{name}`", name=name)


def test_an_inlined_function_is_noticed() -> None:
    expect_error("inlined", "BuildError", "2 PagedAttention nodes became 0 plugin layers")


def test_without_the_preview_feature_nothing_is_built() -> None:
    """The proof that aliases are declared: TensorRT refuses them without the flag."""
    expect_error("no_preview_feature", "BuildError", "Aliased I/O used by plugin")


@pytest.mark.parametrize(
    "callback", ["get_workspace_size", "attach_to_context", "supports_format_combination"]
)
def test_an_exception_in_a_callback_is_the_cause(callback: str) -> None:
    part = "TensorRT built no engine: boom"
    data = expect_error("callback_raises", "BuildError", part, callback=callback)
    assert (data["cause"], data["cause_message"]) == ("ValueError", "boom")


def test_another_activation_type_is_refused_at_the_parse() -> None:
    data = expect_error("wrong_activation_dtype", "BuildError", "must be bfloat16, found float16")
    assert (data["cause"], data["cause_field"]) == ("SpecMismatchError", "query.dtype")


def test_an_unused_input_is_refused() -> None:
    expect_error("unused_input", "BuildError", "Unused Input: kv_scales.0")


def test_a_parse_error_carries_the_log() -> None:
    expect_error("refused_node", "BuildError", "cannot read the paged model", "last lines")


def test_a_foreign_creator_is_named() -> None:
    expect_error("foreign_creator", "UnsupportedError", "is registered already by other code")


def test_two_builds_in_one_process() -> None:
    assert run_case("build_twice")["result"] == 2


def test_nothing_is_written_beside_the_model() -> None:
    assert run_case("unchanged_directory")["result"] == ["model.onnx", "model.onnx.data"]


def test_ctrl_c_ends_a_build_and_leaves_nothing(tmp_path: Path) -> None:
    data = run_case("interrupt", exit_code=130, temporary=str(tmp_path))
    assert data["error"] == "BuildCancelledError"
    assert list(tmp_path.iterdir()) == []


def test_formats_are_exact() -> None:
    result = run_case("formats")["result"]
    assert all(result["right"])
    assert not any(result["wrong"])


@pytest.mark.parametrize(
    ("tokens", "path"), [(2, "append"), (5, "append")], ids=["decode", "prefill"]
)
def test_enqueue_names_the_missing_kernel(tokens: int, path: str) -> None:
    part = f"no kernel for {path} float16 -> float16, head_dim 32, value_head_dim 16"
    expect_error("enqueue", "KernelLaunchError", part, tokens=tokens)


def test_enqueue_refuses_a_pool_output_elsewhere() -> None:
    expect_error("enqueue", "KernelLaunchError", "bind both to one address", moved_pool=True)


@pytest.mark.parametrize(
    ("value", "part"),
    [("trt", "PAGED_TRT_FLAVOR must be"), ("tensorrt", 'pip install "paged-trt[tensorrt]"')],
)
def test_the_flavour_variable(value: str, part: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if value == "tensorrt" and importlib.util.find_spec("tensorrt") is not None:
        pytest.skip("full TensorRT is installed here")
    monkeypatch.setenv("PAGED_TRT_FLAVOR", value)
    flavor.cache_clear()
    try:
        with pytest.raises(ConfigError, match=re.escape(part)):
            flavor()
    finally:
        flavor.cache_clear()


def test_importing_the_packages_loads_no_tensorrt() -> None:
    code = (
        "import sys, paged_trt.builder.engine, paged_trt.plugins.load_check\n"
        "print([n for n in sys.modules if n.startswith(('tensorrt', 'cuda'))])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"

"""Page count + 1 at every hop that a CPU can see: each check catches its own, and only it does."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import onnx
import pytest
from engine_dirs import write_engine_dir

from paged_trt.plugins import hops
from paged_trt.plugins.errors import ManifestError, SpecMismatchError
from paged_trt.plugins.fields import OP_TYPE
from paged_trt.plugins.manifest import (
    EngineManifest,
    check_files,
    file_record,
    network_name,
    read_manifest,
)
from paged_trt.scripts.example_models.config import Dialect
from paged_trt.scripts.example_models.toy import write_toy


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("hops")
    write_toy(folder / "toy", Dialect("attention23-past"))
    return write_engine_dir(folder / "toy" / "model.onnx", folder / "engine")


@pytest.fixture
def engine(original: Path, tmp_path: Path) -> Path:
    target = tmp_path / "engine"
    shutil.copytree(original, target)
    return target


def check(engine: Path) -> tuple[hops.Hop, ...]:
    manifest = read_manifest(engine)
    check_files(engine, manifest)
    return hops.check_hops(engine, manifest)


def edit_manifest(engine: Path, change: Callable[[dict[str, Any]], None]) -> None:
    path = engine / "manifest.json"
    data = json.loads(path.read_text())
    change(data)
    path.write_text(json.dumps(data))


def sign(engine: Path, name: str) -> None:
    """Let the manifest vouch for the changed file, so that only the hop can notice."""
    record = file_record(engine / name)

    def change(data: dict[str, Any]) -> None:
        data["files"][name] = {"sha256": record.sha256, "size": record.size}

    edit_manifest(engine, change)


def edit_model(engine: Path, change: Callable[[onnx.ModelProto], None]) -> None:
    path = engine / "model.onnx"
    model = onnx.load(path, load_external_data=False)
    change(model)
    onnx.save(model, path)
    sign(engine, "model.onnx")


def written_pool(engine: Path) -> None:
    edit_manifest(engine, lambda data: add_one(data["pool"], "num_pages"))


def spec_pool(engine: Path) -> None:
    edit_manifest(engine, lambda data: add_one(data["spec"]["pool"], "num_pages"))


def tensor_table(engine: Path) -> None:
    def change(data: dict[str, Any]) -> None:
        tensor = next(each for each in data["tensors"] if each["name"] == "value_pool.1")
        add_one(tensor["dims"], 0)

    edit_manifest(engine, change)


def profile(bound: int) -> Callable[[Path], None]:
    def mutate(engine: Path) -> None:
        def change(data: dict[str, Any]) -> None:
            tensors = data["engine"]["tensors"]
            tensor = next(each for each in tensors if each["name"] == "key_pool.1")
            add_one(tensor["profiles"][1][bound], 0)

        edit_manifest(engine, change)

    return mutate


def pool_dim(name: str) -> Callable[[Path], None]:
    def mutate(engine: Path) -> None:
        def change(model: onnx.ModelProto) -> None:
            values = [*model.graph.input, *model.graph.output]
            value = next(each for each in values if each.name == name)
            value.type.tensor_type.shape.dim[0].dim_value += 1

        edit_model(engine, change)

    return mutate


def node_attribute(engine: Path) -> None:
    def change(model: onnx.ModelProto) -> None:
        node = [each for each in model.graph.node if each.op_type == OP_TYPE][1]
        next(each for each in node.attribute if each.name == "num_pages").i += 1

    edit_model(engine, change)


def plan_name(engine: Path) -> None:
    plan = engine / "model.plan"
    count = read_manifest(engine).spec.pool.num_pages
    old, new = f"pages={count} ".encode(), f"pages={count + 1} ".encode()
    assert old in plan.read_bytes()
    plan.write_bytes(plan.read_bytes().replace(old, new))
    sign(engine, "model.plan")


def add_one(container: Any, key: Any) -> None:
    container[key] += 1


MUTATIONS: list[tuple[Callable[[Path], None], tuple[Any, str]]] = [
    (written_pool, (EngineManifest, "check")),
    (tensor_table, (EngineManifest, "check")),
    (profile(0), (hops, "check_engine_table")),
    (profile(1), (hops, "check_engine_table")),
    (profile(2), (hops, "check_engine_table")),
    (pool_dim("key_pool.0"), (hops, "_check_model")),
    (pool_dim("value_pool_out.1"), (hops, "_check_model")),
    (node_attribute, (hops, "_check_model")),
    (plan_name, (hops, "_check_plan")),
]
NAMES = ["manifest", "tensor table", "profile min", "profile opt", "profile max", "pool input",
         "pool output", "node attribute", "network name in the plan"]  # fmt: skip


def test_a_sound_engine_has_one_count(engine: Path) -> None:
    assert len({hop.num_pages for hop in check(engine)}) == 1
    assert len(check(engine)) == 6


@pytest.mark.parametrize(("mutate", "guard"), MUTATIONS, ids=NAMES)
def test_one_page_more_is_caught(
    mutate: Callable[[Path], None], guard: tuple[Any, str], engine: Path
) -> None:
    count = read_manifest(engine).spec.pool.num_pages
    mutate(engine)
    with pytest.raises(SpecMismatchError) as caught:
        check(engine)
    assert caught.value.exit_code == 4
    assert str(count) in str(caught.value)
    assert str(count + 1) in str(caught.value)


@pytest.mark.parametrize(("mutate", "guard"), MUTATIONS, ids=NAMES)
def test_only_its_check_catches_it(
    mutate: Callable[[Path], None],
    guard: tuple[Any, str],
    engine: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With the check gone the mutation passes: no other check hides that it was removed."""
    mutate(engine)
    owner, name = guard
    monkeypatch.setattr(owner, name, lambda *_, **__: None)
    if name == "check":
        # The tensor table is looked at twice, in the manifest and as a hop.
        monkeypatch.setattr(hops, "_require_count", lambda *_, **__: None)
    assert check(engine)


@pytest.mark.parametrize(
    ("name", "value"),
    [("num_pages", 1), ("num_pages", -1), ("head_dim", 0), ("window", "all"), ("softcap", -1.0)],
)
def test_an_attribute_that_no_build_writes_is_the_engines_fault(
    name: str, value: int | float | str, engine: Path
) -> None:
    def change(model: onnx.ModelProto) -> None:
        node = next(each for each in model.graph.node if each.op_type == OP_TYPE)
        attribute = next(each for each in node.attribute if each.name == name)
        attribute.CopyFrom(onnx.helper.make_attribute(name, value))

    edit_model(engine, change)
    with pytest.raises(ManifestError, match=rf"node .*{name}|node .*all") as caught:
        check(engine)
    assert caught.value.exit_code == 4


def test_a_count_that_all_of_the_manifest_shares_still_meets_plan_and_model(engine: Path) -> None:
    """An edited manifest that agrees with itself does not agree with the plan."""
    manifest = read_manifest(engine)
    spec_pool(engine)
    with pytest.raises(SpecMismatchError, match="num_pages"):
        check(engine)
    assert network_name(manifest.spec) in (engine / "model.plan").read_bytes().decode()

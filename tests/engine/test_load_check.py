"""The one check of a network or an engine, on tables that need neither."""

from __future__ import annotations

import dataclasses
from typing import Any

import paged_models
import pytest
from engine_tables import make_table, parsed_dims

from paged_trt.builder.profile import make_profiles
from paged_trt.plugins.dtypes import DType
from paged_trt.plugins.engine_table import EngineTable
from paged_trt.plugins.errors import SpecMismatchError
from paged_trt.plugins.load_check import check_engine_table
from paged_trt.plugins.manifest import network_name
from paged_trt.plugins.tensors import Role

SPEC = paged_models.make_spec(kv_cache_dtype=DType.INT8)
PAGES = SPEC.pool.num_pages


def changed(tensor_name: str, /, **changes: Any) -> EngineTable:
    table = make_table(SPEC)
    tensors = tuple(
        dataclasses.replace(tensor, **changes) if tensor.name == tensor_name else tensor
        for tensor in table.tensors
    )
    return dataclasses.replace(table, tensors=tensors)


def mismatch(table: EngineTable) -> SpecMismatchError:
    with pytest.raises(SpecMismatchError) as caught:
        check_engine_table(SPEC, table)
    return caught.value


def test_an_engine_of_the_spec_passes() -> None:
    check_engine_table(SPEC, make_table(SPEC))


def test_an_alias_that_is_not_reported_passes() -> None:
    check_engine_table(SPEC, changed("key_pool_out.0", alias_of=None))


def test_another_page_count_in_the_name() -> None:
    name = network_name(SPEC).replace(f"pages={PAGES}", f"pages={PAGES + 1}")
    error = mismatch(dataclasses.replace(make_table(SPEC), name=name))
    assert (error.field, error.left, error.right) == ("num_pages", f"{PAGES}", f"{PAGES + 1}")


@pytest.mark.parametrize("name", ["", "Unnamed Network 0", "paged-trt/1 pages"])
def test_a_name_of_another_tool(name: str) -> None:
    assert mismatch(dataclasses.replace(make_table(SPEC), name=name)).right is None


def test_another_geometry_with_the_same_page_count() -> None:
    other = dataclasses.replace(SPEC, max_num_tokens=SPEC.max_num_tokens + 1)
    error = mismatch(dataclasses.replace(make_table(SPEC), name=network_name(other)))
    assert error.field == "sha256"


def test_another_schema_of_the_name() -> None:
    name = network_name(SPEC).replace("paged-trt/3", "paged-trt/2")
    assert mismatch(dataclasses.replace(make_table(SPEC), name=name)).field == "name"


def test_a_missing_and_an_unknown_tensor() -> None:
    error = mismatch(changed("kv_scales.1", name="surprise"))
    assert "missing ['kv_scales.1'], unknown ['surprise']" in str(error)


@pytest.mark.parametrize(
    ("name", "changes", "field"),
    [
        ("key_pool.0", {"dtype": DType.FLOAT16}, "dtype"),
        ("page_table", {"is_input": False}, "is_input"),
        ("page_table", {"dims": (-1,)}, "dims"),
        ("kv_scales.0", {"dims": (2, 3)}, "dims"),
        ("logits", {"dims": (-1, 33)}, "dims"),
        ("value_pool_out.0", {"dims": (PAGES + 1, 2, 128, 16)}, "pool_shape"),
        ("value_pool.0", {"dims": (PAGES + 1, 2, 128, 16)}, "pool_shape"),
        ("value_pool.0", {"dims": (-1, 2, 128, 16)}, "pool_shape"),
        ("key_pool_out.1", {"alias_of": "key_pool.0"}, "alias_of"),
        ("logits", {"alias_of": "key_pool.0"}, "alias_of"),
        ("past_lens", {"profiles": ()}, "profiles"),
    ],
)
def test_each_difference_is_named(name: str, changes: dict[str, Any], field: str) -> None:
    error = mismatch(changed(name, **changes))
    assert error.field == field
    assert f"`{name}`" in str(error)


@pytest.mark.parametrize("profile", [0, 1])
@pytest.mark.parametrize("bound", [0, 1, 2])
@pytest.mark.parametrize(
    "name", [tensor.name for tensor in SPEC.tensors() if tensor.role is Role.POOL_INPUT]
)
def test_every_bound_of_every_pool(name: str, bound: int, profile: int) -> None:
    tensor = next(tensor for tensor in make_table(SPEC).tensors if tensor.name == name)
    profiles = [list(shapes) for shapes in tensor.profiles]
    profiles[profile][bound] = (PAGES + 1, *tensor.dims[1:])
    error = mismatch(changed(name, profiles=tuple(map(tuple, profiles))))
    assert error.field == "pool_shape"
    assert f"must be ({PAGES}, " in str(error)
    assert f"found ({PAGES + 1}, " in str(error)
    assert f"profile {profile} {('min', 'opt', 'max')[bound]}" in str(error)


def test_profiles_follow_the_limits() -> None:
    context, generation = make_profiles(SPEC, parsed_dims(SPEC))
    assert (context.name, generation.name) == ("context", "generation")
    rows, pool = SPEC.max_token_rows, SPEC.pool
    assert context.shapes["input_ids"] == ((1, 1), (1, SPEC.max_num_tokens), (1, rows))
    seqs, width = pool.max_batch_size, pool.max_pages_per_seq
    assert context.shapes["page_table"] == ((1, 1), (1, width), (seqs, width))
    assert generation.shapes["input_ids"] == ((1, 1), (1, seqs), (1, seqs))
    assert generation.shapes["query_start_offsets"] == ((2,), (seqs + 1,), (seqs + 1,))


def test_a_pool_profile_is_what_the_network_says() -> None:
    """The count is never typed again: a wrong network gives a wrong profile."""
    dims = {**parsed_dims(SPEC), "key_pool.0": (PAGES + 1, 2, 128, 32)}
    context, _ = make_profiles(SPEC, dims)
    assert set(context.shapes["key_pool.0"]) == {(PAGES + 1, 2, 128, 32)}


@pytest.mark.parametrize("found", [None, (-1,)])
def test_a_network_without_an_input_has_no_profile(found: tuple[int, ...] | None) -> None:
    dims: dict[str, Any] = {**parsed_dims(SPEC), "page_table": found}
    with pytest.raises(SpecMismatchError, match=r"page_table\.dims"):
        make_profiles(SPEC, {name: value for name, value in dims.items() if value is not None})

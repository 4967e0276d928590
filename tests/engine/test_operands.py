"""Input layouts of both routes, and the check of their dims."""

from __future__ import annotations

import paged_models
import pytest

from paged_trt.plugins.attention import Rope
from paged_trt.plugins.dtypes import DType
from paged_trt.plugins.errors import SpecMismatchError
from paged_trt.plugins.fields import OperatorSpec
from paged_trt.plugins.operands import (
    LAYOUTS,
    Operand,
    StepShape,
    check_input_dims,
    input_dtypes,
    output_dims,
)
from paged_trt.plugins.trt import Route

ENGINE = paged_models.make_spec()
SPEC = OperatorSpec(pool=ENGINE.pool, attention=ENGINE.layers[0])
PAGES = ENGINE.pool.num_pages
STEP = StepShape(num_tokens=5, num_seqs=2, table_width=3)
POOLS = [(PAGES, 2, 128, 32), (PAGES, 2, 128, 16)]
ROPE = (300, 2, 8)
DIMS = {
    Route.PLUGIN: [
        *[(5, 4, 32), (5, 2, 32), (5, 2, 16), *POOLS],
        *[(2, 3), (3,), (2,), ROPE, (2, 2), (4,)],
    ],
    Route.GQA: [(1, 5, 128), (1, 5, 64), (1, 5, 64), *POOLS, (5,), (2, 3), ROPE, (8,)],
}
ROUTES = list(Route)


@pytest.mark.parametrize("route", ROUTES)
def test_right_dims_give_the_step(route: Route) -> None:
    assert check_input_dims(LAYOUTS[route], SPEC, DIMS[route], where="test") == STEP


@pytest.mark.parametrize("route", ROUTES)
def test_each_wrong_dim_is_refused(route: Route) -> None:
    """Any dim of any input plus one; the free sizes of a step meet another input or a limit."""
    layout = LAYOUTS[route]
    # More rope positions than the pool holds are no mistake.
    free = {(layout.index[Operand.ROPE_COS_SIN], 0)}
    for index, dims in enumerate(DIMS[route]):
        for axis in range(len(dims)):
            if (index, axis) in free:
                continue
            wrong = [list(each) for each in DIMS[route]]
            wrong[index][axis] += 1
            with pytest.raises(SpecMismatchError):
                check_input_dims(layout, SPEC, [tuple(each) for each in wrong], where="test")


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize(
    ("operand", "dims"),
    [
        (Operand.QUERY, (5, 128)),
        (Operand.PAGE_TABLE, (2,)),
        (Operand.PAGE_TABLE, (2, 0)),
        (Operand.PAGE_TABLE, (5, 3)),
        (Operand.ROPE_COS_SIN, (256, 2, 8)),
    ],
)
def test_ranks_and_limits(route: Route, operand: Operand, dims: tuple[int, ...]) -> None:
    wrong = list(DIMS[route])
    wrong[LAYOUTS[route].index[operand]] = dims
    with pytest.raises(SpecMismatchError):
        check_input_dims(LAYOUTS[route], SPEC, wrong, where="test")


@pytest.mark.parametrize("route", ROUTES)
def test_a_dropped_input_is_refused(route: Route) -> None:
    with pytest.raises(SpecMismatchError, match="`inputs` must be"):
        check_input_dims(LAYOUTS[route], SPEC, DIMS[route][:-1], where="test")


@pytest.mark.parametrize("route", ROUTES)
def test_no_rope_has_a_neutral_table(route: Route) -> None:
    engine = paged_models.make_spec(rope=Rope.NONE)
    spec = OperatorSpec(pool=engine.pool, attention=engine.layers[0])
    dims = list(DIMS[route])
    with pytest.raises(SpecMismatchError, match="rope_cos_sin"):
        check_input_dims(LAYOUTS[route], spec, dims, where="test")
    dims[LAYOUTS[route].index[Operand.ROPE_COS_SIN]] = (1, 2, 1)
    check_input_dims(LAYOUTS[route], spec, dims, where="test")


def test_every_operand_arrives_with_its_type() -> None:
    names = dict(zip(Operand, LAYOUTS[Route.GQA].index, strict=True))
    packed = input_dtypes(LAYOUTS[Route.GQA], DType.BFLOAT16, DType.FLOAT8)
    plain = input_dtypes(LAYOUTS[Route.PLUGIN], DType.BFLOAT16, DType.FLOAT8)
    assert [packed[names[operand]] for operand in Operand] == list(plain)
    assert plain[Operand.KEY] is DType.BFLOAT16
    assert plain[Operand.VALUE_POOL] is DType.FLOAT8


def test_packed_operands_lie_behind_each_other() -> None:
    layout = LAYOUTS[Route.GQA]
    offsets = {operand: layout.element_offset(operand, SPEC, 2) for operand in Operand}
    assert {operand for operand, offset in offsets.items() if offset} == {
        Operand.QUERY_START_OFFSETS,
        Operand.SINKS,
    }
    assert offsets[Operand.QUERY_START_OFFSETS] == 2
    assert offsets[Operand.SINKS] == 4
    assert not any(LAYOUTS[Route.PLUGIN].element_offset(each, SPEC, 2) for each in Operand)


def test_padded_values_have_a_wider_stride() -> None:
    assert LAYOUTS[Route.PLUGIN].token_stride(Operand.VALUE, SPEC) == 2 * 16
    assert LAYOUTS[Route.GQA].token_stride(Operand.VALUE, SPEC) == 2 * 32
    assert LAYOUTS[Route.GQA].token_stride(Operand.KEY, SPEC) == 2 * 32


def test_output_has_queries_rows_and_values_width() -> None:
    assert output_dims(LAYOUTS[Route.PLUGIN], SPEC, 5) == (5, 4, 16)
    assert output_dims(LAYOUTS[Route.GQA], SPEC, 5) == (1, 5, 64)

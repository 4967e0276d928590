"""Random small steps: the reference function agrees with NumPy on all of them."""

from __future__ import annotations

import hypothesis
from golden.reference_cases import KV_CACHE_DTYPES, Case, check, make_inputs
from hypothesis import strategies

from paged_trt.plugins.dtypes import DType


@strategies.composite
def cases(draw: strategies.DrawFn) -> Case:
    rows = draw(
        strategies.lists(
            strategies.tuples(strategies.integers(1, 6), strategies.integers(0, 260)),
            min_size=1,
            max_size=4,
        )
    )
    padding_rows = draw(strategies.integers(0, 2))
    rope = draw(strategies.integers(0, 2))
    # Attribute values come from short lists, so that sessions are reused.
    return Case(
        lengths=[length for length, _ in rows] + [0] * padding_rows,
        pasts=[past for _, past in rows] + [0] * padding_rows,
        kv=draw(strategies.sampled_from(KV_CACHE_DTYPES)),
        activation=draw(strategies.sampled_from([DType.FLOAT16, DType.BFLOAT16])),
        num_kv_heads=draw(strategies.integers(1, 2)),
        group=draw(strategies.integers(1, 4)),
        head_dim=8,
        value_head_dim=draw(strategies.sampled_from([4, 8])),
        window=draw(strategies.sampled_from([-1, 1, 7, 128, 130])),
        softcap=draw(strategies.sampled_from([0.0, 1.5])),
        rope=rope,
        rotary_dim=draw(strategies.sampled_from([0, 4])),
        has_sinks=draw(strategies.booleans()),
        padding_tokens=draw(strategies.integers(0, 2)),
        table_padding=draw(strategies.integers(0, 2)),
        seed=draw(strategies.integers(0, 1000)),
    )


@hypothesis.settings(max_examples=60, deadline=None, derandomize=True, database=None)
@hypothesis.given(case=cases(), holes=strategies.lists(strategies.integers(-2, 40), max_size=2))
def test_agrees_with_numpy(case: Case, holes: list[int]) -> None:
    inputs = make_inputs(case)
    # A hole puts an id that is no page where the row may need one.
    table = inputs["page_table"]
    for hole in holes:
        table[hole % len(table), 0] = -1 if hole < 0 else len(inputs["key_pool"]) + hole
    check(case, inputs)

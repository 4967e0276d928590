"""The whole runtime on the reference executor against a dense float32 model."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from session.paged_toy import VOCAB, dense_greedy, make_spec, open_toy, prompt_of

from paged_trt.plugins.dtypes import DType
from paged_trt.plugins.errors import ExecutionError
from paged_trt.plugins.tensors import LogitsMode
from paged_trt.runtime.executor import StepInputs
from paged_trt.runtime.reference_executor import BFLOAT16_NOTE, ReferenceExecutor
from paged_trt.runtime.session import Generation, Session

# Length -> seed of a prompt whose two best dense logits are never closer than 0.3.
PROMPTS = {1: 7, 2: 42, 127: 48, 128: 23, 129: 45, 256: 58, 257: 14}
NEW_TOKENS = 5
# Of logits up to 8: what rounding keys and values to the pool's type costs on this model.
TOLERANCES = {
    (DType.FLOAT16, DType.FLOAT16): 0.01,
    (DType.BFLOAT16, DType.BFLOAT16): 0.06,
    (DType.FLOAT16, DType.BFLOAT16): 0.06,
    (DType.FLOAT16, DType.FLOAT8): 0.8,
    (DType.FLOAT16, DType.INT8): 0.3,
}


@pytest.fixture(scope="module")
def executor(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ReferenceExecutor]:
    opened = open_toy(make_spec(), tmp_path_factory.mktemp("toy"))
    yield opened
    opened.close()


def prompts() -> list[list[int]]:
    return [prompt_of(length, seed=seed) for length, seed in PROMPTS.items()]


def generate(executor: ReferenceExecutor, *, chunk: int | None = None, **options: Any) -> Any:
    session = Session(executor, **options)
    result = session.generate(prompts(), NEW_TOKENS, keep_logits=True, prefill_chunk=chunk)
    assert session.stats().pages_in_use == 0
    session.core.batch.registry.check()
    return result


def assert_same_bits(left: list[Generation], right: list[Generation]) -> None:
    for mine, theirs in zip(left, right, strict=True):
        assert mine.tokens == theirs.tokens
        np.testing.assert_array_equal(mine.logits, theirs.logits)


def assert_dense(generations: list[Generation], tolerance: float) -> None:
    for prompt, generation in zip(prompts(), generations, strict=True):
        tokens, logits = dense_greedy(tuple(prompt), NEW_TOKENS)
        assert generation.tokens == tokens, len(prompt)
        assert generation.logits is not None
        assert generation.logits.dtype == np.float32
        assert generation.logits.shape == (NEW_TOKENS, VOCAB)
        np.testing.assert_allclose(generation.logits, logits, rtol=0, atol=tolerance)


@pytest.mark.parametrize(("activation", "kv"), TOLERANCES, ids=lambda dtype: dtype.value)
def test_every_type_gives_the_dense_tokens(activation: DType, kv: DType, tmp_path: Path) -> None:
    with_pool = open_toy(make_spec(activation=activation, kv=kv), tmp_path)
    assert (with_pool.notes == (BFLOAT16_NOTE,)) == (activation is DType.BFLOAT16)
    assert_dense(generate(with_pool), TOLERANCES[activation, kv])
    with_pool.close()


@pytest.mark.parametrize("chunk", [1, 100, 128])
def test_chunks_give_the_dense_tokens(executor: ReferenceExecutor, chunk: int) -> None:
    assert_dense(generate(executor, chunk=chunk), 0.01)


def test_logits_of_all_rows(executor: ReferenceExecutor, tmp_path: Path) -> None:
    all_rows = open_toy(make_spec(logits_mode=LogitsMode.ALL), tmp_path)
    assert_dense(generate(all_rows), 0.01)


def test_page_ids_do_not_matter(executor: ReferenceExecutor) -> None:
    order = np.random.default_rng(0).permutation(executor.spec.pool.num_pages).tolist()
    assert_same_bits(generate(executor), generate(executor, page_order=order))


def test_padding_rows_do_not_matter(tmp_path: Path) -> None:
    spec = make_spec(max_batch_size=8, capacity=640)
    padded = open_toy(spec, tmp_path)
    shapes = record_shapes(padded)
    exact = generate(padded)
    assert_dense(exact, 0.01)
    assert {(5, 1), (7, 3)} <= set(shapes)
    shapes.clear()
    assert_same_bits(exact, generate(padded, bucketed_shapes=True))
    assert {(8, 1), (8, 4)} <= set(shapes)


def record_shapes(executor: ReferenceExecutor) -> list[tuple[int, ...]]:
    shapes: list[tuple[int, ...]] = []
    step = executor.step

    def recorded(inputs: StepInputs) -> Any:
        shapes.append(inputs.page_table.shape)
        return step(inputs)

    executor.step = recorded  # type: ignore[method-assign]
    return shapes


def test_pages_that_no_sequence_owns_do_not_matter(executor: ReferenceExecutor) -> None:
    clean = generate(executor)
    session = Session(executor)

    def poison(index: int, token: int) -> None:
        used = {page for each in session.core.batch for page in each.pages}
        free = sorted(set(range(executor.spec.pool.num_pages)) - used)
        for pool in executor.spec.pools():
            executor.pool(pool.name)[free] = np.nan
        for each in session.core.batch:
            for pool in executor.spec.pools():
                # The rest of the last page: tokens that the sequence has not reached.
                last = executor.pool(pool.name)[each.pages[-1]]
                last[:, each.past_len - 128 * (len(each.pages) - 1) :] = np.nan

    poisoned = session.generate(prompts(), NEW_TOKENS, keep_logits=True, on_token=poison)
    assert_same_bits(clean, poisoned)


def test_sequences_join_leave_and_reuse_slots(executor: ReferenceExecutor) -> None:
    session = Session(executor)
    expected = {length: dense_greedy(tuple(prompt_of(length, seed=PROMPTS[length])), NEW_TOKENS)[0]
                for length in PROMPTS}  # fmt: skip
    got: dict[int, list[int]] = {}
    length_of = {}

    def add(length: int) -> int:
        sequence_id = session.add(prompt_of(length, seed=PROMPTS[length]), NEW_TOKENS)
        got[sequence_id], length_of[sequence_id] = [], length
        return sequence_id

    def step() -> None:
        for result in session.step():
            got[result.sequence_id].append(result.token)

    first, leaver = add(129), add(256)
    step()
    step()
    add(1)
    step()
    step()
    session.release(leaver)
    late = add(128)
    while session.stats().sequences:
        step()
    assert late not in (first, leaver)
    for sequence_id, tokens in got.items():
        whole = expected[length_of[sequence_id]]
        assert tuple(tokens) == whole[: len(tokens)]
        assert len(tokens) == NEW_TOKENS or sequence_id == leaver
    assert session.stats().pages_in_use == 0


def test_closed_executor_is_a_named_error(tmp_path: Path) -> None:
    executor = open_toy(make_spec(), tmp_path)
    with Session(executor) as session:
        session.generate([prompt_of(1)], 1)
    with pytest.raises(ExecutionError, match="closed"):
        executor.pool("key_pool.0")
    executor.close()

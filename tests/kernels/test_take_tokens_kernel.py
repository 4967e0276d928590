"""The kernel that takes tokens over from the step before: it compiles, and does it on a CPU."""

from __future__ import annotations

import ctypes
from pathlib import Path

import numpy as np
import pytest
from host_kernels import load_on_host
from kernels.test_decode_kernels_compile import compile_resources
from kernels.test_launch_args import ARCHITECTURES

from paged_trt.plugins.launch.args import TakeTokensArgs
from paged_trt.plugins.launch.sampling import TAKE_TOKENS
from paged_trt.runtime.executor import row_of_token, token_of_row


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_it_compiles_without_spills(arch: str) -> None:
    found = compile_resources(TAKE_TOKENS, arch)
    assert found.registers <= 32
    assert (found.spill_bytes, found.stack_bytes, found.shared_bytes) == (0, 0, 0)


def test_a_row_is_a_negative_id() -> None:
    assert [token_of_row(row) for row in (0, 1, 63)] == [-1, -2, -64]
    assert [row_of_token(token_of_row(row)) for row in (0, 1, 63)] == [0, 1, 63]


@pytest.mark.parametrize("count", [1, 31, 32, 33, 100])
def test_ids_that_name_rows_become_their_tokens(tmp_path: Path, count: int) -> None:
    vocab = 50
    tokens = np.random.default_rng(count).integers(0, vocab, 40)
    # Rows without a largest logit.
    tokens[3], tokens[7] = -1, vocab
    ids = np.random.default_rng(1).integers(-40, vocab, count + 5)
    ids[:2] = [-4, -8][: len(ids)]
    expected = ids.copy()
    for index in np.flatnonzero(ids[:count] < 0).tolist():
        row = row_of_token(int(ids[index]))
        expected[index] = 0 if row in (3, 7) else tokens[row]
    args = TakeTokensArgs(
        ids=ids.ctypes.data,
        tokens=tokens.ctypes.data,
        num_tokens=count,
        num_seqs=len(tokens),
        vocab_size=vocab,
    )
    load_on_host("take_tokens", tmp_path).take_tokens(ctypes.byref(args))
    # Nothing behind the ids of the step is touched.
    np.testing.assert_array_equal(ids, expected)

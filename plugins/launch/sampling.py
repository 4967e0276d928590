"""The sampling kernel: what to compile, how to launch it, and the row of parameters that it reads.

One block serves one row of logits. Nothing is allocated, and nothing depends on the block's
number but the row: a request draws the same tokens in any batch.
"""

from __future__ import annotations

import ctypes
import math
from typing import Final

from paged_trt.plugins.dtypes import DType
from paged_trt.plugins.errors import UnsupportedError
from paged_trt.plugins.launch.kernels_decode import KernelBuild

MAX_SAMPLED_VOCAB: Final = 1 << 20
"""Sums of so many weights of 40 bits fit 64 bits, and so do their products with a share."""
SAMPLE_THREADS: Final = 1024
_LOGIT_TYPES: Final = {
    DType.FLOAT16: "__half",
    DType.BFLOAT16: "__nv_bfloat16",
    DType.FLOAT32: "float",
}
_TOKEN_TYPES: Final = {DType.INT32: "int", DType.INT64: "long long"}
_FLOAT32_MAX: Final = 3.4028234663852886e38
_UNIT: Final = 1 << 32


TAKE_TOKENS: Final = KernelBuild(
    source="take_tokens.cu", name_expression="paged_trt::take_tokens<256>", threads=256
)
"""Puts the tokens that one step chose among the ids of the next one."""


class SampleRow(ctypes.Structure):
    """How one row chooses its token; mirrors the struct of the same name in `sample_args.cuh`.

    Attributes:
        seed: of the request.
        step: index of the token, from 0.
        top_k: most likely tokens to choose from; 0 for all.
        top_p: share of the weight to choose from in units of 2**-32; 0 for all.
        scale: log2(e) / temperature; 0 for the largest logit.
    """

    _fields_ = (
        ("seed", ctypes.c_uint64),
        ("step", ctypes.c_uint32),
        ("top_k", ctypes.c_int32),
        ("top_p", ctypes.c_uint32),
        ("scale", ctypes.c_float),
    )


def exponent_scale(temperature: float) -> float:
    """`SampleRow.scale` of a temperature; 0 is greedy."""
    if temperature == 0:
        return 0.0
    return min(math.log2(math.e) / temperature, _FLOAT32_MAX)


def top_p_share(top_p: float) -> int:
    """`SampleRow.top_p` of a probability over 0 and at most 1."""
    share = round(top_p * _UNIT)
    return 0 if share >= _UNIT else max(1, share)


def can_sample(logits_dtype: DType, vocab_size: int) -> bool:
    """Whether the kernel reads logits of this type and size."""
    return logits_dtype in _LOGIT_TYPES and vocab_size <= MAX_SAMPLED_VOCAB


def sample_build(logits_dtype: DType, token_dtype: DType, *, vocab_size: int) -> KernelBuild:
    """The sampling kernel of some types.

    Args:
        logits_dtype: float16, bfloat16 or float32.
        token_dtype: int32 or int64.
        vocab_size: columns of the logits.

    Raises:
        UnsupportedError: no kernel covers them.
    """
    if logits_dtype not in _LOGIT_TYPES or token_dtype not in _TOKEN_TYPES:
        raise UnsupportedError(
            f"no sampling kernel reads {logits_dtype.value} logits and writes {token_dtype.value} "
            "tokens; logits are float16, bfloat16 or float32, tokens int32 or int64"
        )
    if vocab_size > MAX_SAMPLED_VOCAB:
        raise UnsupportedError(
            f"the sampling kernel takes {MAX_SAMPLED_VOCAB} tokens and the vocabulary has "
            f"{vocab_size}; choose greedily"
        )
    types = f"{_LOGIT_TYPES[logits_dtype]}, {_TOKEN_TYPES[token_dtype]}"
    return KernelBuild(
        source="sample.cu",
        name_expression=f"paged_trt::sample<{types}, {SAMPLE_THREADS}>",
        threads=SAMPLE_THREADS,
    )

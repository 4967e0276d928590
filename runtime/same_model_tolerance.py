"""How far two executors of one model may be apart, by the types of an engine."""

from __future__ import annotations

import dataclasses
from typing import Final

from paged_trt.plugins.dtypes import DType
from paged_trt.plugins.tensors import LOGITS, EngineSpec
from paged_trt.runtime.comparison import LOGIT_ROUNDINGS, UNIT_ROUNDOFF, coarsest

_ROUNDINGS: Final = 8
_LAYER_ROUNDINGS: Final = 0.5
_TOKEN_LIMIT: Final = 0.8
_TOKEN_GROWTH: Final = 0.01


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SameModelTolerance:
    """Bounds of a comparison.

    Attributes:
        logits_rtol: largest difference of a row, as a part of its largest logit.
        kv_rtol: mean difference of what a layer stored, as a part of the mean magnitude.
        attention_rtol: likewise, of an attention output; a step may hold one token.
        key_growth: added to `kv_rtol` for every layer in front: rounding adds up.
        value_growth: likewise, of values and attention outputs.
        reason: where the numbers come from.
    """

    logits_rtol: float
    kv_rtol: float
    attention_rtol: float
    key_growth: float
    value_growth: float
    reason: str

    def limit(self, name: str) -> float:
        """Largest allowed error of a tensor of the comparison."""
        if name == LOGITS:
            return self.logits_rtol
        kind, layer = name.split(".")
        growth = self.key_growth if kind == "key" else self.value_growth
        first = self.attention_rtol if kind == "attention" else self.kv_rtol
        return first + growth * int(layer)

    def token_limit(self, name: str) -> float:
        """Largest allowed error of one token.

        A token that was lost or that is another one's has an error of 1 or more, in the first
        layers too, for one page table serves all.
        """
        return _TOKEN_LIMIT + (0 if name == LOGITS else _TOKEN_GROWTH * int(name.split(".")[1]))


_MEASURED: Final = "1.4 to 2 times what rounding of the activations changes"


def _measured(
    logits: float, kv: float, attention: float, key: float, value: float
) -> SameModelTolerance:
    return SameModelTolerance(
        logits_rtol=logits,
        kv_rtol=kv,
        attention_rtol=attention,
        key_growth=key,
        value_growth=value,
        reason=_MEASURED,
    )


# Measured between evaluations of one model with per-head scales of the largest magnitude, a toy of
# 2 layers and SmolLM2-135M of 30: float16 against its float32 upcast, and that against itself with
# every activation rounded to bfloat16. A number near the middle of two quantised ones goes to the
# other one, and from layer to layer that grows:
#                    logits        stored, layer 1  layer 3 key, value   last layer
# float16, int8      0.009, 0.026  0.002            0.004, 0.006         0.020, 0.041
# float16, float8    0.018, 0.042  0.0035           0.003, 0.006         0.024, 0.053
# bfloat16, int8     0.028, 0.033  0.007            0.010, 0.016         0.031, 0.062
# bfloat16, float8   0.045, 0.062  0.011            0.013, 0.021         0.037, 0.078
# Single tokens of late layers: at most 0.8 (bfloat16, int8). A scale that writes 10 % off changes
# its layer by 0.1; one that also reads 10 % off, so that only the rounding differs, by 0.014 (int8)
# and 0.023 (float8).
# Attention of the toy's first layer in float64 from queries, keys and values rounded so: by up to
# 0.0064, 0.022, 0.017 and 0.044 for one token. Weights of a softmax differ by the absolute error of
# a score, which reaches 10 there.
_QUANTISED: Final = {
    (DType.FLOAT16, DType.INT8): _measured(0.05, 0.004, 0.013, 0.002, 0.003),
    (DType.FLOAT16, DType.FLOAT8): _measured(0.085, 0.007, 0.04, 0.002, 0.003),
    (DType.BFLOAT16, DType.INT8): _measured(0.05, 0.008, 0.033, 0.004, 0.006),
    (DType.BFLOAT16, DType.FLOAT8): _measured(0.095, 0.014, 0.08, 0.004, 0.007),
}


def same_model_tolerance(spec: EngineSpec) -> SameModelTolerance:
    """The project's bounds for an engine's types.

    Without quantisation they are roundings: means of SmolLM2-135M differ in its last layer by 3
    in float16 and 8 in bfloat16; its logits by more, see `comparison.LOGIT_ROUNDINGS`.
    """
    types = (spec.activation_dtype, spec.kv_cache_dtype)
    if types in _QUANTISED:
        return _QUANTISED[types]
    coarse = coarsest(*types)
    unit = UNIT_ROUNDOFF[coarse]
    return SameModelTolerance(
        logits_rtol=LOGIT_ROUNDINGS[coarse] * unit,
        kv_rtol=_ROUNDINGS * unit,
        attention_rtol=_ROUNDINGS * unit,
        key_growth=_LAYER_ROUNDINGS * unit,
        value_growth=_LAYER_ROUNDINGS * unit,
        reason=f"{_ROUNDINGS} roundings of the activations, half a one more per layer",
    )

"""The rule of each operator that is known to keep the tokens of a step apart."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from paged_trt.builder.onnx import row_rules_compute as compute
from paged_trt.builder.onnx import row_rules_lookup as lookup
from paged_trt.builder.onnx import row_rules_shape as shape
from paged_trt.builder.onnx.row_view import Rule

_ELEMENTWISE: Final = frozenset(
    {"Abs", "Add", "And", "Cast", "CastLike", "Ceil", "Celu", "Clip", "Cos", "Div"}
    | {"Elu", "Equal", "Erf", "Exp", "Floor", "Gelu", "Greater", "GreaterOrEqual"}
    | {"HardSigmoid", "HardSwish", "Identity", "IsInf", "IsNaN", "LeakyRelu", "Less"}
    | {"LessOrEqual", "Log", "Max", "Mean", "Min", "Mish", "Mod", "Mul", "Neg", "Not"}
    | {"Or", "PRelu", "Pow", "Reciprocal", "Relu", "Round", "Selu", "Sigmoid", "Sign"}
    | {"Sin", "Softplus", "Softsign", "Sqrt", "Sub", "Sum", "Swish", "Tan", "Tanh"}
    | {"ThresholdedRelu", "Where", "Xor"}
)


_REDUCTIONS: Final = frozenset(
    {"ReduceL1", "ReduceL2", "ReduceLogSum", "ReduceLogSumExp", "ReduceMax"}
    | {"ReduceMean", "ReduceMin", "ReduceProd", "ReduceSum", "ReduceSumSquare"}
)


_MICROSOFT: Final = "com.microsoft"


RULES: Final[Mapping[tuple[str, str], Rule]] = {
    **{("", name): compute.elementwise for name in _ELEMENTWISE},
    **{
        (_MICROSOFT, name): compute.elementwise
        for name in ("BiasGelu", "FastGelu", "Gelu", "QuickGelu")
    },
    **{("", name): compute.reduce for name in _REDUCTIONS},
    **{("", name): compute.arg_reduce for name in ("ArgMax", "ArgMin")},
    **{("", name): compute.axis_kept(-1) for name in ("Softmax", "LogSoftmax", "Hardmax")},
    ("", "LpNormalization"): compute.axis_kept(-1),
    ("", "Dropout"): compute.first,
    ("", "QuantizeLinear"): compute.elementwise,
    ("", "DequantizeLinear"): compute.elementwise,
    ("", "RotaryEmbedding"): compute.rotary(3, (1, 2)),
    (_MICROSOFT, "RotaryEmbedding"): compute.rotary(1, (2, 3)),
    **{
        ("", name): compute.norm
        for name in ("LayerNormalization", "RMSNormalization", "SimplifiedLayerNormalization")
    },
    **{
        (_MICROSOFT, name): compute.skip_norm
        for name in ("SkipLayerNormalization", "SkipSimplifiedLayerNormalization")
    },
    ("", "MatMul"): compute.matmul,
    ("", "Gemm"): compute.gemm,
    (_MICROSOFT, "MatMulNBits"): compute.weighted("N"),
    (_MICROSOFT, "MoE"): compute.same_width,
    (_MICROSOFT, "QMoE"): compute.same_width,
    ("", "Gather"): lookup.gather,
    ("", "GatherElements"): lookup.gather_elements,
    ("", "ScatterElements"): lookup.scatter_elements,
    ("", "TopK"): lookup.top_k,
    ("", "CumSum"): compute.cum_sum,
    ("", "OneHot"): lookup.one_hot,
    ("", "Split"): shape.split,
    ("", "Concat"): shape.concat,
    ("", "Slice"): shape.slice_,
    ("", "Squeeze"): shape.squeeze,
    ("", "Unsqueeze"): shape.unsqueeze,
    ("", "Transpose"): shape.transpose,
    ("", "Reshape"): shape.reshape,
    ("", "Flatten"): shape.flatten,
    ("", "Expand"): shape.expand,
    ("", "Tile"): shape.tile,
    ("", "Pad"): shape.pad,
}

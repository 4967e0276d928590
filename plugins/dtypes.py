"""Element types: one enum that knows its NumPy, ONNX and byte-size view."""

from __future__ import annotations

import enum

import ml_dtypes
import numpy as np
import numpy.typing as npt
import onnx


class DType(enum.Enum):
    """Element type of a tensor; the value is the name used in manifests and options."""

    FLOAT32 = "float32"
    FLOAT16 = "float16"
    BFLOAT16 = "bfloat16"
    FLOAT8 = "float8"
    INT8 = "int8"
    INT32 = "int32"
    INT64 = "int64"

    @property
    def numpy(self) -> npt.DTypeLike:
        """NumPy type; bfloat16 and float8 are those of ml_dtypes."""
        return _NUMPY[self]

    @property
    def onnx(self) -> int:
        """Value of `onnx.TensorProto.DataType`; float8 is FLOAT8E4M3FN."""
        return _ONNX[self]

    @property
    def itemsize(self) -> int:
        """Bytes of one element."""
        return int(np.dtype(self.numpy).itemsize)

    @property
    def is_quantised(self) -> bool:
        """Whether a KV pool of this type carries per-head float32 scales."""
        return self in {DType.FLOAT8, DType.INT8}

    @classmethod
    def from_onnx(cls, element_type: int) -> DType:
        """Inverse of `onnx`.

        Raises:
            KeyError: the ONNX type has no counterpart here.
        """
        return _FROM_ONNX[element_type]


_NUMPY: dict[DType, npt.DTypeLike] = {
    DType.FLOAT32: np.float32,
    DType.FLOAT16: np.float16,
    DType.BFLOAT16: ml_dtypes.bfloat16,
    DType.FLOAT8: ml_dtypes.float8_e4m3fn,
    DType.INT8: np.int8,
    DType.INT32: np.int32,
    DType.INT64: np.int64,
}
_ONNX: dict[DType, int] = {
    DType.FLOAT32: onnx.TensorProto.FLOAT,
    DType.FLOAT16: onnx.TensorProto.FLOAT16,
    DType.BFLOAT16: onnx.TensorProto.BFLOAT16,
    DType.FLOAT8: onnx.TensorProto.FLOAT8E4M3FN,
    DType.INT8: onnx.TensorProto.INT8,
    DType.INT32: onnx.TensorProto.INT32,
    DType.INT64: onnx.TensorProto.INT64,
}
_FROM_ONNX: dict[int, DType] = {onnx_type: dtype for dtype, onnx_type in _ONNX.items()}

ACTIVATION_DTYPES = frozenset({DType.FLOAT16, DType.BFLOAT16})
KV_CACHE_DTYPES = frozenset({DType.FLOAT16, DType.BFLOAT16, DType.FLOAT8, DType.INT8})

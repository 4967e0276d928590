"""onnxruntime as the reference executor uses it: sessions, and pools on the same memory."""

from __future__ import annotations

from types import ModuleType
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from paged_trt.plugins.dtypes import DType
from paged_trt.plugins.errors import PackageMissingError, UnsupportedError
from paged_trt.plugins.tensors import EngineSpec
from paged_trt.runtime.dense import EXACT_PRODUCTS
from paged_trt.runtime.reference_model import ReferenceModel

Array = npt.NDArray[Any]
_RAW: Final[dict[int, type[np.unsignedinteger[Any]]]] = {1: np.uint8, 2: np.uint16}


def import_onnxruntime() -> ModuleType:
    """The module.

    Raises:
        PackageMissingError: it is not installed.
    """
    try:
        import onnxruntime
    except ImportError as error:
        raise PackageMissingError(
            "the reference executor needs onnxruntime, which is not installed; "
            '`pip install "paged-trt[compare]"`'
        ) from error
    module: ModuleType = onnxruntime
    return module


def make_session(runtime: ModuleType, model: ReferenceModel) -> Any:
    """A session on the CPU whose results do not depend on the run.

    Raises:
        UnsupportedError: onnxruntime cannot run the model.
    """
    options = runtime.SessionOptions()
    options.use_deterministic_compute = True
    # Errors are raised: onnxruntime need not print them as well.
    options.log_severity_level = 4
    options.add_session_config_entry(*EXACT_PRODUCTS)
    try:
        with model.file() as path:
            return runtime.InferenceSession(
                str(path), sess_options=options, providers=["CPUExecutionProvider"]
            )
    except Exception as error:  # onnxruntime has no base class of its own
        raise UnsupportedError(
            f"onnxruntime {runtime.__version__} cannot load {model.path}: {error}; "
            'try `pip install --upgrade "paged-trt[compare]"`'
        ) from error


def zero_pools(spec: EngineSpec) -> dict[str, Array]:
    """Pools of zeros by input name, in the pool's type."""
    return {
        pool.name: np.zeros([int(dim) for dim in pool.dims], pool.dtype.numpy)
        for pool in spec.pools()
    }


def ort_value(runtime: ModuleType, array: Array) -> Any:
    """The array as an OrtValue on the same memory; onnxruntime knows no type of ml_dtypes."""
    element_type = next(each for each in DType if np.dtype(each.numpy) == array.dtype)
    raw = array.view(_RAW[array.itemsize])
    return runtime.OrtValue.ortvalue_from_numpy_with_onnx_type(raw, element_type.onnx)

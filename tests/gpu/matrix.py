"""What the device tests measured: one row per combination, for the results file.

A test notes each comparison; `--gpu-matrix FILE` gathers them, over all workers of pytest-xdist.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from gpu.decode_cases import Case

Array = npt.NDArray[Any]
NOTED: list[dict[str, Any]] = []
"""Comparisons of the test that runs now."""
FEATURES = ("window", "softcap", "rope", "has_sinks")
KEYS = ("kernel", "q_dtype", "kv_dtype", "head_dim", "value_head_dim", "group", "features")


def _note(kernel: str, case: Case, *, error: float, allowed: float) -> None:
    defaults = Case()
    features = [name for name in FEATURES if getattr(case, name) != getattr(defaults, name)]
    NOTED.append(
        {
            "kernel": kernel,
            "q_dtype": case.activation.value,
            "kv_dtype": case.kv.value,
            "head_dim": case.head_dim,
            "value_head_dim": case.value_head_dim or case.head_dim,
            "group": case.group,
            "features": "+".join(features).replace("has_", "") or "none",
            "worst_error": error,
            "allowed_error": allowed,
        }
    )


def note_worst(kernel: str, case: Case, error: Array, allowed: Array) -> None:
    """Note a comparison with the float64 reference.

    Args:
        kernel: what ran.
        case: of which case.
        error: `[T, num_q_heads, value_head_dim]`.
        allowed: bound of each token row, `[T, 1, 1]`.
    """
    rows = np.abs(error).max(axis=(1, 2))
    bounds = np.broadcast_to(allowed, error.shape)[:, 0, 0]
    worst = int((rows / np.maximum(bounds, np.finfo(np.float64).tiny)).argmax())
    _note(kernel, case, error=float(rows[worst]), allowed=float(bounds[worst]))


def note_equal(kernel: str, case: Case) -> None:
    """Note a comparison that allows no difference."""
    _note(kernel, case, error=0.0, allowed=0.0)


def merge(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """One row per combination: how many cases, and the worst of them for its allowance."""
    merged: dict[tuple[Any, ...], dict[str, Any]] = {}
    for row in rows:
        key = tuple(row[name] for name in KEYS)
        best = merged.setdefault(key, {**row, "cases": 0})
        cases = best["cases"] + 1
        if row["worst_error"] * best["allowed_error"] > best["worst_error"] * row["allowed_error"]:
            best.update(row)
        best["cases"] = cases
    return [merged[key] for key in sorted(merged)]


def write(path: Path, rows: list[dict[str, Any]]) -> None:
    path.write_text(json.dumps(merge(rows), indent=1) + "\n", encoding="utf-8")

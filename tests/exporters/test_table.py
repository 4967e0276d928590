"""The builder's README shows the results of the last run of the matrix, and all of them passed.

The exporters are not installed here; what the matrix does with their models is run on a toy.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from engine.test_build import tensorrt_is_missing

from paged_trt.scripts.example_models.toy import write_toy

sys.path.insert(0, str(Path(__file__).parent))
import matrix
import table


def test_readme_is_made_from_the_results() -> None:
    data = json.loads(table.RESULTS.read_text(encoding="utf-8"))
    text = table.README.read_text(encoding="utf-8")
    assert table.render(text, data) == text
    assert "FAILED" not in text


@pytest.mark.skipif(tensorrt_is_missing(), reason="TensorRT is not installed")
def test_a_model_is_built_and_compared(tmp_path: Path) -> None:
    write_toy(tmp_path, "gqa")
    model = tmp_path / "model.onnx"
    row = matrix.build_and_compare(
        model, model, compare_options=("--prompt-lens=3,129", "--new-tokens=2")
    )
    assert (row["result"], row["sequences"]) == ("equal", 4)
    assert 0 < row["max_difference"] < row["limit"]
    assert row["excused"] <= 4
    assert row["notes"] == []


def test_every_row_came_out_as_its_case_says() -> None:
    rows = json.loads(table.RESULTS.read_text(encoding="utf-8"))["rows"]
    assert len(rows) > 40
    for row in rows:
        expected = "equal"
        if row["refusal"] is not None:
            expected = "refused"
        if row["exporter_error"] is not None:
            expected = "not exported"
        assert row["result"] == expected, row

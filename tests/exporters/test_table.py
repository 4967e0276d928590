"""The builder's README shows the results of the last run of the matrix, and all of them passed."""

from __future__ import annotations

import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
import table


def test_readme_is_made_from_the_results() -> None:
    data = json.loads(table.RESULTS.read_text(encoding="utf-8"))
    text = table.README.read_text(encoding="utf-8")
    assert table.render(text, data) == text
    assert "FAILED" not in text


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

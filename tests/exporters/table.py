"""The table of exporters in the builder's README, made from `results.json`."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any, Final

RESULTS: Final = Path(__file__).with_name("results.json")
README: Final = Path(__file__).parents[2] / "builder" / "README.md"
MARKER: Final = re.compile(r"(<!-- exporters -->\n).*?(<!-- end -->)", re.DOTALL)
_REFUSED_DETAIL: Final = "refused: "


def render(text: str, data: dict[str, Any]) -> str:
    """`text` with the table between its markers made anew."""
    lines = [
        "| model | exporter | type | attention nodes | result "
        "| largest logit difference (allowed) |",
        "|---|---|---|---|---|---|",
        *map(_line, _merged(data["rows"])),
    ]
    body = "\n".join(lines) + "\n\n" + _versions(data) + "\n"
    return MARKER.sub(lambda found: found[1] + body + found[2], text)


def write(data: dict[str, Any]) -> None:
    """Write the README's table."""
    README.write_text(render(README.read_text(encoding="utf-8"), data), encoding="utf-8")


def _merged(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Refusals of one model that differ in the opset alone as one row."""
    merged: dict[tuple[str, ...], dict[str, Any]] = {}
    for row in rows:
        is_refused = row["tool"] == "torch" and row["result"] == "refused"
        key = (row["family"], row["dtype"]) if is_refused else (row["name"],)
        if key in merged:
            forms = f"{merged[key]['form']}, {row['form']}"
            # The counts of nodes differ a little from opset to opset.
            detail = re.sub(r"\d+ (MatMul|Softmax)", r"\1", merged[key]["detail"])
            merged[key] = {**merged[key], "form": forms, "detail": detail}
        else:
            merged[key] = row
    return list(merged.values())


def _line(row: dict[str, Any]) -> str:
    exporter = _exporter(row["tool"], row["form"])
    operators = ", ".join(row.get("operators") or ["none"])
    return (
        f"| {row['family']} | {exporter} | {row['dtype']} | {operators} | {_result(row)} "
        f"| {_difference(row)} |"
    )


def _exporter(tool: str, form: str) -> str:
    return {
        "torch": f"torch dynamo, opset {form}",
        "genai": f"onnxruntime-genai, {form}",
        "direct": "`export_huggingface`",
        "optimum": "optimum-onnx 0.1, transformers 4.57",
    }[tool]


def _result(row: dict[str, Any]) -> str:
    if row["result"] == "refused":
        return _REFUSED_DETAIL + row["detail"].split(";")[0]
    if row["result"] == "not exported":
        return f"not exported: {row['detail']}"
    if row["result"] != "equal":
        return f"FAILED: {row['detail']}"
    notes = [f"{row['excused']} excused ties"] if row["excused"] else []
    if row["reference"] is not None:
        tool, form, dtype = row["reference"]
        notes.append(f"against {_exporter(tool, form)}, {dtype}, of the same weights")
    if any("bfloat16" in note for note in row["notes"]):
        notes.append("as float32 upcasts")
    return f"{row['sequences']} sequences equal" + (f" ({', '.join(notes)})" if notes else "")


def _difference(row: dict[str, Any]) -> str:
    if row["result"] != "equal":
        return ""
    return f"{row['max_difference']:.4f} ({row['limit']:.4f})"


def _versions(data: dict[str, Any]) -> str:
    versions = ", ".join(f"{name} {version}" for name, version in data["versions"].items())
    commits = ", ".join(dict.fromkeys(row["commit"] for row in data["rows"]))
    return (
        f"Each with a prefill and {data['new_tokens'] - 1} decode steps, on commit {commits}. "
        f"Versions: {versions}."
    )


if __name__ == "__main__":
    write(json.loads(RESULTS.read_text(encoding="utf-8")))

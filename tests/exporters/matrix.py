"""Exports every case with the real tools, and takes each through explain, build and compare.

    python tests/exporters/matrix.py WORK_FOLDER [--only TEXT]

Needs `paged-trt[rtx,compare,export]` and onnxruntime-genai; nothing of the project imports it.
It writes `results.json` here, each row with the commit that it ran on, and the table in
`builder/README.md`; files of other exporters that WORK_FOLDER holds are used again. A case that
has to be refused passes when it is refused in the words that it names, and one that has to work
passes when its engine gives the tokens of the exporter's own model in onnxruntime.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib.metadata
import json
import platform
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import table
from genai_export import export_genai
from optimum_export import export_optimum
from torch_export import export_torch
from zoo import make_model

from paged_trt.builder.huggingface import export_huggingface
from paged_trt.scripts.results import commit

NEW_TOKENS: Final = 33
"""The prefill's own token and 32 decode steps."""
LIMITS: Final = ("--max-batch-size=3", "--max-input-len=300", "--max-kv-cache-capacity=384")
RESULTS: Final = Path(__file__).with_name("results.json")
PACKAGES: Final = (
    *("torch", "transformers", "onnxscript", "onnxruntime-genai", "onnxruntime", "onnx"),
    *("onnx-ir", "tensorrt-rtx"),
)
GENAI_FORMS: Final[dict[str, tuple[str, str, dict[str, str]]]] = {
    "GQA": ("cuda", "fp16", {}),
    "GQA for TensorRT-RTX": ("NvTensorRtRtx", "fp16", {}),
    "paged": ("cuda", "fp16", {"use_paged_attention": "true"}),
    "MHA": ("cpu", "fp16", {}),
    "GQA float32": ("cpu", "fp32", {}),
    "GQA INT4": ("cuda", "int4", {}),
    "GQA INT4 QDQ": ("cuda", "int4", {"use_qdq": "true"}),
    "GQA INT4 QDQ, asymmetric": ("cuda", "int4", {"use_qdq": "true", "is_symmetric": "false"}),
}
"""Provider, precision and options of the builder by form."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """One export.

    Attributes:
        family: key of zoo.FAMILIES.
        tool: `torch`, `genai`, `direct` or `optimum`.
        form: opset of a torch export, key of GENAI_FORMS, or nothing.
        dtype: type of the weights.
        refusal: words of the refusal; None where the model has to work.
        exporter_error: words of the exporter's own failure, where it has one.
        reference: tool, form and type of the model to compare with, where onnxruntime's CPU
            kernels cannot run the exported one itself; the weights are the same.
    """

    family: str
    tool: str
    form: str = ""
    dtype: str = "float16"
    refusal: str | None = None
    exporter_error: str | None = None
    reference: tuple[str, str, str] | None = None

    @property
    def name(self) -> str:
        """Name for people, files and `--only`."""
        return ", ".join(filter(None, (self.family, self.tool, self.form, self.dtype)))


_SPELT_OUT = "attention is spelt out in"
_GENAI_CPU: Final = ("genai", "GQA float32", "float16")
CASES: Final = (
    *(
        Case(family=family, tool="torch", form=opset)
        for family in ("llama", "qwen2", "qwen3", "mistral", "phi3", "gpt2", "opt")
        for opset in ("23", "24")
    ),
    Case(family="llama", tool="torch", form="23", dtype="bfloat16"),
    Case(family="llama", tool="torch", form="23", dtype="float32"),
    # In float16, torch writes a Mul of mixed types for gemma3, which onnxruntime refuses.
    *(Case(family="gemma3", tool="torch", form=opset, dtype="float32") for opset in ("23", "24")),
    # torch writes attention nodes from opset 23 on, and none for a model that spells them out.
    *(
        Case(family=family, tool="torch", form=opset, refusal=_SPELT_OUT)
        for family in ("llama", "qwen2", "qwen3", "mistral", "phi3", "gpt2", "opt", "gemma3")
        for opset in ("20", "22")
    ),
    *(
        Case(family=family, tool="torch", form=opset, refusal=_SPELT_OUT)
        for family in ("llama-eager", "gemma2", "bloom")
        for opset in ("20", "22", "23", "24")
    ),
    # A bias of scores as an input of the attention node.
    *(
        Case(family="falcon-alibi", tool="torch", form=opset, refusal="such as ALiBi")
        for opset in ("23", "24")
    ),
    Case(family="llama", tool="optimum", refusal=_SPELT_OUT),
    *(
        Case(family=family, tool="genai", form="GQA")
        for family in ("llama", "qwen2", "mistral", "gemma2", "phi3")
    ),
    Case(family="qwen3", tool="genai", form="GQA", reference=_GENAI_CPU),
    # This builder reads gemma3's configuration as an older transformers wrote it.
    Case(family="gemma3", tool="genai", form="GQA", exporter_error="KeyError: 'rope_type'"),
    *(
        Case(family=family, tool="genai", form="paged", reference=_GENAI_CPU)
        for family in ("llama", "qwen2", "qwen3", "mistral", "gemma2", "phi3")
    ),
    *(
        Case(family=family, tool="direct", reference=("torch", "23", "float16"))
        for family in ("llama", "qwen2", "qwen3", "mistral", "phi3", "gpt2", "opt")
    ),
    Case(family="gemma2", tool="direct", reference=("genai", "GQA", "float16")),
    Case(family="gemma3", tool="direct", reference=("torch", "23", "float32")),
    Case(family="bloom", tool="direct", exporter_error="0 of 2 layers"),
    Case(family="llama", tool="genai", form="GQA for TensorRT-RTX"),
    Case(family="llama", tool="genai", form="GQA float32", dtype="float32"),
    Case(family="llama", tool="genai", form="GQA INT4 QDQ"),
    Case(
        family="llama",
        tool="genai",
        form="GQA INT4 QDQ, asymmetric",
        refusal="TensorRT reads signed ones only",
    ),
    Case(family="llama", tool="genai", form="GQA INT4", refusal="com.microsoft::MatMulNBits"),
    # onnxruntime fails in the second step of this model: its declared shapes contradict each other.
    Case(family="llama", tool="genai", form="MHA", reference=_GENAI_CPU),
)


def run_case(case: Case, work: Path, *, optimum: str | None = None) -> dict[str, Any]:
    """Export, explain, build, compare; what came out, as one row."""
    row: dict[str, Any] = {"name": case.name, **dataclasses.asdict(case)}
    row |= {"result": "failed", "detail": ""}
    begin = time.perf_counter()
    try:
        model = reference = _export(case, work, optimum)
        if case.reference is not None:
            tool, form, dtype = case.reference
            reference = _export(Case(family=case.family, tool=tool, form=form, dtype=dtype), work)
    except Exception as error:
        row["detail"] = f"the exporter failed: {str(error).strip().splitlines()[0]}"
        if case.exporter_error is not None and case.exporter_error in row["detail"]:
            row["result"] = "not exported"
        return row
    row["export_seconds"] = round(time.perf_counter() - begin, 1)
    code, text = _paged_trt("explain", str(model), "--json")
    report = json.loads(text) if text.startswith("{") else None
    if report is None:
        row["detail"] = text.strip()
        return row
    row |= {"dialect": report["dialect"], "operators": _operators(report)}
    if case.refusal is not None:
        return row | _refused(case, report, model)
    if code != 0:
        row["detail"] = "{reason}; {remedy}".format(**report["problem"])
        return row
    row |= {"layers": [node["attention"] for node in report["nodes"]],
            "kv_bytes_per_token": report["kv_bytes_per_token"]}  # fmt: skip
    options = ["--dtype=float16"] if case.dtype == "float32" else []
    return row | build_and_compare(model, reference, build_options=options)


def _refused(case: Case, report: dict[str, Any], model: Path) -> dict[str, Any]:
    code, text = _paged_trt("build", str(model), "-o", str(model.parent / "engine"), *LIMITS)
    problem = report["problem"] or {"reason": "", "remedy": ""}
    is_named = case.refusal in problem["reason"] and problem["reason"] in " ".join(text.split())
    detail = "{reason}; {remedy}".format(**problem) if problem["reason"] else "it was not refused"
    return {"result": "refused" if code == 2 and is_named else "failed", "detail": detail}


def build_and_compare(
    model: Path,
    reference: Path,
    *,
    build_options: Sequence[str] = (),
    compare_options: Sequence[str] = (),
) -> dict[str, Any]:
    """Build an engine of `model` and compare it with `reference`; what came out."""
    engine = model.parent / "engine"
    shutil.rmtree(engine, ignore_errors=True)
    code, text = _paged_trt("build", str(model), "-o", str(engine), *LIMITS, *build_options)
    if code != 0:
        return {"result": "failed", "detail": f"build: {_error_line(text)}"}
    file = model.parent / "compare.json"
    file.unlink(missing_ok=True)
    arguments = (str(reference), str(engine), "--executor=reference", f"--json={file}")
    decode = (f"--new-tokens={NEW_TOKENS}", *compare_options)
    code, text = _paged_trt("compare", *arguments, *decode)
    if not file.is_file():
        return {"result": "failed", "detail": f"compare: {_error_line(text)}"}
    (report,) = json.loads(file.read_text())["reports"]
    sequences = [each for found in report["iterations"] for each in found["sequences"]]
    worst = max(sequences, key=lambda each: (each["max_difference"] or 0) / each["limit"])
    return {
        "result": "equal" if report["passed"] and code == 0 else "failed",
        "sequences": len(sequences),
        "excused": sum(not each["tokens_equal"] for each in sequences),
        "max_difference": worst["max_difference"],
        "limit": worst["limit"],
        "notes": report["notes"],
    }


def _export(case: Case, work: Path, optimum: str | None = None) -> Path:
    """The model file; made where it is not there from an earlier run."""
    folder = work / case.name.replace(", ", "-").replace(" ", "_")
    path = folder / "model.onnx"
    # The direct export is ours, and changes with the tree.
    if path.is_file() and case.tool != "direct":
        return path
    folder.mkdir(parents=True, exist_ok=True)
    model = make_model(case.family, dtype=case.dtype)
    if case.tool == "torch":
        export_torch(model, path, opset=int(case.form))
    elif case.tool == "direct":
        export_huggingface(model, folder)
    elif case.tool == "optimum":
        export_optimum(model, path, python=str(optimum))
    else:
        provider, precision, options = GENAI_FORMS[case.form]
        export_genai(model, path, provider=provider, precision=precision, options=options)
    return path


def _operators(report: dict[str, Any]) -> list[str]:
    return sorted({node["operator"] for node in report["nodes"]})


def _paged_trt(*arguments: str) -> tuple[int, str]:
    # A child process: TensorRT may end the one that it runs in.
    done = subprocess.run(
        [sys.executable, "-m", "paged_trt.scripts.cli", *arguments],
        capture_output=True,
        text=True,
        check=False,
    )
    return done.returncode, done.stdout if done.stdout.startswith("{") else done.stderr


def _error_line(text: str) -> str:
    lines = [line for line in text.splitlines() if "error:" in line] or text.splitlines()[-1:]
    return lines[0] if lines else "no message"


def versions() -> dict[str, str]:
    """Of the packages that take part."""
    packages = {name: importlib.metadata.version(name) for name in PACKAGES}
    return {"python": platform.python_version(), **packages}


def _passed(row: dict[str, Any]) -> bool:
    expected = "equal" if row["refusal"] is None else "refused"
    return row["result"] == ("not exported" if row["exporter_error"] else expected)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the cases; 1 where one failed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("work", type=Path)
    parser.add_argument("--only", default="", help="cases whose name holds this; others stay")
    parser.add_argument("--optimum", metavar="PYTHON", help="interpreter that has optimum-onnx")
    options = parser.parse_args(arguments)
    before = json.loads(RESULTS.read_text(encoding="utf-8"))["rows"] if RESULTS.is_file() else []
    rows = {row["name"]: row for row in before}
    # Before anything is written here: the results do not make the tree another one.
    ran_on = commit()
    passed = True
    for case in CASES:
        if options.only not in case.name or (case.tool == "optimum" and not options.optimum):
            continue
        row = run_case(case, options.work, optimum=options.optimum)
        rows[case.name] = row = {**row, "commit": ran_on}
        passed &= _passed(row)
        verdict = "ok" if _passed(row) else "FAILED"
        print(f"{verdict:7}{case.name}: {row['result']} {row['detail']}", flush=True)  # noqa: T201
        # After each row: a run that is stopped keeps what it has found.
        _write([rows[case.name] for case in CASES if case.name in rows])
    return 0 if passed else 1


def _write(rows: list[dict[str, Any]]) -> None:
    data = {"versions": versions(), "new_tokens": NEW_TOKENS, "rows": rows}
    RESULTS.write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")
    table.write(data)


if __name__ == "__main__":
    sys.exit(main())

"""SmolLM2-135M exported by torch and directly, against the model that our own script writes.

    python tests/exporters/smollm2.py GGUF_FILE WORK_FOLDER

Needs `paged-trt[rtx,compare,demo,export]` and accelerate. Writes `smollm2.json` here.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import matrix
from torch_export import export_torch

from paged_trt.builder.huggingface import export_huggingface
from paged_trt.scripts.example_models import smollm2
from paged_trt.scripts.results import commit

RESULTS: Final = Path(__file__).with_name("smollm2.json")
PROMPT_LENS: Final = "--prompt-lens=1,5,127,129"


def main(arguments: Sequence[str] | None = None) -> int:
    """Export, build and compare; 1 where an export gives other tokens."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("gguf", type=Path)
    parser.add_argument("work", type=Path)
    options = parser.parse_args(arguments)
    import torch

    ran_on = commit()
    ours = options.work / "ours"
    smollm2.main([str(ours), "--gguf", str(options.gguf)], standalone_mode=False)
    model = read_gguf(options.gguf).to(torch.float16).eval()
    rows = []
    for tool in ("torch", "direct"):
        folder = options.work / tool
        folder.mkdir(parents=True, exist_ok=True)
        if tool == "torch":
            export_torch(model, folder / "model.onnx", opset=23)
        else:
            export_huggingface(model, folder)
        rows.append({"tool": tool, **_compare(folder / "model.onnx", ours / "model.onnx")})
        print(rows[-1])  # noqa: T201
    data = {"commit": ran_on, "versions": matrix.versions(), "new_tokens": matrix.NEW_TOKENS}
    data |= {"rows": rows}
    RESULTS.write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")
    return 0 if all(row["result"] == "equal" for row in rows) else 1


def read_gguf(gguf: Path) -> Any:
    """The model in float32; one that `from_pretrained` reads from GGUF refuses a conversion."""
    from transformers import AutoModelForCausalLM, LlamaForCausalLM

    read = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name)
    model = LlamaForCausalLM(read.config)
    model.load_state_dict(read.state_dict())
    return model


def _compare(model: Path, reference: Path) -> dict[str, Any]:
    return matrix.build_and_compare(model, reference, compare_options=(PROMPT_LENS,))


if __name__ == "__main__":
    sys.exit(main())

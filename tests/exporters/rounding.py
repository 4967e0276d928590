"""How far independent float16 and bfloat16 evaluations of SmolLM2-135M are apart, in roundings.

    python tests/exporters/rounding.py GGUF_FILE MODEL.onnx

MODEL.onnx is what `example_models.smollm2` writes from the same file. Needs
`paged-trt[rtx,compare,demo,export]` and accelerate. Writes `rounding.json` here, from which
`runtime/comparison.py` takes its tolerance.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

import matrix
import numpy as np
import onnxruntime
from smollm2 import read_gguf

from paged_trt.scripts.results import commit

RESULTS: Final = Path(__file__).with_name("rounding.json")
LENGTHS: Final = (1, 127, 129, 300, *[1] * 12, 64, 100, 128, 200, 256, *[2, 4, 8, 16] * 4)
FLOAT16, BFLOAT16 = 2.0**-11, 2.0**-8

Row = Any
Evaluate = Callable[[Row], Row]


def main(arguments: Sequence[str] | None = None) -> int:
    """Evaluate the last row of each prompt in every way and write the largest differences."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("gguf", type=Path)
    parser.add_argument("model", type=Path)
    options = parser.parse_args(arguments)
    import torch

    ran_on = commit()
    ways: dict[str, Evaluate] = {"onnxruntime float16": _onnxruntime(options.model)}
    for dtype in (torch.float16, torch.bfloat16):
        name = str(dtype).removeprefix("torch.")
        ways[f"torch {name}"] = _torch(read_gguf(options.gguf).to(dtype))
        ways[f"torch float32 of {name}"] = _torch(read_gguf(options.gguf).to(dtype).float())
    vocabulary = read_gguf(options.gguf).config.vocab_size
    pairs = (
        ("torch float16", "onnxruntime float16", FLOAT16),
        ("torch float16", "torch float32 of float16", FLOAT16),
        ("onnxruntime float16", "torch float32 of float16", FLOAT16),
        ("torch bfloat16", "torch float32 of bfloat16", BFLOAT16),
    )
    rows = []
    for seed, length in enumerate(LENGTHS):
        prompt = np.random.default_rng(seed).integers(0, vocabulary, length)
        logits = {name: evaluate(prompt) for name, evaluate in ways.items()}
        found = {
            f"{one} against {two}": _roundings(logits[one], logits[two], unit)
            for one, two, unit in pairs
        }
        rows.append({"prompt_len": length, "seed": seed, **found})
        print(rows[-1])  # noqa: T201
    largest = {name: max(row[name] for row in rows) for name in found}
    data = {"commit": ran_on, "versions": matrix.versions(), "largest": largest, "rows": rows}
    RESULTS.write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")
    return 0


def _roundings(one: Row, two: Row, unit: float) -> float:
    """Largest difference of a logit, as roundings of the largest logit."""
    return round(float(np.abs(one - two).max() / np.abs(two).max() / unit), 2)


def _torch(model: Any) -> Evaluate:
    import torch

    def evaluate(prompt: Row) -> Row:
        with torch.no_grad():
            logits = model.eval()(torch.tensor(prompt)[None]).logits
        return logits[0, -1].float().numpy()

    return evaluate


def _onnxruntime(model: Path) -> Evaluate:
    session = onnxruntime.InferenceSession(model)

    def evaluate(prompt: Row) -> Row:
        feeds: dict[str, Row] = {
            "input_ids": prompt[None],
            "attention_mask": np.ones((1, len(prompt)), np.int64),
            "position_ids": np.arange(len(prompt))[None],
        }
        for each in session.get_inputs():
            if each.name not in feeds:
                _, heads, _, head_dim = each.shape
                feeds[each.name] = np.zeros((1, heads, 0, head_dim), np.float16)
        return session.run(["logits"], feeds)[0][0, -1].astype(np.float32)

    return evaluate


if __name__ == "__main__":
    sys.exit(main())

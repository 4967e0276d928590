"""Runs a dense model and its rewrite side by side in onnxruntime on a CPU."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import onnxruntime

from paged_trt.builder.config import BuildConfig, resolve
from paged_trt.builder.onnx.load import load_model
from paged_trt.builder.onnx.rewrite import rewrite
from paged_trt.builder.onnx.save import save_model
from paged_trt.builder.onnx.survey import survey
from paged_trt.plugins.kv import UNUSED_PAGE_ENTRY, pages_for_tokens
from paged_trt.plugins.tensors import EngineSpec

Array = npt.NDArray[Any]
DEFAULTS: dict[str, Any] = {
    "max_batch_size": 5,
    "max_input_len": 300,
    "max_kv_cache_capacity": 512,
    "retained_pages": 3,
}


def rewrite_file(source: Path, target: Path, **config: Any) -> EngineSpec:
    """Survey, resolve, rewrite and save `source/model.onnx`; `config` overrides DEFAULTS."""
    model = load_model(source / "model.onnx")
    facts = survey(model)
    spec = resolve(BuildConfig(**{**DEFAULTS, **config}), facts)
    target.mkdir(parents=True, exist_ok=True)
    save_model(rewrite(model, facts=facts, spec=spec), target)
    return spec


def session(path: Path) -> Any:
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    options.log_severity_level = 3
    return onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])


@dataclasses.dataclass
class Dense:
    """The model as exported, one sequence at a time, without padding."""

    run: Any

    @classmethod
    def load(cls, folder: Path) -> Dense:
        return cls(session(folder / "model.onnx"))

    def logits(self, tokens: Array, chunks: list[int]) -> Array:
        """`[num_tokens, vocab]` float32, fed in the given chunk lengths."""
        assert sum(chunks) == len(tokens)
        names = {each.name: each for each in self.run.get_inputs()}
        caches = [name for name in names if len(names[name].shape) == 4]
        state = {
            name: np.zeros((1, names[name].shape[1], 0, names[name].shape[3]), _dtype(names[name]))
            for name in caches
        }
        outputs = [each.name for each in self.run.get_outputs()]
        rows, past = [], 0
        for chunk in chunks:
            feeds: dict[str, Array] = dict(state)
            feeds["input_ids"] = tokens[None, past : past + chunk]
            if "attention_mask" in names:
                feeds["attention_mask"] = np.ones((1, past + chunk), np.int64)
            if "position_ids" in names:
                feeds["position_ids"] = np.arange(past, past + chunk)[None]
            logits, *presents = self.run.run(outputs, feeds)
            rows.append(logits[0].astype(np.float32))
            state = dict(zip(caches, presents, strict=True))
            past += chunk
        return np.concatenate(rows)


def _dtype(node_arg: Any) -> Any:
    return {"tensor(float16)": np.float16, "tensor(float)": np.float32}[node_arg.type]


class Paged:
    """The rewritten model with scrambled pages; NaN lies in every unused part of the pools."""

    def __init__(self, folder: Path, spec: EngineSpec, *, seed: int = 0) -> None:
        self.spec, self.run = spec, session(folder / "model.onnx")
        generator = np.random.default_rng(seed)
        self.free = list(generator.permutation(spec.pool.num_pages))
        self.pools = {
            pool.name: np.full(pool.dims, np.nan, np.dtype(pool.dtype.numpy))
            for pool in spec.pools()
        }
        self.pages: dict[int, list[int]] = {}
        self.past: dict[int, int] = {}

    def step(self, new: dict[int, Array], *, padding: int = 0) -> dict[int, Array]:
        """One step of several sequences; the logits that the engine gives for each of them.

        Args:
            new: new tokens by sequence.
            padding: token rows after the last sequence, and as many sequence rows.
        """
        lengths = [len(tokens) for tokens in new.values()]
        past = [self.past.get(name, 0) for name in new]
        for name, count, before in zip(new, lengths, past, strict=True):
            pages = self.pages.setdefault(name, [])
            while len(pages) < pages_for_tokens(before + count):
                pages.append(int(self.free.pop()))
        width = max(len(self.pages[name]) for name in new)
        table = [
            self.pages[name] + [UNUSED_PAGE_ENTRY] * (width - len(self.pages[name])) for name in new
        ]
        offsets = np.cumsum([0, *lengths])
        positions = [np.arange(b, b + c) for b, c in zip(past, lengths, strict=True)]
        feeds: dict[str, Array] = {
            "input_ids": np.concatenate([*new.values(), np.zeros(padding, np.int64)])[None],
            "page_table": np.array(table + [[UNUSED_PAGE_ENTRY] * width] * padding, np.int32),
            "query_start_offsets": np.append(offsets, [offsets[-1]] * padding).astype(np.int32),
            "past_lens": np.array([*past, *[0] * padding], np.int32),
            **self.pools,
        }
        if self.spec.reads_position_ids:
            feeds["position_ids"] = np.concatenate([*positions, np.zeros(padding, np.int64)])[None]
        logits, *pools = self.run.run(None, feeds)
        self.pools = dict(zip(self.pools, pools, strict=True))
        self.past |= {n: b + c for n, b, c in zip(new, past, lengths, strict=True)}
        if logits.ndim == 2:
            return {name: logits[i].astype(np.float32) for i, name in enumerate(new)}
        return {
            name: logits[0, offsets[i] : offsets[i + 1]].astype(np.float32)
            for i, name in enumerate(new)
        }

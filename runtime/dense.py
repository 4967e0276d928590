"""Greedy decoding of a dense model in onnxruntime: what a paged engine is compared with.

One sequence at a time, its cache is whatever the model calls present: no pages, no batch, no
padding, so that it shares nothing with the code under test but the weights.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, Protocol

import numpy as np
import numpy.typing as npt

from paged_trt.plugins.errors import (
    ConfigError,
    ExecutionError,
    PackageMissingError,
    UnsupportedError,
)
from paged_trt.runtime.dense_signature import CachePort, DenseSignature

Array = npt.NDArray[Any]
EXACT_PRODUCTS: Final = ("session.qdq_matmulnbits_accuracy_level", "1")
"""Session option: products with INT4 weights in float32. onnxruntime's own choice rounds the
activations to INT8, which neither the exporter's model nor TensorRT says."""


class Decoder(Protocol):
    """A model that decodes one sequence."""

    @property
    def notes(self) -> tuple[str, ...]:
        """What a report must say about this decoder."""
        ...

    def start(self, max_tokens: int) -> None:
        """Forget the sequence; the next one has at most `max_tokens` tokens."""
        ...

    def step(self, token_ids: Array) -> Array:
        """Append tokens `[num_tokens]` int64; the logits `[vocab_size]` of the last one.

        Raises:
            ExecutionError: onnxruntime failed.
        """
        ...


@dataclasses.dataclass(frozen=True, slots=True)
class Generation:
    """Greedy continuation of one prompt.

    Attributes:
        tokens: `[num_new_tokens]` int64.
        logits: `[num_new_tokens, vocab_size]` float32, the row that each token is the top of.
    """

    tokens: npt.NDArray[np.int64]
    logits: npt.NDArray[np.float32]


def greedy(decoder: Decoder, prompt: Array, num_new_tokens: int) -> Generation:
    """Prefill the whole prompt, then decode.

    Args:
        decoder: the model; what it held before is forgotten.
        prompt: `[prompt_len]` token ids.
        num_new_tokens: tokens to generate; none stops it earlier.
    """
    decoder.start(len(prompt) + num_new_tokens)
    token_ids = np.asarray(prompt, np.int64)
    tokens, rows = [], []
    for _ in range(num_new_tokens):
        row = decoder.step(token_ids).astype(np.float32)
        token_ids = np.argmax(row, keepdims=True).astype(np.int64)
        rows.append(row)
        tokens.append(int(token_ids[0]))
    return Generation(np.asarray(tokens, np.int64), np.stack(rows))


def open_session(model: Path | bytes) -> Any:
    """An onnxruntime session on the CPU.

    Raises:
        UnsupportedError: onnxruntime is not installed or refuses the model.
    """
    try:
        import onnxruntime
    except ImportError as error:
        raise PackageMissingError(
            'onnxruntime is not installed; run `pip install "paged-trt[compare]"`'
        ) from error
    options = onnxruntime.SessionOptions()
    # Errors are raised: onnxruntime need not print them as well.
    options.log_severity_level = 4
    options.add_session_config_entry(*EXACT_PRODUCTS)
    try:
        return onnxruntime.InferenceSession(model, options, providers=["CPUExecutionProvider"])
    except Exception as error:  # onnxruntime's exceptions have no common public base
        raise UnsupportedError(f"onnxruntime cannot run {model!r} on a CPU: {error}") from error


def run(method: Callable[..., Any], names: Sequence[str], feeds: Mapping[str, Any]) -> Any:
    """What a `run` method of an onnxruntime session gives.

    Raises:
        ExecutionError: onnxruntime failed.
    """
    try:
        return method(names, feeds)
    except Exception as error:  # onnxruntime's exceptions have no common public base
        raise ExecutionError(
            f"onnxruntime failed in a step of the model: {error}; pass the model that the engine "
            "was built from"
        ) from error


class DenseDecoder:
    """A decoder with ordinary exporter inputs and outputs.

    Args:
        session: onnxruntime session of the model.
        signature: what its inputs and outputs mean.
        notes: what a report must say about it.
    """

    def __init__(
        self, session: Any, signature: DenseSignature, notes: tuple[str, ...] = ()
    ) -> None:
        self._session = session
        self._signature = signature
        self._notes = notes
        self._past_len = 0
        self._caches: dict[str, Array] = {}

    @property
    def notes(self) -> tuple[str, ...]:
        """What a report must say about this decoder."""
        return self._notes

    def start(self, max_tokens: int) -> None:
        """Forget the sequence: every cache holds no token, and grows unless it is fixed.

        Raises:
            ConfigError: a cache of fixed length is too short.
        """
        self._past_len = 0
        self._caches = {port.past: _empty(port, max_tokens) for port in self._signature.caches}

    def step(self, token_ids: Array) -> Array:
        """Append tokens `[num_tokens]` int64; the logits `[vocab_size]` of the last one."""
        signature = self._signature
        names = [signature.logits, *(port.present for port in signature.caches)]
        logits, *presents = run(self._session.run, names, self._feeds(token_ids))
        for port, present in zip(signature.caches, presents, strict=True):
            self._caches[port.past] = present
        self._past_len += len(token_ids)
        return np.asarray(logits.reshape(-1, logits.shape[-1])[-1])

    def _feeds(self, token_ids: Array) -> dict[str, Array]:
        signature = self._signature
        total = self._past_len + len(token_ids)
        plain = {
            signature.input_ids: token_ids,
            signature.attention_mask: np.ones(total),
            signature.position_ids: np.arange(self._past_len, total),
            signature.past_lens: np.asarray(self._past_len),
            signature.total_lens: np.asarray(total),
        }
        feeds = dict(self._caches)
        for name, values in plain.items():
            if name is not None:
                feeds[name] = values.astype(signature.integer_dtypes[name].numpy)[None]
        return feeds


def _empty(port: CachePort, max_tokens: int) -> Array:
    shape = list(port.empty_shape)
    if port.is_fixed:
        shape = [size or max_tokens for size in shape]
        if shape[2] < max_tokens:
            raise ConfigError(
                f"the cache `{port.past}` holds {shape[2]} tokens and a sequence has {max_tokens}; "
                "compare with shorter prompts, or export the model with a longer cache"
            )
    return np.zeros(shape, port.dtype.numpy)

"""One node as the rules of `token_rows` see it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

import numpy as np
import onnx_ir as ir

from paged_trt.builder.onnx.evaluator import EvaluationError
from paged_trt.builder.onnx.facts import IndexKind
from paged_trt.builder.onnx.graph import attribute, constant_array, operand, value_name
from paged_trt.builder.onnx.lengths import recognise
from paged_trt.builder.onnx.probe import Probe, Step
from paged_trt.builder.onnx.rows import STEP_TOKENS, Count, Dims, MixesError, Rows, State

_STEP: Final = Step(5, STEP_TOKENS)


class View:
    """One node with what is known of its inputs."""

    def __init__(self, node: ir.Node, states: Sequence[State], probe: Probe) -> None:
        self.node = node
        self._states = states
        self._probe = probe

    def state(self, index: int) -> State:
        """State of an input; None where it is left out."""
        return self._states[index] if index < len(self._states) else None

    def rows(self, index: int) -> Rows:
        """An input that has to hold tokens."""
        found = self.state(index)
        if not isinstance(found, Rows):
            raise MixesError("reads tokens through an operand that is no data")
        return found

    def no_rows(self, *indices: int) -> None:
        """Refuse operands that differ between tokens."""
        if any(isinstance(self.state(index), Rows) for index in indices):
            raise MixesError("takes an operand that has to be a constant from the tokens")

    def data(self, index: int) -> State:
        """An input as data: one that counts tokens has to turn out constant."""
        found = self.state(index)
        value = operand(self.node, index)
        if isinstance(found, Count) and value is not None:
            meaning = None
            if self._probe.depends_on_lengths_only(value):
                meaning = recognise(self._probe, value)
            if meaning is None or meaning.kind is not IndexKind.CONSTANT:
                raise MixesError(f"computes with the length of a step (`{value_name(value)}`)")
            return None
        return found

    def dims(self, index: int) -> Dims | None:
        """Shape of an input."""
        found = self.state(index)
        if isinstance(found, Rows):
            return found.dims
        value = operand(self.node, index)
        array = constant_array(value) if value is not None and value.shape is None else None
        if array is not None:
            return array.shape
        return None if value is None else self._probe.shape(value)

    def numbers(self, index: int) -> list[int] | None:
        """Numbers of an operand such as a target shape; None where it is left out."""
        value = operand(self.node, index)
        if value is None:
            return None
        array = constant_array(value)
        if array is None:
            self.no_rows(index)
            array = self._evaluated(value)
        return [int(number) for number in np.atleast_1d(array)]

    def _evaluated(self, value: ir.Value) -> np.ndarray[tuple[int, ...], np.dtype[np.generic]]:
        try:
            if self._probe.depends_on_lengths_only(value):
                return self._probe.evaluate(value, _STEP)
        except EvaluationError as error:
            raise MixesError(f"has an operand that cannot be evaluated ({error})") from error
        raise MixesError(f"has an operand that depends on data (`{value_name(value)}`)")

    def axes(self, index: int, default: list[int] | None = None) -> list[int] | None:
        """Axes of an operand, or of the attribute `axes` that older opsets have."""
        found = self.numbers(index)
        if found is None:
            found = attribute(self.node, "axes", None)
        return default if found is None else [int(axis) for axis in found]


Rule = Callable[[View], list[State]]

"""The steps of one plugin instance: what `enqueue` of the plugin calls.

A step on known addresses costs the comparison of the addresses, three Python calls, and one more
per kernel that makes one driver call: no allocation, no compile, no wait. A test counts them.
"""

from __future__ import annotations

import collections
from collections.abc import Sequence
from typing import Final, Protocol

from paged_trt.plugins.errors import KernelLaunchError
from paged_trt.plugins.launch.dispatch import PreparedStep
from paged_trt.plugins.launch.kernels_decode import CallAddresses
from paged_trt.plugins.launch.requests import AttentionPlanRequest

MOST_PREPARED: Final = 128
"""Step sizes that a plugin instance keeps ready."""


class Layer(Protocol):
    """Whose steps they are; asked only about what was not seen before."""

    def locate(
        self, inputs: Sequence[int], outputs: Sequence[int], workspace: int
    ) -> CallAddresses:
        """From addresses of a call to those of the operands.

        Raises:
            KernelLaunchError: a pool output is not its input's memory.
        """

    def prepare(self, request: AttentionPlanRequest, addresses: CallAddresses) -> PreparedStep:
        """The launches of a step.

        Raises:
            KernelLaunchError: a kernel is not loaded.
        """


class LayerLauncher:
    """The launches of one plugin instance."""

    __slots__ = ("_inputs", "_outputs", "_request", "_step", "_steps", "_workspace")

    def __init__(self) -> None:
        # Decode steps come back in few sizes; the token counts of prefill steps are many.
        self._steps: collections.OrderedDict[AttentionPlanRequest, PreparedStep] = (
            collections.OrderedDict()
        )
        self._request: AttentionPlanRequest | None = None
        # The step in use and what it is bound to; None: to nothing.
        self._step: PreparedStep | None = None
        self._inputs: Sequence[int] | None = None
        self._outputs: Sequence[int] | None = None
        self._workspace = 0

    def set_shape(self, request: AttentionPlanRequest) -> None:
        """Take the sizes of the steps to come; what they need is made at the first of them."""
        if request != self._request:
            self._request, self._inputs = request, None

    def enqueue(
        self,
        inputs: Sequence[int],
        outputs: Sequence[int],
        workspace: int,
        stream: int,
        *,
        layer: Layer,
    ) -> None:
        """Launch the step on a stream.

        Args:
            inputs: addresses of the plugin's inputs.
            outputs: addresses of its outputs.
            workspace: address of its workspace.
            stream: handle of the stream.
            layer: asked when sizes or addresses are new.

        Raises:
            KernelLaunchError: `set_shape` was not called, a kernel is not loaded or did not launch.
        """
        if inputs != self._inputs or outputs != self._outputs or workspace != self._workspace:
            self._bind(inputs, outputs, workspace, layer)
        self._step.launch(stream)  # type: ignore[union-attr]  # `_bind` has set it

    def _bind(
        self, inputs: Sequence[int], outputs: Sequence[int], workspace: int, layer: Layer
    ) -> None:
        request = self._request
        if request is None:
            raise KernelLaunchError("a step was launched before its sizes were known")
        located = layer.locate(inputs, outputs, workspace)
        step = self._steps.get(request)
        if step is None:
            step = self._steps[request] = layer.prepare(request, located)
            if len(self._steps) > MOST_PREPARED:
                self._steps.popitem(last=False)
        self._steps.move_to_end(request)
        if step.addresses != located:
            step.bind(located)
        # Copies: the caller may change its own lists.
        self._inputs, self._outputs = inputs[:], outputs[:]
        self._workspace, self._step = workspace, step

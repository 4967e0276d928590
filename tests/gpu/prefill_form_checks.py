"""What a form of Hopper's prefill kernel has to get right before it is timed.

The rule of `test_prefill`: the error of each token row is at most twice that of a computation of
the same precision, and one rounding of the output. Every step is done by few blocks, one query
tile after another, dealt out and from a counter; then pages in another order, without poison, and
twice, must change no bit.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from gpu.decode_cases import Case, Inputs, make_inputs
from gpu.prefill_device import Array
from gpu.prefill_reference import allowed_error, attend

from paged_trt.plugins.dtypes import DType
from paged_trt.plugins.kv import pages_for_tokens
from paged_trt.plugins.launch.kernels_prefill_sm90 import ANY_DIMS, SCORES_AHEAD
from paged_trt.plugins.launch.registry import KernelKey, KernelPath
from paged_trt.plugins.launch.requests import AttentionPlanRequest
from paged_trt.plugins.operands import StepShape

Forms = tuple[str, ...]
Layout = dict[str, Any]
EDGES = (1, 63, 64, 65, 127, 128, 129, 1000)
FRESH: Layout = {"lengths": EDGES, "new_tokens": EDGES, "padding_tokens": 3}
CHUNKED: Layout = {
    "lengths": (64, 65, 128, 129, 192, 1000, 1000, 700),
    "new_tokens": (63, 2, 64, 1, 65, 128, 300, 257),
    "padding_tokens": 200,
}
LONG: Layout = {"lengths": (4500, 3000, 2100), "new_tokens": (130, 1, 33), "padding_tokens": 1}
FP16 = {"activation": DType.FLOAT16, "kv": DType.FLOAT16}
FEATURES: tuple[Layout, ...] = (
    FRESH,
    CHUNKED,
    {**LONG, "has_sinks": True},
    {**CHUNKED, "rope": 1, "has_sinks": True},
    {**CHUNKED, "query_factor": 1e20},
    {**CHUNKED, "window": 100},
    {**LONG, "window": 700, "has_sinks": True, "rope": 2},
    {**CHUNKED, "softcap": 5.0},
    {**LONG, **FP16},
    {**FRESH, "group": 1},
    {**CHUNKED, "group": 7},
    {**LONG, "group": 8},
)
"""Each window, softcap, type and group is a kernel of its own."""
OTHER_DIMS = ((80, 80), (96, 96), (112, 112), (192, 192), (192, 128), (64, 128), (128, 64))


def cases_of(forms: Forms) -> list[Case]:
    """Steps that a form is checked on; for other dims, those dims with few of the features."""
    if ANY_DIMS in forms:
        chosen = (FEATURES[0], FEATURES[2], FEATURES[3], FEATURES[5])
        return [
            Case(head_dim=dim, value_head_dim=value_dim, **features)
            for dim, value_dim in OTHER_DIMS
            for features in (chosen if dim == 96 else chosen[:2])
        ]
    dim = 64 if SCORES_AHEAD in forms else 128
    return [Case(head_dim=dim, **features) for features in FEATURES]


def request_of(case: Case, *, arch: str, units: int) -> AttentionPlanRequest:
    """What a planner is asked for a case."""
    step = StepShape(
        num_tokens=sum(case.new_tokens) + case.padding_rows + case.padding_tokens,
        num_seqs=len(case.lengths) + case.padding_rows,
        table_width=max(map(pages_for_tokens, case.lengths)) + 1,
    )
    return AttentionPlanRequest(
        arch=arch,
        attention=case.attention,
        activation_dtype=case.activation,
        kv_cache_dtype=case.kv,
        step=step,
        num_multiprocessors=units,
    )


def keys_of(forms: Forms, *, arch: str, units: int) -> Iterator[KernelKey]:
    """Kernels that the checks of a form launch, but for the append."""
    paths = [KernelPath.PREFILL_SM90]
    if ANY_DIMS in forms:
        paths.append(KernelPath.PREFILL_SM90_SPLIT)
    for index, case in enumerate(cases_of(forms)):
        request = request_of(case, arch=arch, units=units)
        for path in paths:
            yield KernelKey.of(path, request, forms=forms)
        if index == 0:
            yield KernelKey.of(paths[0], request, forms=(*forms, "watchdog"))


class FormCheck:
    """Checks one form, case by case.

    Args:
        forms: names of `prefill_forms`.
    """

    def __init__(self, forms: Sequence[str]) -> None:
        self.forms = tuple(forms)

    def run(self, case: Case, inputs: Inputs, *, partitions: int, takes_tiles: bool) -> Array:
        """Output of a step by few blocks."""
        return self._step(case, inputs, self.forms, partitions, takes_tiles).run()

    def _step(
        self, case: Case, inputs: Inputs, forms: Forms, partitions: int, takes_tiles: bool
    ) -> Any:
        from gpu.prefill_sm90_device import PrefillSm90Step, with_partitions

        step = PrefillSm90Step(case, inputs)
        plan = with_partitions(step, partitions)
        step.plan_override = dataclasses.replace(plan, forms=forms, takes_tiles=takes_tiles)
        return step

    def watchdog(self) -> str:
        """Whether the form comes to an end at all; what went wrong, or nothing."""
        case = cases_of(self.forms)[0]
        step = self._step(case, make_inputs(case), (*self.forms, "watchdog"), 1, False)
        return self._wrong(case, make_inputs(case), step, step.run())

    def case(self, case: Case) -> str:
        """What is wrong with a case, or nothing."""
        inputs = make_inputs(case)
        step = self._step(case, inputs, self.forms, 1, False)
        output = step.run()
        if wrong := self._wrong(case, inputs, step, output):
            return wrong
        if self.run(case, inputs, partitions=1, takes_tiles=True).tobytes() != output.tobytes():
            return "tiles from a counter give other bits"
        if ANY_DIMS in self.forms:
            split = self._step(case, inputs, self.forms, 2, False)
            if wrong := self._wrong(case, inputs, split, split.run()):
                return f"keys split in 2: {wrong}"
        for change in ({}, {"identity_pages": True}, {"poison": 0.0}):
            other = dataclasses.replace(case, **change)
            again = self.run(other, make_inputs(other), partitions=1, takes_tiles=False)
            if again.tobytes() != output.tobytes():
                return f"other bits with {change or 'the same step again'}"
        return ""

    def bad_pages(self) -> str:
        """Page ids out of range are masked; what is wrong, or nothing."""
        case = dataclasses.replace(cases_of(self.forms)[1], **CHUNKED)
        inputs = make_inputs(case)
        table = inputs["page_table"]
        table[0, 0] = len(inputs["key_pool"])
        table[5, 2:5] = np.iinfo(np.int32).max
        table[6, 0] = np.iinfo(np.int32).min
        step = self._step(case, inputs, self.forms, 1, False)
        return self._wrong(case, inputs, step, step.run())

    def far_apart(self) -> str:
        """References are outgrown by far, again and again; what is wrong, or nothing."""
        case = dataclasses.replace(cases_of(self.forms)[2], has_sinks=False)
        inputs = make_inputs(case)
        inputs["query"] = (inputs["query"].astype(np.float32) * 40).astype(case.activation.numpy)
        inputs["key_pool"][inputs["page_table"][0, :8]] *= 2
        step = self._step(case, inputs, self.forms, 1, False)
        return self._wrong(case, inputs, step, step.run())

    def _wrong(self, case: Case, inputs: Inputs, step: Any, output: Array) -> str:
        pools = [step.host_pool(name, inputs[name]) for name in ("key_pool", "value_pool")]
        expected = attend(case, inputs, *pools, rounded=False)
        allowed = allowed_error(case, attend(case, inputs, *pools, rounded=True), expected)
        error = np.abs(output.astype(np.float64) - expected)
        if output[inputs["query_start_offsets"][-1] :].astype(np.float32).any():
            return "padding is not zero"
        bad = ~(error <= allowed)
        if not bad.any():
            return ""
        tokens, heads, columns = (
            np.flatnonzero(bad.any(axis=axes)).tolist() for axes in ((1, 2), (0, 2), (0, 1))
        )
        return (
            f"{bad.sum()} of {bad.size} wrong: tokens {tokens[:8]}..{tokens[-1]}, "
            f"heads {heads[:8]}, columns {columns[:4]}..{columns[-1]}; worst "
            f"{np.nanmax(error):.3g}, {(~np.isfinite(error)).sum()} not finite"
        )

"""Plans that were measured on a device, and what a measurement holds for."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Annotated, Final

import pydantic

from paged_trt.plugins.errors import ConfigError
from paged_trt.plugins.launch.plans import AttentionPlan, parse_attention_plan
from paged_trt.plugins.launch.requests import AttentionPlanRequest

Count = Annotated[int, pydantic.Field(ge=1, lt=2**31)]
"""A positive int32."""
_Microseconds = Annotated[float, pydantic.Field(gt=0, allow_inf_nan=False)]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TuningTarget:
    """What a measurement holds for.

    Attributes:
        gpu: name of the device.
        arch: architecture, such as `sm_90`.
        num_multiprocessors: of the device.
        driver: version of the driver.
        kernels: SHA-256 of the kernel sources.
        compiler: version of NVRTC.
    """

    gpu: str
    arch: str
    num_multiprocessors: int
    driver: str
    kernels: str
    compiler: str


class Record(pydantic.BaseModel):
    """A part of the file of measured plans: checked, and nothing in it is unknown."""

    model_config = pydantic.ConfigDict(frozen=True, strict=True, extra="forbid")


class RequestKey(Record):
    """What of a request decides how fast a plan is; the device is the file's."""

    activation_dtype: str
    kv_cache_dtype: str
    num_q_heads: Count
    num_kv_heads: Count
    head_dim: Count
    value_head_dim: Count
    window: int
    has_softcap: bool
    rope: int
    num_tokens: Count
    num_seqs: Count
    table_width: Count

    @classmethod
    def of(cls, request: AttentionPlanRequest) -> RequestKey:
        """Key of a request. The tokens of a prefill step are rounded up to a power of two."""
        attention, step = request.attention, request.step
        tokens = step.num_tokens
        return cls(
            activation_dtype=request.activation_dtype.value,
            kv_cache_dtype=request.kv_cache_dtype.value,
            num_q_heads=attention.num_q_heads,
            num_kv_heads=attention.num_kv_heads,
            head_dim=attention.head_dim,
            value_head_dim=attention.value_head_dim,
            window=attention.window,
            has_softcap=attention.softcap > 0,
            rope=int(attention.rope),
            num_tokens=tokens if request.is_decode else 1 << (tokens - 1).bit_length(),
            num_seqs=step.num_seqs,
            table_width=step.table_width,
        )


class TunedPlan(Record):
    """The fastest plan of one request.

    Attributes:
        request: what was measured.
        plan_text: the plan, as `parse_attention_plan` reads it.
        microseconds: median time of the plan.
        heuristic_text: what the heuristic would have taken.
        heuristic_microseconds: median time of that.
    """

    request: RequestKey
    plan_text: str
    microseconds: _Microseconds
    heuristic_text: str
    heuristic_microseconds: _Microseconds

    @pydantic.field_validator("plan_text", "heuristic_text")
    @classmethod
    def _is_plan(cls, text: str) -> str:
        try:
            if parse_attention_plan(text) is None:
                raise ValueError("`auto` is no measured plan")
        except ConfigError as error:
            raise ValueError(str(error)) from error
        return text

    @property
    def plan(self) -> AttentionPlan:
        """The plan itself."""
        plan = parse_attention_plan(self.plan_text)
        if plan is None:
            raise ConfigError("`auto` is no measured plan")
        return plan

    def explain(self) -> str:
        """Why this plan, in words."""
        if self.plan_text == self.heuristic_text:
            return f"measured: the heuristic's own, {self.microseconds:.2f} us, is the fastest"
        return (
            f"measured: {self.microseconds:.2f} us, the heuristic's {self.heuristic_text} "
            f"{self.heuristic_microseconds:.2f} us"
        )


class TunedPlans:
    """Measured plans by request; empty where nothing was measured.

    Args:
        plans: a later plan of the same request wins.
    """

    def __init__(self, plans: Iterable[TunedPlan] = ()) -> None:
        self._plans: Mapping[RequestKey, TunedPlan] = {plan.request: plan for plan in plans}

    def __len__(self) -> int:
        return len(self._plans)

    def find(self, request: AttentionPlanRequest) -> TunedPlan | None:
        """The fastest plan of a request; None where it was not measured."""
        return self._plans.get(RequestKey.of(request)) if self._plans else None

    def all(self) -> tuple[TunedPlan, ...]:
        """Every plan, in the order in which requests came first."""
        return tuple(self._plans.values())


NO_TUNED_PLANS: Final = TunedPlans()

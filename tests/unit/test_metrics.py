"""What a scrape says of real sessions."""

from __future__ import annotations

import asyncio
import sys

import pytest
from session.gated_executor import Gated
from session.history_executor import HistoryExecutor
from session.paged_toy import make_spec, prompt_of

from paged_trt.plugins.errors import UnsupportedError
from paged_trt.runtime.async_session import AsyncSession
from paged_trt.runtime.core import EngineCore
from paged_trt.runtime.metrics import Metrics
from paged_trt.runtime.requests import GenerationRequest


def values(text: str) -> dict[str, float]:
    lines = [line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#")]
    return {name: float(value) for name, value in lines}


def test_a_scrape_tells_what_happened() -> None:
    pytest.importorskip("prometheus_client", reason="prometheus_client is not installed")
    # Ten steps of the first two, and one of the third, which cannot end by itself.
    executor = Gated(make_spec(), free_steps=11)
    core = EngineCore(executor)
    metrics = Metrics(core)

    async def main() -> None:
        session = AsyncSession(core, observer=metrics)
        for name in ("a", "b"):
            request = GenerationRequest(
                request_id=name, prompt_tokens=tuple(prompt_of(200)), max_new_tokens=5
            )
            assert len([event async for event in session.stream(request)]) == 5
        stream = session.stream(
            GenerationRequest(request_id="c", prompt_tokens=(1,), max_new_tokens=300)
        )
        await anext(stream)
        session.cancel("c")
        executor.gate.open()
        assert [event async for event in stream][-1].finish_reason == "cancelled"
        await session.aclose()

    asyncio.run(main())
    content, kind = metrics.text()
    found = values(content.decode())
    assert kind.startswith("text/plain")
    stats = core.stats()
    assert found["paged_trt_prompt_tokens_total"] == 401
    assert found["paged_trt_cached_tokens_total"] == 128
    assert found["paged_trt_new_tokens_total"] == stats.new_tokens
    assert found["paged_trt_pages_in_use"] == 0
    assert found["paged_trt_pages_free"] == stats.pages_free
    assert found["paged_trt_decode_steps_total"] == stats.decode_steps
    assert found['paged_trt_requests_total{finish_reason="length"}'] == 2
    assert found['paged_trt_requests_total{finish_reason="cancelled"}'] == 1
    assert found["paged_trt_time_to_first_token_seconds_count"] == 3
    assert found["paged_trt_inter_token_seconds_count"] >= 8
    assert not metrics._times
    assert "paged_trt_graph_replays_total" not in found


def test_without_the_client_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    with pytest.raises(UnsupportedError, match=r"paged-trt\[serve\]"):
        Metrics(EngineCore(HistoryExecutor(make_spec())))

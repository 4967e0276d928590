"""A chat template may loop, fill the memory or fail: the server that asked goes on."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
from polling import PATIENCE_SECONDS

from paged_trt.plugins.errors import ConfigError
from paged_trt.runtime.template_process import TemplateProcess

pytest.importorskip("jinja2", reason="the extra `serve` is not installed")
LOOP = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"


def with_process(
    template: str,
    use: Callable[[TemplateProcess], Awaitable[None]],
    *,
    seconds: float = PATIENCE_SECONDS,
) -> None:
    async def run() -> None:
        process = TemplateProcess(template, seconds=seconds)
        try:
            await use(process)
        finally:
            await process.aclose()

    asyncio.run(run())


def test_conversations_are_rendered_one_after_the_other() -> None:
    async def use(process: TemplateProcess) -> None:
        texts = [f"Grüße,\n世界 {index}" for index in range(8)]
        found = await asyncio.gather(*(process.render({"text": text}) for text in texts))
        assert found == [f"<{text}>" for text in texts]

    with_process("<{{ text }}>", use)


def test_the_process_runs_no_code_of_the_working_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("resource.py", "jinja2.py", "json.py"):
        (tmp_path / name).write_text("open('was_run', 'w')")
    monkeypatch.chdir(tmp_path)

    async def use(process: TemplateProcess) -> None:
        assert await process.render({"text": "safe"}) == "safe"

    with_process("{{ text }}", use)
    assert not (tmp_path / "was_run").exists()


def test_a_template_that_loops_is_ended_and_the_next_conversation_is_served() -> None:
    async def use(process: TemplateProcess) -> None:
        with pytest.raises(ConfigError, match=r"took over 0\.5 s"):
            await process.render({"loops": True})
        # The limit is short for what never comes, and this must come.
        process._seconds = PATIENCE_SECONDS
        assert await process.render({"loops": False}) == "ok"

    with_process("{% if loops %}" + LOOP + "{% endif %}ok", use, seconds=0.5)


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{{ 'a' * 10**10 }}", "MemoryError"),
        ("{{ 'a' * (4 * 10**7) }}", "made a prompt of 40000012 bytes, over 33554432"),
        ("{% if", "TemplateSyntaxError"),
        ("{{ raise_exception('no system message') }}", "no system message"),
        ("{{ text.__class__.__mro__ }}", "SecurityError"),
    ],
)
def test_a_template_that_fails_says_so(template: str, message: str) -> None:
    async def use(process: TemplateProcess) -> None:
        for _ in range(2):
            with pytest.raises(ConfigError, match=message):
                await process.render({"text": "a"})

    with_process(template, use)


def test_a_client_that_goes_away_leaves_no_answer_for_the_next_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def use(process: TemplateProcess) -> None:
        assert await process.render({"text": "before", "slow": False}) == "before"
        answers = process._process.stdout  # type: ignore[union-attr]
        readline, waits = answers.readline, asyncio.Event()  # type: ignore[union-attr]

        async def noting() -> bytes:
            waits.set()
            return await readline()

        monkeypatch.setattr(answers, "readline", noting)
        first = asyncio.create_task(process.render({"text": "first", "slow": True}))
        # The process has its conversation, and it waits for the answer.
        await waits.wait()
        first.cancel()
        with pytest.raises(asyncio.CancelledError):
            await first
        assert await process.render({"text": "second", "slow": False}) == "second"

    with_process("{% if slow %}" + LOOP + "{% endif %}{{ text }}", use)

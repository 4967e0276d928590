"""What `gpu_host run` runs: phases of steps, each step a command with its own time limit.

Without a GPU (`dry_run`) the same commands run as far as they can: tests skip, the reference
executor takes the place of the plan, and everything is small.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from typing import Final

from paged_trt.scripts.gpu_host.settings import SMOLLM2, Settings, Step

CLI: Final = (sys.executable, "-m", "paged_trt.scripts.cli")
KERNEL_TESTS: Final = (
    "tests/gpu/test_decode.py",
    "tests/gpu/test_prefill_sm90.py",
    "tests/gpu/test_prefill.py",
    "tests/gpu/test_prefill_reference.py",
    "tests/gpu/test_prefill_gather.py",
)
ALONE: Final = "alone"
"""Marks tests beside which no other may use the device: they measure its free memory."""


def _tests(settings: Settings) -> Iterator[Step]:
    no_gpu = ("--no-gpu",) if settings.dry_run else ()
    kernels = [f"--ignore={path}" for path in KERNEL_TESTS]
    parallel = str(settings.parallel)

    def step(name: str, limit_s: float, *words: str, parallel: str = parallel) -> Step:
        options = ("--name", name, "--parallel", parallel, *no_gpu)
        return Step(
            name=name,
            words=settings.ours("device_tests", *options, last=words),
            limit_s=limit_s,
        )

    yield step(ALONE, 90, "tests/gpu", "-m", f"gpu and {ALONE}", parallel="1")
    yield step("engines", 330, "tests/gpu", "-m", f"gpu and not {ALONE}", *kernels)
    yield step("kernels", 300, *KERNEL_TESTS)


def _model(settings: Settings) -> Iterator[Step]:
    if settings.model is not None and settings.model != SMOLLM2:
        return
    module = "smollm2" if settings.model else "toy"
    words = (sys.executable, "-m", f"paged_trt.scripts.example_models.{module}")
    folder = settings.model_file.parent
    yield Step(name="model", words=(*words, str(folder)), limit_s=90, makes=folder)


def _build(settings: Settings, name: str, *limits: int, more: tuple[str, ...] = ()) -> Step:
    engine = settings.engine(name)
    names = ("--max-batch-size", "--max-input-len", "--max-kv-cache-capacity")
    options = [word for pair in zip(names, map(str, limits), strict=True) for word in pair]
    return Step(
        name="build",
        words=(*CLI, "build", str(settings.model_file), "-o", str(engine), *options, *more),
        limit_s=120,
        makes=engine,
        needs=settings.model_file,
    )


def _serving_engine(settings: Settings) -> Iterator[Step]:
    sizes = settings.sizes
    limits = (sizes.serving_batch, sizes.serving_input_len, sizes.serving_capacity)
    yield from _model(settings)
    yield _build(settings, "serving", *limits, more=("--greedy-in-engine",))


def _e2e(settings: Settings) -> Iterator[Step]:
    sizes, engine = settings.sizes, settings.engine("small")
    yield from _model(settings)
    yield _build(settings, "small", sizes.batch, sizes.input_len, sizes.capacity)
    on_cpu = ("--on-cpu",) if settings.dry_run else ()
    words = (str(engine), "--label", settings.label, "--new-tokens", str(sizes.new_tokens))
    yield Step(
        name="tokens",
        words=settings.ours("end_to_end", *words, *on_cpu),
        limit_s=150,
        needs=engine,
    )
    yield Step(
        name="text",
        words=settings.ours("same_text", str(engine), "--label", settings.label, *on_cpu),
        limit_s=90,
        needs=engine,
    )
    lengths = "1,33" if settings.dry_run else "1,127,129,300"
    yield Step(
        name="compare",
        words=(
            *(*CLI, "compare", str(settings.model_file), str(engine), *settings.executor),
            *("--prompt-lens", lengths, "--new-tokens", str(min(16, sizes.new_tokens))),
            *("--json", str(settings.output / f"compare-{settings.label}.json")),
        ),
        limit_s=150,
        needs=engine,
    )


def _serving(settings: Settings) -> Iterator[Step]:
    sizes, engine = settings.sizes, settings.engine("serving")
    yield from _serving_engine(settings)
    no_gpu = ("--no-gpu",) if settings.dry_run else ()
    last = (f"--serving-engine={engine}", "tests/gpu/test_serving.py")
    yield Step(
        name="tests",
        words=settings.ours("device_tests", "--name", "serving", *no_gpu, last=last),
        limit_s=120,
        needs=engine,
    )
    yield Step(
        name="host",
        words=(
            *(*CLI, "bench", "host", str(engine), *settings.executor),
            *("--batch", str(sizes.serving_batch), "--steps", str(sizes.host_steps)),
            *("--prompt-len", str(min(200, sizes.serving_input_len))),
            *("-o", settings.results("host")),
        ),
        limit_s=90,
        needs=engine,
    )  # fmt: skip
    rates = [word for rate in sizes.rates for word in ("--rate", str(rate))]
    scale = ("--length-scale", "0.05") if settings.dry_run else ()
    yield Step(
        name="load",
        words=(
            *(*CLI, "bench", "serve", str(engine), *settings.executor, *rates, *scale),
            *("--requests", str(sizes.requests), "--shared-prefix", str(sizes.shared_prefix)),
            *("-o", settings.results("serve")),
        ),
        limit_s=180,
        needs=engine,
    )


def _engine(settings: Settings) -> Iterator[Step]:
    sizes, engine = settings.sizes, settings.engine("serving")
    yield from _serving_engine(settings)
    cells = [word for cell in sizes.cells for word in ("--cell", cell)]

    def bench(name: str, label: str) -> Step:
        return Step(
            name=name,
            words=(
                *(*CLI, "bench", "engine", str(engine), *settings.executor, *cells),
                *("--no-onnxruntime", "-o", settings.results("engine", label)),
            ),
            limit_s=110,
            needs=engine,
        )

    yield bench("times", "")
    report = settings.output / f"tune-{settings.label}.json"
    tuned = (
        ("--dry-run",)
        if settings.dry_run
        else ("--limit-s", "90", "--json", str(report), "--device", str(settings.device))
    )
    yield Step(name="tune", words=(*CLI, "tune", str(engine), *tuned), limit_s=150, needs=engine)
    yield bench("times-tuned", "tuned")


def _polygraphy(settings: Settings) -> Iterator[Step]:
    if settings.golden is None:
        return
    on_cpu = ("--on-cpu",) if settings.dry_run else ()
    yield Step(
        name="golden",
        words=settings.ours("golden", "check", str(settings.golden), *on_cpu),
        limit_s=150,
    )


def _sanitize(settings: Settings) -> Iterator[Step]:
    # Without a tool first: it compiles the kernels, for all processes of the next step.
    no_gpu = ("--no-gpu",) if settings.dry_run else ()
    options = ("--name", "sanitize", "--parallel", str(settings.parallel), *no_gpu)
    yield Step(
        name="plain",
        words=settings.ours("device_tests", *options, last=_sanitized_tests()),
        limit_s=150,
    )
    if not settings.dry_run:
        limits = ("--limit-s", "160", "--jobs", str(settings.parallel))
        yield Step(name="tools", words=settings.ours("sanitizer", *limits), limit_s=190)


def _sanitized_tests() -> list[str]:
    from paged_trt.scripts.gpu_host.sanitizer import SELECTION

    return [test for tests in SELECTION.values() for test in tests]


PHASES: Final[dict[str, Callable[[Settings], Iterator[Step]]]] = {
    "tests": _tests,
    "polygraphy": _polygraphy,
    "e2e": _e2e,
    "serving": _serving,
    "engine": _engine,
    "sanitize": _sanitize,
}
"""Steps of each phase, in the order in which phases run."""


def steps_of(settings: Settings, chosen: list[str]) -> list[tuple[str, Step]]:
    """Steps to run, each with its phase.

    Args:
        settings: of the run.
        chosen: phases, or steps such as `tests/kernels` with the steps that make what they need.

    Raises:
        ValueError: there is no such phase or step; the message names those that exist.
    """
    found: list[tuple[str, Step]] = []
    for name in chosen:
        phase, _, wanted = name.partition("/")
        if phase not in PHASES:
            raise ValueError(f"there is no phase `{phase}`; choose from {', '.join(PHASES)}")
        steps = list(PHASES[phase](settings))
        if wanted and wanted not in [step.name for step in steps]:
            known = ", ".join(step.name for step in steps) or "none, for `--golden` is missing"
            raise ValueError(f"phase `{phase}` has no step `{wanted}`; it has {known}")
        kept = [step for step in steps if not wanted or step.name == wanted or step.makes]
        found += [(phase, step) for step in kept if (phase, step) not in found]
    return found


def describe(steps: list[tuple[str, Step]]) -> str:
    """Steps as JSON lines."""
    return "\n".join(
        json.dumps({"step": f"{phase}/{step.name}", "limit_s": step.limit_s, "words": step.words})
        for phase, step in steps
    )

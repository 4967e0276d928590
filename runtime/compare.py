"""Compare an engine directory with the model that it was built from."""

from __future__ import annotations

import dataclasses
import types
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy.typing as npt

from paged_trt.plugins.errors import (
    ConfigError,
    ExecutionError,
    PackageMissingError,
    UnsupportedError,
)
from paged_trt.plugins.manifest import EngineManifest, file_record, read_manifest
from paged_trt.plugins.tensors import EngineSpec
from paged_trt.runtime.comparison import SequenceResult, Tolerance, tolerance_for
from paged_trt.runtime.decoders import open_decoder
from paged_trt.runtime.differences import HISTOGRAM_EDGES
from paged_trt.runtime.engine import load_engine
from paged_trt.runtime.paged_generation import PagedGenerator
from paged_trt.runtime.same_model_check import check_same_model, why_not
from paged_trt.runtime.same_model_report import SameModelReport
from paged_trt.runtime.scenarios import (
    Scenario,
    default_prompt_lens,
    make_scenarios,
    random_prompts,
)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class CompareOptions:
    """What to run and what to allow; see `paged-trt compare --help`.

    Attributes:
        executor: `auto`, `tensorrt` or `reference`.
        device: number of the CUDA device that runs a plan.
        num_new_tokens: greedy tokens of each prompt.
        prompt_lens: lengths of random prompts; None takes lengths around whole pages.
        prompts: token ids of the prompts, instead of random ones.
        seed: of random prompts and of the page order.
        atol: absolute tolerance of the logits.
        rtol: tolerance of the logits, relative to the largest of the row.
        layers: also compare what each layer computes with the same model on the reference
            executor; quantised pools are compared so in any case.
    """

    executor: str = "auto"
    device: int = 0
    num_new_tokens: int = 16
    prompt_lens: Sequence[int] | None = None
    prompts: Sequence[Sequence[int]] | None = None
    seed: int = 0
    atol: float | None = None
    rtol: float | None = None
    layers: bool = False


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ComparisonReport:
    """What was run, what was not, and what each sequence gave.

    Attributes:
        model: path of the model.
        engine: path of the engine directory.
        executor: name of the executor that ran.
        built_by: flavour and version of TensorRT that built the plan.
        kv_cache_dtype: type of the pools.
        source_sha256: of the model, and of the model that the manifest names.
        tolerance: what was allowed.
        notes: what a reader must know about how it was run.
        not_run: what a full comparison has and this one had not.
        failures: messages of engine steps that failed.
        iterations: name and results by sequence of each scenario.
        same_model: the engine against its own model; None where that was not run.
    """

    model: str
    engine: str
    executor: str
    built_by: str
    kv_cache_dtype: str
    source_sha256: tuple[str, str]
    tolerance: Tolerance
    notes: tuple[str, ...]
    not_run: tuple[str, ...]
    failures: tuple[str, ...]
    iterations: tuple[tuple[str, tuple[SequenceResult, ...]], ...]
    same_model: SameModelReport | None = None

    @property
    def passed(self) -> bool:
        """Whether every sequence of every iteration agrees, and the same model where it ran."""
        agrees = all(result.passed for _, results in self.iterations for result in results)
        return agrees and not self.failures and (self.same_model is None or self.same_model.passed)

    def histogram(self) -> tuple[int, ...]:
        """Counts of all logit differences; see `differences.histogram`."""
        counts = [result.histogram for _, results in self.iterations for result in results]
        return tuple(map(sum, zip(*counts, strict=True)))

    @property
    def same_source(self) -> bool:
        """Whether the model is the very file that the engine was built from."""
        return self.source_sha256[0] == self.source_sha256[1]

    def to_json(self) -> dict[str, Any]:
        """Everything as JSON types; a difference that is no number is null."""
        data = {
            field.name: getattr(self, field.name)
            for field in dataclasses.fields(self)
            if field.name not in ("iterations", "tolerance", "same_model")
        }
        return {
            **data,
            "passed": self.passed,
            "same_source": self.same_source,
            "tolerance": dataclasses.asdict(self.tolerance),
            "same_model": None if self.same_model is None else self.same_model.to_json(),
            "histogram": {"edges": HISTOGRAM_EDGES, "counts": self.histogram()},
            "iterations": [
                {"name": name, "sequences": [result.to_json() for result in results]}
                for name, results in self.iterations
            ],
        }


def compare_engine(model: Path, directory: Path, options: CompareOptions) -> ComparisonReport:
    """Decode the same prompts on both and compare logits and tokens.

    Args:
        model: the dense model, or one that holds PagedAttention nodes.
        directory: the engine directory.
        options: what to run and what to allow.

    Raises:
        ConfigError: an option or the model cannot work; UnsupportedError where a package
            is missing, or the model has no known interface.
        SequenceError: a prompt does not fit the engine.
        ManifestError: the engine directory is not what it claims.
        SpecMismatchError: the plan and the manifest disagree.
    """
    (report,) = compare_engines(model, [directory], options)
    return report


def compare_engines(
    model: Path, directories: Sequence[Path], options: CompareOptions
) -> list[ComparisonReport]:
    """Compare several engines of one model, one after the other; see `compare_engine`.

    Every manifest is read before the first engine runs. Prompts that several engines share run
    once through the model.
    """
    runners = _polygraphy_runners()
    if options.seed < 0:
        raise ConfigError(f"`--seed` must be 0 or more, got {options.seed}")
    works = [_Work.plan(model, directory, options) for directory in directories]
    dense = runners.DenseRunner(open_decoder(model))
    source_sha256 = file_record(model).sha256
    return [
        _compare(work, model, options, dense=dense, source_sha256=source_sha256) for work in works
    ]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Work:
    """One engine and what it is going to run."""

    directory: Path
    manifest: EngineManifest
    scenarios: list[Scenario]
    tolerance: Tolerance
    same_model: bool
    not_run: tuple[str, ...]

    @classmethod
    def plan(cls, model: Path, directory: Path, options: CompareOptions) -> _Work:
        manifest = read_manifest(directory)
        wanted = options.layers or manifest.spec.kv_cache_dtype.is_quantised
        problem = why_not(model, directory) if wanted else None
        if options.layers and problem is not None:
            raise UnsupportedError(problem)
        return cls(
            same_model=wanted and problem is None,
            not_run=() if problem is None else (problem,),
            directory=directory,
            manifest=manifest,
            scenarios=_scenarios(manifest.spec, options),
            tolerance=tolerance_for(manifest.spec, atol=options.atol, rtol=options.rtol),
        )


def _compare(
    work: _Work, model: Path, options: CompareOptions, *, dense: Any, source_sha256: str
) -> ComparisonReport:
    manifest, scenarios = work.manifest, work.scenarios
    executor: Any = load_engine(work.directory, executor=options.executor, device=options.device)
    try:
        generator = PagedGenerator(executor, seed=options.seed)
        results = _polygraphy_runners().run(dense, generator, scenarios, tolerance=work.tolerance)
        failures, same = list(generator.failures), None
        if work.same_model:
            try:
                same = check_same_model(
                    executor,
                    work.directory,
                    scenarios,
                    model=model,
                    seed=options.seed,
                    layers=options.layers,
                )
            except ExecutionError as error:
                failures.append(f"the same model: {error}")
    finally:
        executor.close()
    return ComparisonReport(
        model=str(model),
        engine=str(work.directory),
        executor=executor.name,
        built_by=f"{manifest.build.flavor} {manifest.build.tensorrt_version}",
        kv_cache_dtype=manifest.spec.kv_cache_dtype.value,
        source_sha256=(source_sha256, manifest.source.sha256),
        tolerance=work.tolerance,
        notes=_notes(dense.notes, executor.notes),
        not_run=(*_not_run(manifest, executor.name, scenarios), *work.not_run),
        failures=tuple(failures),
        iterations=tuple(
            (scenario.name, each) for scenario, each in zip(scenarios, results, strict=True)
        ),
        same_model=same,
    )


def _scenarios(spec: EngineSpec, options: CompareOptions) -> list[Scenario]:
    prompts: Sequence[Sequence[int] | npt.NDArray[Any]] | None = options.prompts
    if prompts is None:
        lengths = options.prompt_lens
        if lengths is None:
            lengths = default_prompt_lens(spec, options.num_new_tokens)
        prompts = random_prompts(spec, lengths, seed=options.seed)
    return make_scenarios(spec, prompts, num_new_tokens=options.num_new_tokens)


def _notes(dense: tuple[str, ...], paged: tuple[str, ...]) -> tuple[str, ...]:
    return (*(f"model: {note}" for note in dense), *(f"engine: {note}" for note in paged))


def _not_run(
    manifest: EngineManifest, executor: str, scenarios: Sequence[Scenario]
) -> tuple[str, ...]:
    chunks = [scenario.prefill_chunk for scenario in scenarios]
    missing = []
    if executor != "tensorrt":
        missing.append(
            "TensorRT: the plan and its kernels did not run; pass `--executor tensorrt` on a "
            f"machine with a GPU and {manifest.build.flavor} {manifest.build.tensorrt_version}"
        )
    if None not in chunks:
        missing.append(
            f"prefill whole: a prompt is longer than max_num_tokens={manifest.spec.max_num_tokens}"
        )
    if all(chunk is None for chunk in chunks):
        missing.append("prefill by chunks: no prompt has more than one token")
    return tuple(missing)


def _polygraphy_runners() -> types.ModuleType:
    """The module that needs Polygraphy, imported only when a comparison runs."""
    try:
        from paged_trt.runtime import polygraphy_runners
    except ImportError as error:
        raise PackageMissingError(
            f'{error.name} is not installed; run `pip install "paged-trt[compare]"`'
        ) from error
    return polygraphy_runners

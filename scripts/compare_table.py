"""Comparisons on a terminal: tables, what was run, what was not, and the verdict."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from rich import box
from rich.console import Console
from rich.table import Table

from paged_trt.runtime.compare import ComparisonReport
from paged_trt.runtime.comparison import SequenceResult
from paged_trt.runtime.same_model_report import SameModelReport, TensorResult
from paged_trt.scripts.error_output import plain

SIDE_BY_SIDE_NOTE: Final = (
    "agree: sequences; worst: largest difference as a part of its tolerance; layers: likewise, "
    "against the same rewritten model on the reference executor"
)


def show(report: ComparisonReport, console: Console, *, layers: bool = False) -> None:
    """Print the table, then what was run, what was not, and the verdict.

    A difference is printed as `value @step`, the step where it is largest for its tolerance.

    Args:
        report: of one engine.
        console: where it goes.
        layers: also print a table of the layers, where they were compared.
    """
    console.print(_table(report))
    if layers and report.same_model is not None:
        console.print(_layer_table(report.same_model))
    for label, lines in (
        ("token difference", _token_differences(report)),
        ("first difference", first_differences(report)),
        ("tolerance", [tolerance(report)]),
        ("the same model", [] if report.same_model is None else [same_model(report.same_model)]),
        ("source", [source(report)]),
        ("note", report.notes),
        ("failed step", report.failures),
        ("not run", not_run(report)),
    ):
        for line in lines:
            console.print(plain(f"{label}: {line}"), soft_wrap=True)
    console.print(plain(verdict(report)), soft_wrap=True)


def show_side_by_side(reports: Sequence[ComparisonReport], console: Console) -> None:
    """Print one line per engine."""
    table = _new_table("Engines side by side")
    table.add_column("engine", overflow="fold")
    table.add_column("built by", overflow="fold", min_width=len("tensorrt_rtx"))
    for name in ("executor", "KV cache"):
        table.add_column(name, no_wrap=True)
    for name in ("agree", "worst", "layers"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("verdict", no_wrap=True, min_width=len("verdict"))
    for report in reports:
        table.add_row(*map(plain, side_by_side(report)), _mark(report.passed))
    console.print(table)
    console.print(plain(SIDE_BY_SIDE_NOTE), soft_wrap=True)


def side_by_side(report: ComparisonReport) -> tuple[str, ...]:
    """Cells of an engine beside others: name, flavour, executor, types and three numbers."""
    sequences = [result for _, results in report.iterations for result in results]
    same = report.same_model
    return (
        report.engine,
        report.built_by,
        report.executor,
        report.kv_cache_dtype,
        f"{sum(result.passed for result in sequences)}/{len(sequences)}",
        f"{max(_part(result.max_difference, result.limit) for result in sequences):.0%}",
        "-" if same is None else f"{max(each.ratio for each in same.tensors):.0%}",
    )


def first_differences(report: ComparisonReport) -> list[str]:
    """Where each iteration first leaves its tolerance, and where a layer does."""
    places = []
    for name, results in report.iterations:
        over = [
            (index, result.first_over)
            for index, result in enumerate(results)
            if result.first_over is not None
        ]
        if over:
            index, place = min(over, key=lambda pair: pair[1].step)
            places.append(f"{name}, sequence {index}, {place}")
    same = report.same_model
    return places if same is None or same.first is None else [*places, f"layers, {same.first}"]


def tolerance(report: ComparisonReport) -> str:
    """The rule by which logits and tokens agree."""
    rule = report.tolerance
    return (
        f"{rule.atol:.3g} + {rule.rtol:.3g} * largest |logit|; tokens tie below "
        f"{rule.tie_rtol:.3g} * largest |logit| ({rule.reason})"
    )


def same_model(report: SameModelReport) -> str:
    """What the engine's own model said, in one line."""
    logits, worst = report.tensors[-1], max(report.tensors[:-1], key=lambda each: each.ratio)
    return (
        f"{'agrees' if report.passed else 'differs'} with {report.reference} on the reference "
        f"executor in {report.num_steps} steps: logits {logits.error:.3g} of "
        f"the largest (at most {logits.limit:.3g}), `{worst.name}` {worst.error:.3g} of its mean "
        f"(at most {worst.limit:.3g}); bounds are {report.tolerance.reason}"
    )


def source(report: ComparisonReport) -> str:
    """Whether the model is the file that the engine was built from."""
    found, built = report.source_sha256
    if report.same_source:
        return f"the engine was built from this file (sha256 {found[:12]})"
    return f"the engine was built from another file (sha256 {built[:12]}, this one is {found[:12]})"


def not_run(report: ComparisonReport) -> tuple[str, ...]:
    """What a full comparison has and this one had not."""
    same = report.same_model
    return report.not_run if same is None else (*report.not_run, *same.missing)


def verdict(report: ComparisonReport) -> str:
    """The result in one line."""
    sequences = [result for _, results in report.iterations for result in results]
    agreed = sum(result.passed for result in sequences)
    excused = sum(result.excused for result in sequences)
    return (
        f"{'agrees' if report.passed else 'differs'}: {agreed} of {len(sequences)} sequences "
        f"agree ({excused} with an excused tie), engine run by the {report.executor} executor"
    )


def sequence_cells(result: SequenceResult) -> tuple[str, ...]:
    """Cells of a sequence: prompt, steps, difference, tolerance, tokens."""
    return (
        str(result.prompt_len),
        f"{result.steps_compared}/{result.num_steps}",
        f"{result.max_difference:.3g} @{result.worst_step}",
        f"{result.limit:.3g}",
        "equal" if result.tokens_equal else "excused" if result.excused else "differ",
    )


def layer_cells(result: TensorResult) -> tuple[str, ...]:
    """Cells of a tensor: name, error, limit, error of the worst token, limit, step."""
    numbers = (result.error, result.limit, result.token_error, result.token_limit)
    return (result.name, *(f"{number:.3g}" for number in numbers), str(result.step))


def _new_table(title: str) -> Table:
    return Table(
        title=title,
        title_justify="left",
        box=box.SIMPLE_HEAD,
        padding=(0, 1, 0, 0),  # fits 80 columns
        pad_edge=False,
        show_edge=False,
    )


def _table(report: ComparisonReport) -> Table:
    table = _new_table("Engine against model")
    table.add_column("iteration", no_wrap=True)
    for name in ("seq", "prompt", "steps", "max |d logits|", "tolerance"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("tokens", no_wrap=True)
    table.add_column("verdict", no_wrap=True)
    for name, results in report.iterations:
        for index, result in enumerate(results):
            table.add_row(name, str(index), *sequence_cells(result), _mark(result.passed))
    return table


def _layer_table(report: SameModelReport) -> Table:
    table = _new_table("Engine against the same model on the reference executor")
    table.add_column("tensor", no_wrap=True)
    for name in ("error", "limit", "worst token", "limit", "step"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("verdict", no_wrap=True)
    for each in report.tensors:
        table.add_row(*layer_cells(each), _mark(each.passed))
    return table


def _mark(passed: bool) -> str:
    return "[green]✓[/green]" if passed else "[red]differs[/red]"


def _token_differences(report: ComparisonReport) -> list[str]:
    return [
        f"{name}, sequence {index}, {result.token_difference}"
        for name, results in report.iterations
        for index, result in enumerate(results)
        if result.token_difference is not None
    ]


def _part(value: float, limit: float) -> float:
    return value / limit if limit else float("inf") if value else 0.0

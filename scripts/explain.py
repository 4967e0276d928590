"""`paged-trt explain`: what a model's attention is, and what is in the way of paging it."""

from __future__ import annotations

import json
from pathlib import Path

import click
from rich.console import Console
from rich.table import Table

from paged_trt.builder.onnx.explain import ModelReport, NodeReport, Problem, explain
from paged_trt.scripts.attention_cells import ATTENTION_COLUMNS, attention_cells
from paged_trt.scripts.error_output import json_option, plain

EXIT_REFUSED = 2


@click.command(name="explain")
@click.argument("model", type=click.Path(path_type=Path))
@json_option
@click.pass_context
def command(ctx: click.Context, model: Path, as_json: bool) -> None:
    """Say of each attention node of MODEL what it becomes, or why not and what to export instead.

    Nothing is built or written. The exit code is 2 where `paged-trt build` would refuse the
    model.

    \b
    Example:
      paged-trt explain model.onnx
      paged-trt explain model.onnx --json | jq .kv_bytes_per_token
    """
    report = explain(model)
    if as_json:
        click.echo(json.dumps(report.to_json(), indent=2))
    else:
        show(report, Console())
    if not report.can_be_rewritten:
        ctx.exit(EXIT_REFUSED)


def show(report: ModelReport, console: Console) -> None:
    """Print the summary, the nodes in groups, and each problem with its remedy."""
    console.print(_summary(report))
    if report.nodes:
        console.print(_nodes(report.nodes))
    problems = [node.problem for node in report.nodes if node.problem is not None]
    if report.problem is not None and report.problem not in problems:
        # The model itself is in the way: what its nodes say may only follow from that.
        problems = [report.problem]
    for problem in _distinct(problems):
        console.print(plain(f"`{problem.where}`: {problem.reason}"), soft_wrap=True)
        console.print(plain(f"  do this: {problem.remedy}"), soft_wrap=True)


def _distinct(problems: list[Problem]) -> list[Problem]:
    """One problem of each kind: the layers of a model mostly share theirs."""
    return list({problem.remedy: problem for problem in reversed(problems)}.values())[::-1]


def _summary(report: ModelReport) -> Table:
    table = Table(title="Model", show_header=False, title_justify="left")
    facts = report.facts
    rows = [
        ("file", report.model),
        ("made by", report.producer),
        ("opset", str(report.opset)),
        ("attention nodes", str(len(report.nodes))),
        ("can be rewritten", "no" if facts is None else "yes"),
    ]
    if facts is not None:
        rows += [
            ("dialect", facts.dialect.value),
            ("layers", str(len(facts.layers))),
            ("activations, KV cache", facts.activation_dtype.value),
            ("bytes, KV cache of one token", f"{report.kv_bytes_per_token:,}"),
            ("vocabulary", f"{facts.vocab_size:,}"),
        ]
        rows += [
            (f"positions of `{limit.name}`", f"{limit.positions:,}")
            for limit in facts.position_limits
        ]
    for name, value in rows:
        table.add_row(name, plain(value))
    return table


def _nodes(nodes: tuple[NodeReport, ...]) -> Table:
    table = Table(title="Attention nodes", title_justify="left", show_lines=True)
    table.add_column("layers")
    table.add_column("is, and becomes")
    groups: list[list[int]] = []
    for index, node in enumerate(nodes):
        if groups and _kind(nodes[groups[-1][0]]) == _kind(node):
            groups[-1].append(index)
        else:
            groups.append([index])
    for group in groups:
        numbers = str(group[0]) if len(group) == 1 else f"{group[0]}..{group[-1]}"
        table.add_row(numbers, plain(_describe(nodes[group[0]])))
    return table


def _describe(node: NodeReport) -> str:
    lines = [node.name, f"{node.operator} -> {node.becomes or 'refused'}"]
    if node.attention is not None:
        cells = zip(ATTENTION_COLUMNS, attention_cells(node.attention), strict=True)
        lines.append(", ".join(f"{name} {cell}" for name, cell in cells))
    return "\n".join(lines)


def _kind(node: NodeReport) -> tuple[object, ...]:
    return node.operator, node.attention, node.problem and node.problem.remedy

"""Tries the forms of Hopper's prefill kernel on a device: first whether they are right, then times.

    PYTHONPATH=.typing python tests/gpu/bench_prefill_forms.py --results FILE [--limit-s 220]

1. All kernels are compiled, in processes of their own.
2. Each form is checked by `prefill_form_checks` in a process of its own: one that hangs or loses
   the device takes nothing else along. The first step runs with a watchdog.
3. The forms that are right take turns with today's kernel in each cell, by `bench_prefill`, and
   their results on its data are compared with today's.

It needs NumPy, torch, cuda-core and what `plugins` imports, and writes after every cell.
`--dry-run` does what needs no device: all kernels are compiled and the plans of each cell listed.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from gpu import bench_prefill
from gpu.bench_prefill import Cell, device_step, make_case, measure
from gpu.prefill_form_checks import FormCheck, cases_of, keys_of, request_of

from paged_trt.plugins.launch.kernels_prefill_sm90 import ANY_DIMS
from paged_trt.plugins.launch.precompile import compile_one, start_compiling
from paged_trt.plugins.launch.prefill_forms import (
    COMBINATIONS,
    NARROW_COMBINATIONS,
    name_of,
    parse_forms,
    prefill_candidates,
)
from paged_trt.plugins.launch.registry import KernelKey, KernelPath
from paged_trt.plugins.launch.requests import AttentionPlanRequest

ARCH, UNITS = "sm_90", 132
"""What a dry run compiles for."""
CHECKED: tuple[tuple[str, ...], ...] = (*COMBINATIONS, *NARROW_COMBINATIONS, (ANY_DIMS,))
CHECKS_AT_ONCE = 8
CHECK_SECONDS = 75.0
GAP_SECONDS = 0.04
DIMS_CELL = "1x8k"
OTHER_CELLS = (
    Cell(name="16x512", sequences=[(512, 0)] * 16),
    Cell(name="8x2k", sequences=[(2048, 0)] * 8),
    Cell(name="8x256-on-4k", sequences=[(256, 3840)] * 8),
)
MISSED_FIRST = (
    "4x4k",
    "16x512",
    "1x8k-32/32",
    "4x512-on-8k",
    "1x16k-64/8",
    "1x1k",
    "1x8k",
    "2k-on-32k",
    "1x8k-64/8",
    "1x32k",
    "16x1k",
    "8x2k",
    "8x256-on-4k",
    "ragged",
)
DIMS = (128, 64, 96)
Timed = tuple[Cell, argparse.Namespace]


def timed_cells() -> list[Timed]:
    """Cells and options, those first that miss their target, then narrow and other heads."""
    by_name = {cell.name: cell for cell in (*bench_prefill.CELLS, *OTHER_CELLS)}
    plain = {"dtype": "bfloat16", "kv": "", "window": -1, "rope": 0, "softcap": 0.0, "spread": 1.0}

    def options(head_dim: int, **others: Any) -> argparse.Namespace:
        return argparse.Namespace(head_dim=head_dim, **{**plain, **others})

    return [
        *((by_name[name], options(128)) for name in MISSED_FIRST[:5]),
        *((by_name[name], options(64)) for name in (DIMS_CELL, "4x4k")),
        *((by_name[name], options(128)) for name in MISSED_FIRST[5:]),
        (by_name[DIMS_CELL], options(96)),
        (by_name["16x512"], options(64)),
        (by_name[DIMS_CELL], options(128, spread=25.0)),
    ]


def candidates_of(request: AttentionPlanRequest, right: Iterable[str]) -> dict[str, Any]:
    """Plans by name, of which all forms are right; today's first, where it is one."""
    plans, allowed = prefill_candidates(request), set(right)
    found = {}
    for plan in plans:
        needs_dims = ANY_DIMS in plan.forms
        others = "+".join(form for form in plan.forms if form != ANY_DIMS)
        if (not needs_dims or ANY_DIMS in allowed) and (not others or others in allowed):
            name = name_of(plan, plans)
            found[ANY_DIMS if needs_dims and name == "today" else name] = plan
    return found


def timed_keys() -> list[KernelKey]:
    """Kernels of the timed cells, for every form."""
    keys = []
    for cell, options in timed_cells():
        request = request_of(make_case(cell, options), arch=ARCH, units=UNITS)
        for plan in prefill_candidates(request):
            is_split = plan.partitions > 1
            path = KernelPath.PREFILL_SM90_SPLIT if is_split else KernelPath.PREFILL_SM90
            keys.append(KernelKey.of(path, request, forms=plan.forms))
    return keys


def check_form(name: str) -> None:
    """All checks of a form in this process; one line of JSON for each."""
    import torch

    torch.zeros(1, device="cuda")
    check = FormCheck(parse_forms(name))
    steps: list[tuple[str, Callable[[], str]]] = [("watchdog", check.watchdog)]
    for index, case in enumerate(cases_of(check.forms)):
        steps.append((f"case {index}: {case}", lambda case=case: check.case(case)))
    steps += [("bad page ids", check.bad_pages), ("scores far apart", check.far_apart)]
    for what, step in steps:
        wrong = step()
        print(json.dumps({"what": what, "wrong": wrong}), flush=True)  # noqa: T201
        if wrong and what == "watchdog":
            return


def run_check(name: str, seconds: float) -> dict[str, Any]:
    """What a process of its own found out about a form."""
    command = [sys.executable, __file__, "--check", name]
    few_threads = {**os.environ, "OPENBLAS_NUM_THREADS": "2"}
    try:
        done = subprocess.run(
            command, env=few_threads, capture_output=True, text=True, timeout=seconds, check=False
        )
        output, problem = done.stdout, done.stderr[-1500:] if done.returncode else ""
    except subprocess.TimeoutExpired as error:
        output = error.stdout.decode() if isinstance(error.stdout, bytes) else error.stdout or ""
        problem = f"stopped after {seconds:.0f} s"
    found = [json.loads(line) for line in output.splitlines() if line.startswith("{")]
    wrong = {each["what"]: each["wrong"] for each in found if each["wrong"]}
    is_right = not wrong and not problem and bool(found)
    return {"form": name, "checks": len(found), "is_right": is_right, "wrong": wrong,
            "problem": problem}  # fmt: skip


def check_all(limit: float) -> list[dict[str, Any]]:
    names = ["+".join(forms) for forms in CHECKED]
    with concurrent.futures.ThreadPoolExecutor(CHECKS_AT_ONCE) as pool:
        found = list(pool.map(lambda name: run_check(name, min(CHECK_SECONDS, limit)), names))
    for each in found:
        print(  # noqa: T201
            f"{each['form']:40} {'right' if each['is_right'] else 'WRONG'}, {each['checks']} "
            f"checks {each['wrong'] or ''} {each['problem']}",
            flush=True,
        )
    return found


def time_cell(
    cell: Cell, options: argparse.Namespace, right: Iterable[str]
) -> list[dict[str, Any]]:
    """One row for each plan; today's comes first, which for other dims is the portable kernel."""
    import torch
    from gpu.prefill_device import PrefillStep
    from gpu.prefill_sm90_device import PrefillSm90Step

    case = make_case(cell, options)
    inputs, tensors = device_step(case, options.spread)
    request = PrefillSm90Step(case, inputs, tensors).request
    steps: dict[str, PrefillStep] = {
        name: PrefillSm90Step(case, inputs, tensors, plan)
        for name, plan in candidates_of(request, right).items()
    }
    if "today" not in steps:
        steps = {"portable": PrefillStep(case, inputs, tensors), **steps}
    attention = case.attention
    operations = (
        2 * attention.num_q_heads * cell.pairs(case.window)
        * (case.head_dim + attention.value_head_dim)
    )  # fmt: skip
    times = measure({name: step.prefill for name, step in steps.items()}, operations / 500e6 + 5)
    outputs = {name: step.output.view(torch.bfloat16).double() for name, step in steps.items()}
    torch.cuda.synchronize()
    first = next(iter(steps))
    today, wanted = statistics.median(times[first]), outputs[first]
    rows = []
    for name in steps:
        median = statistics.median(times[name])
        difference = float((outputs[name] - wanted).norm() / wanted.norm())
        rows.append(
            {
                "cell": cell.name, "head_dim": case.head_dim, "spread": options.spread,
                "plan": name, "ours_us": round(median, 2),
                "ours_us_min": round(min(times[name]), 2),
                "ours_us_max": round(max(times[name]), 2),
                "ratio_to_today": round(median / today, 4),
                "tflops": round(operations / median / 1e6, 1),
                "difference_from_today": difference,
            }
        )  # fmt: skip
    del steps, outputs
    torch.cuda.empty_cache()
    return rows


def time_all(right: list[str], limit: float, results: Path | None) -> None:
    """Time every cell, and add its rows to the results file that the checks have begun."""
    import torch

    begin = time.monotonic()
    bench_prefill.GAP_SECONDS = GAP_SECONDS
    record: dict[str, Any] = {}
    if results is not None and results.exists():
        record = json.loads(results.read_text())
    record |= {"gpu": torch.cuda.get_device_name(), "rows": [], "not_timed": []}
    for cell, options in timed_cells():
        if time.monotonic() - begin > limit:
            record["not_timed"].append(f"{cell.name} d{options.head_dim}")
            continue
        rows = time_cell(cell, options, right)
        record["rows"] += rows
        for row in rows:
            print(  # noqa: T201
                f"{row['cell']:14} d{row['head_dim']:<4} {row['plan']:36} "
                f"{row['ours_us']:10.1f} us {row['ratio_to_today']:.3f} of today's "
                f"{row['tflops']:6.0f} TFLOP/s, differs by {row['difference_from_today']:.1e}",
                flush=True,
            )
        write(results, record)


def write(path: Path | None, record: dict[str, Any]) -> None:
    if path is not None:
        temporary = path.with_suffix(".part")
        temporary.write_text(json.dumps(record, indent=1) + "\n")
        os.replace(temporary, path)


def compile_all(seconds: float) -> int:
    keys = [key for forms in CHECKED for key in keys_of(forms, arch=ARCH, units=UNITS)]
    keys = list(dict.fromkeys([*keys, *timed_keys()]))
    start_compiling(keys).result(timeout=seconds)
    for problem in filter(None, map(compile_one, keys)):  # those that are there are found at once
        print(f"not compiled: {problem}")  # noqa: T201
    return len(keys)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--results", type=Path, help="JSON of checks and times")
    parser.add_argument("--limit-s", type=float, default=220.0, help="seconds of everything")
    parser.add_argument("--check", help="only check this form, in this process")
    parser.add_argument("--time", help="only time these forms, with commas between them")
    parser.add_argument("--dry-run", action="store_true", help="compile; no device is needed")
    options = parser.parse_args()
    if options.check is not None:
        check_form(options.check)
        return
    if options.time is not None:
        time_all(options.time.split(","), options.limit_s, options.results)
        return
    begin = time.monotonic()

    def left() -> float:
        return float(options.limit_s) - (time.monotonic() - begin)

    count = compile_all(max(left(), 600.0 if options.dry_run else 1.0))
    print(f"{count} kernels in {time.monotonic() - begin:.1f} s", flush=True)  # noqa: T201
    if options.dry_run:
        for cell, chosen in timed_cells():
            request = request_of(make_case(cell, chosen), arch=ARCH, units=UNITS)
            names = candidates_of(request, ["+".join(forms) for forms in CHECKED])
            print(f"{cell.name:14} d{chosen.head_dim:<4} {', '.join(names)}")  # noqa: T201
        return
    record: dict[str, Any] = {"checks": check_all(left())}
    write(options.results, record)
    right = [each["form"] for each in record["checks"] if each["is_right"]]
    # In a process of its own, too: what a form does on large steps is not known either.
    command = [sys.executable, __file__, "--time", ",".join(right), "--limit-s", f"{left():.0f}"]
    if options.results is not None:
        command += ["--results", str(options.results)]
    try:
        subprocess.run(command, timeout=max(20.0, left() + 20.0), check=False)
    except subprocess.TimeoutExpired:
        print("the timing was stopped: it took too long")  # noqa: T201


if __name__ == "__main__":
    main()

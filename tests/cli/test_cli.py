"""The command line: help texts, bad input, exit codes; no traceback, nothing half-written."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import click
import pytest

from paged_trt.plugins.kv import MAX_KV_CACHE_CAPACITY, MAX_KV_POOL_PAGES
from paged_trt.runtime.reference_executor import ReferenceExecutor
from paged_trt.scripts.cli import COMMANDS, cli, main
from paged_trt.scripts.example_models.config import Dialect
from paged_trt.scripts.example_models.toy import write_toy
from paged_trt.scripts.readme import render
from paged_trt.scripts.results import read_results

LIMITS = ("--max-batch-size=2", "--max-input-len=100", "--max-kv-cache-capacity=200")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("toy")
    write_toy(folder, Dialect("attention23-past"))
    return folder / "model.onnx"


@pytest.fixture(scope="module")
def engine(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A real engine directory; built in a child process, so that an abort cannot take us along."""
    target = tmp_path_factory.mktemp("engine") / "toy"
    done = run_child(["build", str(model), "-o", str(target), *LIMITS])
    assert done.returncode == 0, done.stderr
    return target


def run_child(
    arguments: Sequence[str], environment: dict[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "paged_trt.scripts.cli", *arguments],
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
        env=environment,
    )


def fails(capsys: pytest.CaptureFixture[str], code: int, *arguments: object) -> str:
    """Run, expect `code` and one readable error, and give back its text."""
    assert main([str(argument) for argument in arguments]) == code
    text = capsys.readouterr().err
    assert "rror" in text
    assert "Traceback" not in text
    return text


def every_command(group: click.Group, *path: str) -> Iterator[tuple[str, ...]]:
    """The words of every command, subcommands of subcommands too."""
    context = click.Context(group)
    for name in group.list_commands(context):
        yield (*path, name)
        command = group.get_command(context, name)
        if isinstance(command, click.Group):
            yield from every_command(command, *path, name)


@pytest.mark.parametrize("words", [(), *every_command(cli)], ids=" ".join)
def test_help_has_an_example(words: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*words, "--help"]) == 0
    text = capsys.readouterr().out
    example = text.split("Example:")[1]
    assert r"\b" not in text
    # The example is of this very command.
    assert " ".join(("paged-trt", *words)) in example


@pytest.mark.parametrize("words", [[], ["bench"]], ids=["paged-trt", "bench"])
def test_a_group_alone_shows_its_help(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*words, "--help"]) == 0
    text = capsys.readouterr().out
    assert main(words) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err == text


def test_help_lists_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    text = capsys.readouterr().out
    assert all(name in text for name in COMMANDS)


@pytest.mark.parametrize(
    ("options", "numbers"),
    [
        (["--kv-pool-pages=3"], ["3", "at least 4", "`--kv-pool-pages 4`"]),
        ([f"--kv-pool-pages={MAX_KV_POOL_PAGES + 1}"], [str(MAX_KV_POOL_PAGES)]),
        (["--retained-pages=-1"], ["-1"]),
        (
            ["--retained-pages=1", "--kv-pool-pages=9"],
            ["`--kv-pool-pages` 9", "exclude each other"],
        ),
        (["--max-batch-size=0"], ["0"]),
        (["--max-batch-size=-4"], ["-4"]),
        ([f"--max-kv-cache-capacity={MAX_KV_CACHE_CAPACITY + 1}"], [str(MAX_KV_CACHE_CAPACITY)]),
        (["--max-kv-cache-capacity=2049"], ["2049", "2048"]),
        (["--max-input-len=201"], ["201", "200"]),
        (["--max-num-tokens=0"], ["0"]),
        (["--max-num-tokens=2147483647"], ["2147483647", "lower it"]),
        (["--kv-cache-dtype=int8"], ["--kv-scales", "`paged-trt calibrate"]),
        (["--kv-scales=missing.safetensors"], ["--kv-scales"]),
        (["--kv-cache-dtype=int8", "--kv-scales=missing"], ["missing", "`paged-trt calibrate"]),
        (["--attention-plan=split:100"], ["100", "128"]),
        (["--attention-plan=fastest"], ["fastest"]),
        (["--attention-plan=cluster:3"], ["2, 4 or 8", "3"]),
        (["--attention-plan=counter:65"], ["64", "65"]),
        (["--attention-plan=split:128:99999999999"], ["99999999999", "2147483647"]),
        (["--tokenizer=/nonexistent"], ["tokenizer.json"]),
        (["--save-onnx=/nonexistent/model.onnx"], ["/nonexistent"]),
    ],
)
def test_bad_limits_write_nothing(
    options: list[str],
    numbers: list[str],
    model: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    text = fails(capsys, 2, "build", model, "-o", tmp_path / "engine", *LIMITS, *options)
    flat = " ".join(text.split())
    assert all(number in flat for number in numbers), text
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("value", ["1.5", "many", "1e3", ""])
def test_a_limit_is_an_integer(
    value: str, model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fails(capsys, 2, "build", model, "-o", tmp_path / "e", *LIMITS, "--max-batch-size", value)
    assert list(tmp_path.iterdir()) == []


def test_build_needs_a_target_or_a_dry_run(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "--dry-run" in fails(capsys, 2, "build", model, *LIMITS)
    assert main(["build", str(model), *LIMITS, "--dry-run"]) == 0
    text = capsys.readouterr().out
    # 2 layers x 2 halves x 4 pages x 2 heads x 128 tokens x 64 elements x 2 bytes.
    assert "524,288" in text


@pytest.mark.parametrize("content", [b"", b"not onnx", b"\x08\x0a" * 40])
def test_what_is_no_model_is_refused(
    content: bytes, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "model.onnx"
    path.write_bytes(content)
    fails(capsys, 2, "build", path, "-o", tmp_path / "engine", *LIMITS)
    fails(capsys, 2, "build", tmp_path / "absent.onnx", "-o", tmp_path / "engine", *LIMITS)
    assert list(tmp_path.iterdir()) == [path]


def test_a_target_that_is_there_is_kept(
    model: Path, engine: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    foreign = tmp_path / "foreign"
    foreign.mkdir()
    (foreign / "precious.txt").write_text("x")
    assert "--force" in fails(capsys, 2, "build", model, "-o", engine, *LIMITS)
    text = fails(capsys, 2, "build", model, "-o", foreign, *LIMITS, "--force")
    assert "precious.txt" in text
    assert (foreign / "precious.txt").read_text() == "x"
    fails(capsys, 2, "build", model, "-o", tmp_path / "no" / "engine", *LIMITS)


def test_force_replaces_an_engine(model: Path, engine: Path, tmp_path: Path) -> None:
    target = tmp_path / "engine"
    shutil.copytree(engine, target)
    (target / "config.json").unlink()
    done = run_child(["build", str(model), "-o", str(target), *LIMITS, "--force"])
    assert done.returncode == 0, done.stderr
    assert (target / "config.json").is_file()
    assert [path.name for path in tmp_path.iterdir()] == ["engine"]


def test_force_keeps_the_folder_of_the_model(
    model: Path, engine: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "model"
    shutil.copytree(model.parent, folder)
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    own = folder / "model.onnx"
    text = fails(capsys, 2, "build", own, "-o", folder, *LIMITS, "--force")
    assert "no engine directory" in text
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before
    target = tmp_path / "engine"
    shutil.copytree(engine, target)
    for inside in (("--save-onnx", target / "x.onnx"), ("--tokenizer", target)):
        text = fails(capsys, 2, "build", own, "-o", target, *LIMITS, "--force", *inside)
        assert f"lies in {target}" in " ".join(text.split())


def test_names_are_text_and_no_markup(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "folder"
    shutil.copytree(model.parent, folder)
    odd = folder / "[bold]x[,].onnx"
    (folder / "model.onnx").rename(odd)
    assert main(["build", str(odd), *LIMITS, "--dry-run"]) == 0
    assert "[bold]x[,].onnx" in capsys.readouterr().out
    closing = folder / "[:]" / "b].onnx"
    text = fails(capsys, 2, "build", f"{closing}[/red]\x1b[31m\x07", *LIMITS, "--dry-run")
    assert "[/red]\\x1b[31m\\x07" in text


@pytest.mark.parametrize("name", ["[/red]", "\x1b]0;title\x07"])
def test_inspect_shows_names_as_text(
    name: str, engine: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target = tmp_path / "engine"
    shutil.copytree(engine, target)
    path = target / "manifest.json"
    manifest = json.loads(path.read_text())
    manifest["source"]["name"] = name
    path.write_text(json.dumps(manifest))
    assert main(["inspect", str(target)]) == 0
    text = capsys.readouterr().out
    assert ascii(name)[1:-1] in text
    assert "\x1b" not in text


def test_notes_of_an_engine_are_text(
    engine: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ReferenceExecutor, "notes", ("[/red]\x1b[2J",))
    arguments = ["run", str(engine), "--input-ids", "1", "--max-new-tokens", "1"]
    assert main([*arguments, "--executor", "reference"]) == 0
    assert "note: [/red]\\x1b[2J" in capsys.readouterr().err


def test_a_terminal_without_unicode_gets_escapes(engine: Path) -> None:
    environment = {**os.environ, "PYTHONIOENCODING": "ascii", "COLUMNS": "80"}
    for arguments in (["inspect", str(engine)], ["run", str(engine), "--prompt", "é"]):
        done = run_child(arguments, environment)
        assert done.returncode == 0, done.stderr
        assert done.stdout


def test_a_closed_pipe_is_no_failed_comparison(engine: Path) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run(
        [sys.executable, "-m", "paged_trt.scripts.cli", "inspect", str(engine)],
        stdout=writer,
        stderr=subprocess.PIPE,
        text=True,
        check=False,
        timeout=300,
    )
    os.close(writer)
    assert done.returncode == 141
    assert done.stderr == ""


def test_a_prompt_that_is_no_text_is_refused(
    engine: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert "UTF-8" in fails(capsys, 2, "run", engine, "--prompt", "a\udcff")


TOLD_TO_END = """
import os
import signal
import sys
from paged_trt.scripts.cli import end, main

folder, number, *arguments = sys.argv[1:]
# A test run that was started by nohup ignores SIGHUP, and a build would ignore it too.
if int(number) == signal.SIGHUP:
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
if int(number) == signal.SIGTERM:
    # As in a background job of a shell.
    signal.signal(signal.SIGINT, signal.SIG_IGN)

def watch(event, details):
    # The first file that is written: the folder that must not stay is there by then.
    if event == "open" and str(details[0]).startswith(folder) and not told:
        told.append(details[0])
        os.kill(os.getpid(), int(number))

told = []
sys.addaudithook(watch)
code = main(arguments)
print(len(told))
end(code)
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT])
def test_a_build_that_is_told_to_end_leaves_nothing(
    number: int, model: Path, tmp_path: Path
) -> None:
    build = ["build", str(model), "-o", str(tmp_path / "engine"), *LIMITS]
    done = subprocess.run(
        [sys.executable, "-c", TOLD_TO_END, str(tmp_path), str(int(number)), *build],
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert done.returncode == 130, done.stderr
    assert done.stdout.endswith("1\n")
    assert "Traceback" not in done.stderr
    assert list(tmp_path.iterdir()) == []


INTERRUPTED_WHILE_IMPORTING = """
import ctypes
from paged_trt.scripts.cli import end
run = ctypes.pythonapi.PyRun_String
run.restype = ctypes.py_object
run.argtypes = [ctypes.c_char_p, ctypes.c_int, ctypes.py_object, ctypes.py_object]
try:
    run(b"raise KeyboardInterrupt", 257, {}, {})  # 257: Py_file_input
except KeyboardInterrupt:
    end(CODE)
"""


@pytest.mark.parametrize("code", [130, 3])
def test_an_interrupt_inside_an_import_keeps_the_exit_code(code: int, tmp_path: Path) -> None:
    (tmp_path / "child.py").write_text(INTERRUPTED_WHILE_IMPORTING.replace("CODE", str(code)))
    done = subprocess.run([sys.executable, "-m", "child"], cwd=tmp_path, check=False)
    # Any other code still shows how Python ends such a process without `end`'s way out.
    assert done.returncode == (130 if code == 130 else -signal.SIGINT)


def test_inspect_agrees_at_every_hop(engine: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", str(engine), "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert data["pool"]["num_pages"] == 4
    assert [hop["name"] for hop in data["hops"]] == [
        "manifest", "spec", "tensor table", "profiles", "ONNX model", "plan",
    ]  # fmt: skip
    assert {hop["num_pages"] for hop in data["hops"]} == {4}
    assert main(["inspect", str(engine)]) == 0
    assert "✓" in capsys.readouterr().out


@pytest.mark.parametrize("name", ["model.plan", "model.onnx", "model.onnx.data", "manifest.json"])
@pytest.mark.parametrize("keep", [0, 100])
@pytest.mark.parametrize("command", ["inspect", "run"])
def test_a_truncated_file_ends_with_4(
    name: str,
    keep: int,
    command: str,
    engine: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    copy = tmp_path / "engine"
    shutil.copytree(engine, copy)
    (copy / name).write_bytes((copy / name).read_bytes()[:keep])
    arguments = ["--input-ids", "1"] if command == "run" else []
    assert name in fails(capsys, 4, command, copy, *arguments)
    (copy / name).unlink()
    fails(capsys, 4, command, copy, *arguments)


def test_a_plan_of_another_engine_ends_with_4(
    model: Path, engine: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = tmp_path / "other"
    options = [*LIMITS, "--retained-pages=1"]
    assert run_child(["build", str(model), "-o", str(other), *options]).returncode == 0
    copy = tmp_path / "engine"
    shutil.copytree(engine, copy)
    shutil.copy(other / "model.plan", copy / "model.plan")
    assert "model.plan" in fails(capsys, 4, "inspect", copy)
    # Even where the manifest vouches for the swapped plan, its name gives it away.
    data = json.loads((copy / "manifest.json").read_text())
    data["files"]["model.plan"] = json.loads((other / "manifest.json").read_text())["files"][
        "model.plan"
    ]
    (copy / "manifest.json").write_text(json.dumps(data))
    text = fails(capsys, 4, "inspect", copy)
    assert "pages=4" in text
    assert "pages=5" in text


@pytest.mark.parametrize("command", ["inspect", "run", "compare"])
def test_a_folder_without_a_manifest_ends_with_4(
    command: str, model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = {"inspect": [], "run": ["--input-ids", "1"], "compare": []}[command]
    first = [model] if command == "compare" else []
    assert "paged-trt build" in fails(capsys, 4, command, *first, tmp_path, *arguments)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], ["--prompt"]),
        (["--input-ids", "1,x"], ["1,x"]),
        (["--input-ids", ""], ["--input-ids"]),
        (["--input-ids", "512"], ["512"]),
        (["--input-ids", "-1"], ["-1"]),
        (["--input-ids", ",".join(["1"] * 101)], ["101", "100"]),
        (["--input-ids", "1,2", "--max-new-tokens", "199"], ["199", "200"]),
        (["--input-ids", "1", "--max-new-tokens", "0"], ["0"]),
        (["--input-ids", "1", "--chat"], ["--prompt"]),
        (["--input-ids", "1", "--executor", "tensorrt"], ["--executor reference"]),
    ],
)
def test_what_cannot_run_is_refused(
    arguments: list[str], words: list[str], engine: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = " ".join(fails(capsys, 2, "run", engine, *arguments).split())
    assert all(word in text for word in words), text


def test_run_without_a_tokenizer_takes_ids_only(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    bare = tmp_path / "bare"
    bare.mkdir()
    for name in ("model.onnx", "model.onnx.data"):
        if (model.parent / name).exists():
            shutil.copy(model.parent / name, bare / name)
    target = tmp_path / "engine"
    assert (
        run_child(["build", str(bare / "model.onnx"), "-o", str(target), *LIMITS]).returncode == 0
    )
    assert "--input-ids" in fails(capsys, 2, "run", target, "--prompt", "x")
    assert main(["run", str(target), "--input-ids", "1,2", "--max-new-tokens", "2"]) == 0
    assert len(capsys.readouterr().out.strip().split(",")) == 2


def test_batch_and_single_agree(engine: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def tokens(*ids: str) -> list[list[int]]:
        options = [word for each in ids for word in ("--input-ids", each)]
        assert main(["run", str(engine), *options, "--max-new-tokens=8", "--json"]) == 0
        data = json.loads(capsys.readouterr().out)
        assert data["executor"] == "reference"
        return [sequence["tokens"] for sequence in data["sequences"]]

    # Three sequences on two slots: the third one waits.
    batch = tokens("1,2,3", "4,5", "6")
    assert batch == [tokens(each)[0] for each in ("1,2,3", "4,5", "6")]
    assert all(len(each) == 8 for each in batch)


def test_compare_accepts_the_engine(
    model: Path, engine: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["--new-tokens=4", "--input-ids=1,2,3", "--input-ids=9", "--executor=reference"]
    assert main(["compare", str(model), str(engine), *options]) == 0
    assert "not run: TensorRT" in capsys.readouterr().out


def test_bench_e2e_writes_what_the_readme_shows(
    model: Path, engine: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "e2e.json"
    options = ["--prompt", "a b", "--prompt", "c", "--new-tokens", "3", "-o", str(output)]
    assert main(["bench", "e2e", str(model), str(engine), *options]) == 0
    (row,) = read_results(output).rows
    # Two prompts of several tokens: prefilled whole and in chunks.
    assert (row["verdict"], row["tokens_compared"], row["num_pages"]) == ("agrees", 12, 4)
    assert 0 < row["step_us_eager_min"] <= row["step_us_eager"] <= row["step_us_eager_max"]
    text = render("<!-- results: e2e -->\nold\n<!-- end -->", tmp_path)
    assert "old" not in text
    assert "[`e2e.json`](tests/bench/results/e2e.json)" in text


def test_run_draws_the_same_tokens_from_the_same_seed(
    engine: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    texts = []
    # So hot that the draw without a seed has no chance to be one of the others.
    draws = ["--temperature=100", "--top-k=50", "--top-p=0.99"]
    for options in (["--seed=1"], ["--seed=1"], ["--seed=2"], []):
        arguments = ["--input-ids", "1,2", *draws, *options, "--max-new-tokens=12"]
        assert main(["run", str(engine), *arguments]) == 0
        texts.append(capsys.readouterr().out)
    assert texts[0] == texts[1]
    assert len(set(texts)) == 3
    assert "`top_p` must be over 0" in fails(
        capsys, 2, "run", engine, "--input-ids", "1", "--top-p=0"
    )


def test_options_of_a_draw_are_no_secret_where_nothing_is_drawn(
    engine: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["run", str(engine), "--input-ids", "1", "--max-new-tokens=1", "--executor=reference"]
    for options, note in (
        (["--top-k=5", "--seed=0"], "`--top-k` and `--seed` changed nothing"),
        (["--top-p=0.5"], "`--top-p` changed nothing"),
        (["--top-p=0.5", "--temperature=1"], None),
        ([], None),
    ):
        assert main([*words, *options]) == 0
        text = capsys.readouterr().err
        assert note in text if note else "changed nothing" not in text


def test_bench_host_times_a_full_batch(
    engine: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "host.json"
    options = ["--prompt-len", "12", "--steps", "5", "-o", str(output)]
    assert main(["bench", "host", str(engine), "--executor=reference", *options]) == 0
    results = read_results(output)
    row, pipelined = results.rows
    assert (results.kind, row["executor"], row["steps"]) == ("host", "reference", 5)
    assert (row["pipelined"], pipelined["pipelined"]) == (False, True)
    assert row["prompt_tokens"] == pipelined["prompt_tokens"]
    assert 0 < row["runtime_us"] < row["step_us"]
    assert "host_us" not in row
    output.unlink()
    for wrong, words in (
        (["--batch", "0"], "`--batch` must be from 1"),
        (["--steps", "1"], "both must be 2 or more"),
        (["--steps", "100000"], "all fit the engine's"),
    ):
        assert words in fails(capsys, 2, "bench", "host", engine, *wrong, "-o", output)
    assert not output.exists()


@pytest.mark.parametrize(
    ("options", "words"),
    [(["--gigabytes=0.5"], "under 1.0, one layer"), (["--runs=0"], "x>=1")],
)
def test_bench_rewrite_checks_its_sizes(
    options: list[str], words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "rewrite.json"
    assert words in fails(capsys, 2, "bench", "rewrite", *options, "-o", output)
    assert not output.exists()


def test_without_a_reference_the_directory_is_small(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target = tmp_path / "engine"
    saved = tmp_path / "paged.onnx"
    options = ["--no-reference", f"--save-onnx={saved}"]
    assert run_child(["build", str(model), "-o", str(target), *LIMITS, *options]).returncode == 0
    assert not (target / "model.onnx").exists()
    assert saved.is_file()
    assert main(["inspect", str(target)]) == 0
    assert "--no-reference" in fails(capsys, 2, "run", target, "--input-ids", "1")
    # The rewritten model is itself an input: PagedAttention nodes are a dialect.
    capsys.readouterr()
    assert main(["build", str(saved), *LIMITS, "--dry-run"]) == 0


def test_log_level_is_checked(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PAGED_TRT_LOG", "loud")
    assert "loud" in fails(capsys, 2, "inspect", "x")


def test_a_wrong_path_is_answered_with_the_right_one(
    model: Path, engine: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def said(code: int, *words: object) -> str:
        return " ".join(fails(capsys, code, *words).split())

    shutil.copytree(engine, tmp_path / "engine")
    shutil.copy(engine / "model.onnx", tmp_path / "model.onnx")
    prompt = ["--input-ids", "1"]
    assert "did you mean `" in said(4, "run", tmp_path / "engin", *prompt)
    assert str(tmp_path / "engine") in said(4, "run", tmp_path / "engin", *prompt)
    assert f"`paged-trt build {model} -o" in said(4, "run", model, *prompt)
    assert "is a file" in said(4, "inspect", engine / "config.json")
    assert f"`paged-trt compare {model} {engine}`" in said(2, "compare", engine, model)
    assert "did you mean `engine`?" in said(2, "bench", "enigne", engine)
    (tmp_path / "empty.onnx").write_bytes(b"")
    assert "the file is empty" in said(2, "explain", tmp_path / "empty.onnx")
    assert "engine directory, built already" in said(2, "explain", engine)
    assert "engine directory, built already" in said(2, "build", engine, *LIMITS, "--dry-run")
    assert f"did you mean `{model}`" in said(2, "explain", model.parent)
    assert f"did you mean `{tmp_path / 'model.onnx'}`" in said(
        2, "explain", tmp_path / "modle.onnx"
    )
    assert f"did you mean `{model}`" in said(2, "compare", model.parent, engine)
    assert "pass the path of a `.onnx` file" in said(2, "explain", tmp_path / "no" / "x.bin")

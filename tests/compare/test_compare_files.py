"""Reports of comparisons as files: several engines in one, and a page that needs no network."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from html.parser import HTMLParser
from pathlib import Path

import pytest
from engine_dirs import tamper, write_engine_dir

from paged_trt.plugins.dtypes import DType
from paged_trt.scripts.cli import main
from paged_trt.scripts.example_models.toy import write_toy

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
QT_PAGE = Path(__file__).with_name("qt_page.py")
PNG = b"\x89PNG\r\n\x1a\n"
# A name that would be markup, and a formula that cannot be read, if it were not escaped.
HOSTILE = "<img src=x>&amp;$\\x$"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model, an engine that agrees and one that does not, and the files of their comparison."""
    folder = tmp_path_factory.mktemp("files")
    write_toy(folder / "toy", "gqa")
    model = folder / "toy" / "model.onnx"
    write_engine_dir(model, folder / "float16")
    write_engine_dir(model, folder / "int8", kv_cache_dtype=DType.INT8, kv_scale=6 / 127)
    write_engine_dir(model, folder / HOSTILE)
    tamper(folder / HOSTILE, _window)
    return folder


def _window(model) -> None:
    node = next(each for each in model.graph.node if each.op_type == "PagedAttention")
    next(each for each in node.attribute if each.name == "window").i = 20


def compare(folder: Path, engines: list[str], *words: str) -> int:
    paths = [str(folder / name) for name in ("toy/model.onnx", *engines)]
    quick = ("--executor", "reference", "--new-tokens", "2", "--prompt-lens", "3,129")
    return main(["compare", *paths, *quick, *words])


@pytest.fixture(scope="module")
def written(folder: Path) -> Path:
    """Folder with all files of one comparison."""
    pytest.importorskip("matplotlib", reason="the extra `plots` is not installed")
    target = folder / "written"
    target.mkdir()
    places = [f"--{kind}={target / f'report.{kind}'}" for kind in ("json", "html", "png")]
    assert compare(folder, ["float16", "int8", HOSTILE], "--layers", *places) == 1
    return target


def test_engines_are_shown_side_by_side(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert compare(folder, ["float16", "int8"]) == 0
    output = capsys.readouterr().out
    assert output.count("Engine against model") == 2
    table = output[output.index("Engines side by side") :]
    assert "int8" in table
    assert table.count("✓") == 2
    table = table[: table.index("agree: sequences")]
    assert max(map(len, table.splitlines())) <= 80
    assert "verdict" in table


def test_json_has_a_report_per_engine(written: Path) -> None:
    data = json.loads((written / "report.json").read_text())
    assert data["passed"] is False
    good, quantised, bad = data["reports"]
    assert (good["passed"], quantised["passed"], bad["passed"]) == (True, True, False)
    assert quantised["kv_cache_dtype"] == "int8"
    assert quantised["same_model"]["passed"] is True
    assert quantised["same_model"]["first"] is None
    sequence = bad["iterations"][0]["sequences"][1]
    place = sequence["first_over"]
    assert place["step"] == 0
    assert abs(place["engine"] - place["reference"]) > place["limit"]


def test_histograms_are_a_picture(written: Path) -> None:
    from matplotlib.image import imread

    assert (written / "report.png").read_bytes().startswith(PNG)
    picture = imread(written / "report.png")
    assert picture.shape[0] > 400
    assert picture.shape[1] > 800
    # Lines of three engines, the tolerance, text and paper.
    assert len({tuple(pixel) for row in picture[::3] for pixel in row[::3]}) > 20


class _Page(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        self.text += data


def test_page_is_whole_and_needs_no_network(written: Path) -> None:
    text = (written / "report.html").read_text(encoding="utf-8")
    page = _Page()
    page.feed(text)
    names = [tag for tag, _ in page.tags]
    assert not {"script", "link", "iframe", "object", "a"} & set(names)
    sources = [
        value for _, attributes in page.tags for key, value in attributes.items() if key == "src"
    ]
    assert len(sources) == 1
    assert sources[0].startswith("data:image/png;base64,")
    assert not re.search(r"https?:|//|url\(|@import", text.replace(sources[0], ""))
    # The hostile name is text.
    assert HOSTILE in page.text
    assert names.count("img") == 1
    assert "2 of 3 engines agree" in page.text
    assert "Where it first differs" in page.text
    assert "attention.0" in page.text
    assert "code" in names
    assert "`" not in page.text


# The verdict's red bar, the histogram's orange line, and white paper.
COLOURS = ((0.70, 0.15, 0.12, 200), (1.0, 0.5, 0.05, 50), (1.0, 1.0, 1.0, 500_000))
Colours = Sequence[tuple[float, float, float, int]]
BLANK = "<!DOCTYPE html><title>blank</title><p>This browser works."


def run_browser(words: Sequence[str | Path], timeout: int) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        list(map(str, words)), capture_output=True, text=True, check=False, timeout=timeout
    )


def render_in_chromium(page: Path, picture: Path, colours: Colours, seconds: int) -> str:
    """Renders a page with a browser that is installed; the text of its document."""
    browser = next(filter(None, map(shutil.which, BROWSERS)), None)
    if browser is None:
        pytest.skip(f"no browser is installed, none of {', '.join(BROWSERS)}")
    options = (
        *("--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars"),
        *(f"--user-data-dir={picture.parent / 'profile'}", "--window-size=1100,1600"),
        # No name resolves: whatever the page loaded from elsewhere would be missing.
        "--host-resolver-rules=MAP * ~NOTFOUND",
    )
    for words in ([f"--screenshot={picture}"], ["--dump-dom"]):
        done = run_browser([browser, *options, *words, page.as_uri()], seconds)
        assert done.returncode == 0, done.stderr
    return done.stdout


def render_in_qt(page: Path, picture: Path, colours: Colours, seconds: int) -> str:
    """Renders a page with Qt WebEngine of the dependency group `browser`; the text of the page."""
    pytest.importorskip("PyQt6", reason="the dependency group `browser` is not installed")
    words = [sys.executable, QT_PAGE, page, picture, json.dumps(colours), seconds // 2]
    done = run_browser(words, seconds)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("render", [render_in_chromium, render_in_qt], ids=["chromium", "qt"])
def test_page_is_rendered_by_a_browser(
    render: Callable[..., str], written: Path, tmp_path: Path
) -> None:
    from matplotlib.image import imread

    blank = tmp_path / "blank.html"
    blank.write_text(BLANK)
    try:
        assert "This browser works." in render(blank, tmp_path / "blank.png", (), 120)
    except (AssertionError, subprocess.TimeoutExpired) as error:
        pytest.skip(f"the browser renders no page on this machine, not a blank one: {error}"[:300])
    shot = tmp_path / "shot.png"
    assert "Engines against the model" in render(written / "report.html", shot, COLOURS, 300)
    picture = imread(shot)[:, :, :3]
    assert picture.shape[:2] == (1600, 1100)
    for *colour, count in COLOURS:
        assert (abs(picture - colour).max(axis=-1) < 0.05).sum() > count, colour


@pytest.mark.parametrize("kind", ["json", "html", "png"])
def test_file_has_a_place_before_the_run(
    kind: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    # Places are checked before packages.
    assert compare(folder, ["float16"], f"--{kind}", str(folder)) == 2
    assert f"pass the name of a file to `--{kind}`" in capsys.readouterr().err
    assert compare(folder, ["float16"], f"--{kind}", str(folder / "none" / "x")) == 2
    assert "is no directory; create it first" in capsys.readouterr().err


@pytest.mark.parametrize(("package", "kind"), [("matplotlib", "png"), ("jinja2", "html")])
def test_missing_package_names_the_extra(package: str, kind: str, folder: Path) -> None:
    code = (
        f"import sys; sys.modules['{package}'] = None\n"
        "from paged_trt.scripts.cli import main; sys.exit(main(sys.argv[1:]))"
    )
    words = [str(folder / name) for name in ("toy/model.onnx", "float16")]
    done = subprocess.run(
        [sys.executable, "-c", code, "compare", *words, f"--{kind}", str(folder / "x")],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2
    assert 'pip install "paged-trt[plots]"' in done.stderr
    assert "Traceback" not in done.stderr


def test_later_engine_is_checked_before_the_first_runs(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert compare(folder, ["float16", "toy"]) == 4
    output = capsys.readouterr()
    assert "no engine directory" in output.err
    assert output.out == ""

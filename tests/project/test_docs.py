"""The README and the docs: links lead somewhere, what is drawn and quoted is so, the pages build."""

import importlib
import json
import re
import tomllib
import warnings

import ml_dtypes
import pytest

import pagedkv
from pagedkv.bench.gpu.decode_peers import PEERS
from pagedkv.cpu.attention.decode import SPLIT
from pagedkv.cpu.attention.tiles import TILE

from ..docs.browser import browser, find_browser
from ..docs.phone import faults
from .pages import FENCE, PAGES, ROOT, blocks, name


def wide_lines(text):
    """Lines of code that a page does not show whole; what a doctest prints cannot be broken."""
    code = [(language, body) for language, body in FENCE.findall(text) if language in ("python", "py", "sh")]
    lines = [(line, body.startswith(">>>")) for _, body in code for line in body.splitlines()]
    return [line for line, is_doctest in lines if len(line) > 88 and (not is_doctest or line[:4] in (">>> ", "... "))]


@pytest.mark.parametrize("path", PAGES, ids=name)
def test_code_fits_on_a_page(path):
    assert wide_lines(path.read_text()) == []


def test_wide_code_is_noticed():
    assert wide_lines(f"```python\n>>> {'x' * 85}\n{'y' * 89}\n```\n```text\n{'z' * 89}\n```\n") == [f">>> {'x' * 85}"]
    assert wide_lines(f"```python\n{'x' * 89}\n```\n") == ["x" * 89]


def powers(text):
    """Powers and transposes in prose that Markdown leaves as they are, or takes for bold type."""
    return re.findall(r"\w+(?:\*\*|\^)\w+", re.sub(r"`[^`]*`", "", FENCE.sub("", text)))


@pytest.mark.parametrize("path", PAGES, ids=name)
def test_powers_are_raised(path):
    assert powers(path.read_text()) == []


def test_powers_in_prose_are_noticed():
    assert powers("`2**31` and K<sup>T</sup>, not 2**31 or K^T\n```text\n2^8\n```\n") == ["2**31", "K^T"]


def test_readme_has_two_set_up_commands():
    """One installs and runs the main job, the other installs and runs the tests."""
    run, test = blocks(ROOT / "README.md", "sh")
    install = "python3 -m venv .venv && .venv/bin/pip install"
    assert run == f'{install} -e . \\\n  && .venv/bin/python examples/generate.py "def main("\n'
    assert test == f'{install} --no-compile -e ".[test]" \\\n  && .venv/bin/pytest -n auto\n'
    assert (ROOT / "examples" / "generate.py").is_file()
    assert "test" in tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]


KERNELS = ["draw_kernels", "draw_split", "draw_prefill"]
DRAWN = [*KERNELS, "draw_performance", "draw_gpu", "draw_readme", "draw_trace", "record_pool"]


@pytest.mark.parametrize("module", DRAWN)
def test_drawings_are_up_to_date(monkeypatch, module):
    monkeypatch.syspath_prepend(ROOT / "docs" / "scripts")
    for file, draw in importlib.import_module(module).DRAWINGS.items():
        assert (ROOT / "docs" / "images" / file).read_text(encoding="utf-8") == draw(), f"run docs/scripts/{module}.py"


@pytest.mark.parametrize("module", ["draw_performance", "draw_gpu", "draw_trace"])
def test_figures_are_up_to_date(monkeypatch, module):
    monkeypatch.syspath_prepend(ROOT / "docs" / "scripts")
    drawn = importlib.import_module(module)
    pages = "".join(page.read_text(encoding="utf-8") for page in drawn.PAGES)
    assert sorted(match[2] for match in drawn.TABLE.finditer(pages)) == sorted(drawn.TABLES)
    assert drawn.with_tables(pages, drawn.TABLE, drawn.TABLES) == pages, f"run docs/scripts/{module}.py"


def test_decode_on_a_gpu_shows_the_peers_that_were_timed(monkeypatch):
    """Whichever they are; two of them here, the second in one of two cells."""
    monkeypatch.syspath_prepend(ROOT / "docs" / "scripts")
    drawn = importlib.import_module("draw_gpu")
    assert drawn.PEERS.keys() == PEERS.keys() - {"SDPA rows"}
    cell = {"B": 1, "Hq": 4, "Hkv": 1, "D": 64, "L": 9, "P": 16, "q": "float16", "kv": "float16"}
    took = {(9, drawn.DECODE): 8, (9, "vLLM Triton"): 10, (17, drawn.DECODE): 16, (17, "vLLM Triton"): 20}
    took |= {(17, "FlashInfer XQA"): 8, (9, "FlashInfer XQA"): None}
    rows = [
        cell | {"L": n, "subject": subject, "us": us, "GB/s": 1.0, "share": 0.5} for (n, subject), us in took.items()
    ]
    runs = {"gpu-decode": [{"device": "GPU", "read GB/s": 1.0}, *rows]}
    monkeypatch.setattr(drawn, "latest", lambda bench: ({}, runs.get(bench, [])))
    header, _, *lines = [re.split(r" *\| *", line) for line in drawn.decode().splitlines()]
    assert header[8:-1] == ["FlashInfer XQA, times", "vLLM, Triton, times"]
    assert [line[8:-1] for line in lines] == [["-", "1.25"], ["0.50", "1.25"]]
    chart = drawn.chart()
    assert [name in chart for name in ("vLLM, Triton", "FlashInfer XQA", "SDPA")] == [True, True, False]
    assert chart.count("<circle") == 2 + 3


@pytest.mark.usefixtures("without_lines")
def test_notebooks_print_what_is_stored(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "docs" / "scripts")
    notebooks = importlib.import_module("run_notebooks")
    assert [name(path) for path in notebooks.NOTEBOOKS] == ["examples/one_warp.ipynb"]
    for path in notebooks.NOTEBOOKS:
        text = path.read_text(encoding="utf-8")
        assert text.count('"stdout"') > 5
        assert notebooks.with_outputs(text, name(path)) == text, "run docs/scripts/run_notebooks.py"


def test_messages_are_quoted_as_they_are():
    sources = [path.read_text() for path in ROOT.glob("pagedkv/**/*.py")]
    page = (ROOT / "docs" / "devices.md").read_text()
    messages = re.findall(r"^\| `([^`]*)` \|", page.partition("## What you meet")[2], re.MULTILINE)
    assert len(messages) > 10
    for message in messages:
        assert any(message in source for source in sources), message


def test_sums_are_cut_where_the_numerics_page_says():
    page = " ".join((ROOT / "docs" / "numerics.md").read_text().split())
    for words in (
        f"keys come in tiles of {TILE} tokens",
        f"begin anew with every split of {SPLIT} tokens",
        f"Splits and tiles start at multiples of {SPLIT} and {TILE} *tokens of the sequence*",
        f"largest {ml_dtypes.finfo(ml_dtypes.float8_e4m3fn).max:g}) or e5m2 "
        f"(largest finite {ml_dtypes.finfo(ml_dtypes.float8_e5m2).max:g})",
    ):
        assert words in page


def test_what_is_to_be_confirmed_on_a_gpu_can_be_run():
    page = (ROOT / "docs" / "development" / "testing-on-a-gpu.md").read_text()
    listed = page.partition("## What is left to confirm")[2].partition("\n## ")[0]
    commands = re.findall(r'pytest -m gpu (tests/[\w/.]+)(?: -k ("[^"]*"|\w+))?', listed)
    assert len(commands) >= 8
    for where, words in commands:
        path = ROOT / where
        tests = "".join(file.read_text() for file in ([path] if path.is_file() else path.glob("test_*.py")))
        assert tests, where
        for word in set(re.findall(r"\w+", words)) - {"and", "or", "not"}:
            assert word in tests, (where, word)


LINK = re.compile(r"!?\[[^\]]*\]\(([^)\s]+)\)")


def anchors(path):
    """The anchors that GitHub and MyST give to headings."""
    titles = re.findall(r"^#+ (.*)$", FENCE.sub("", path.read_text()), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("path", PAGES, ids=name)
def test_links(path):
    for link in LINK.findall(FENCE.sub("", path.read_text())):
        if link.startswith("https://"):
            continue
        file, _, anchor = link.partition("#")
        target = (path.parent / file).resolve() if file else path
        assert target.is_file(), link
        assert not anchor or anchor in anchors(target), link


def test_readme_says_what_was_measured(monkeypatch):
    """Its figures are those of docs/figures, and its first screen has the chart of them."""
    monkeypatch.syspath_prepend(ROOT / "docs" / "scripts")
    drawn, text = importlib.import_module("draw_readme"), " ".join((ROOT / "README.md").read_text().split())
    assert [words for words in drawn.figures() if words not in text] == []
    before, _, _ = text.partition("```")
    assert "](docs/images/readme.svg)" in before
    assert before.count("* **") == 4


def test_readme_has_every_extra():
    rows = (ROOT / "README.md").read_text().split("| extra | for |\n|---|---|\n")[1].split("\n\n")[0].splitlines()
    extras = [extra for row in rows for extra in re.findall(r"`([^`]*)`", row.split("|")[1])]
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert sorted(extras) == sorted(project["optional-dependencies"])


def test_links_are_found():
    assert "memory.md" in LINK.findall((ROOT / "docs" / "index.md").read_text())
    assert "the-empty-cases" in anchors(ROOT / "docs" / "words.md")


def missing_places(heading, folder, text):
    """Paths in the table under a heading that are not in a folder."""
    table = text.split(f"\n## {heading}\n")[1].split("\n## ")[0].partition("|---|---|")[2]
    places = re.findall(r"`([\w/]+(?:\.py|/))`", table)
    assert places
    return {place for place in places if not (ROOT / folder / place).exists()}


def test_contributing_names_files_that_are_there():
    text = (ROOT / "CONTRIBUTING.md").read_text()
    assert missing_places("Where to look", "pagedkv", text) == set()
    assert missing_places("Where a promise is tested", "tests", text) == set()
    moved = text.replace("memory/pool.py", "memory/pond.py").replace("test_commit.py", "test_comet.py")
    assert missing_places("Where to look", "pagedkv", moved) == {"memory/pond.py"}
    assert missing_places("Where a promise is tested", "tests", moved) == {"test_comet.py"}


def test_every_page_is_in_a_contents_list():
    docs = ROOT / "docs"
    listed = {
        (index.parent.relative_to(docs) / re.sub(r".*<(.*)>", r"\1", entry)).as_posix()
        for index in docs.rglob("index.md")
        for contents in blocks(index, "{toctree}")
        for entry in contents.splitlines()
        if entry and not entry.startswith(":")
    }
    pages = {path.relative_to(docs).with_suffix("").as_posix() for path in PAGES if path.is_relative_to(docs)}
    assert pages - {"index"} == listed


def test_every_public_name_is_in_the_api():
    text = (ROOT / "docs" / "api.md").read_text()
    documented = set(re.findall(r"auto(?:function|class|exception):: (\w+)", text))
    assert set(pagedkv.__all__) <= documented


@pytest.fixture(scope="module")
def tab():
    """A tab of a Chromium for all tests, or nothing."""
    if (path := find_browser()) is None:
        yield None
        return
    with browser(path) as page:
        yield page


SOUGHT = "quickstart benchmark docker gguf llama cpp sglang json tool call lora a100"

# Press the button of the first doctest, and keep what goes to the clipboard.
COPY = """var copied; document.execCommand = () => { copied = String(document.activeElement.value); return true; };
document.querySelector(".highlight-python:has(.gp) button.copybtn").click()"""


def test_build(tmp_path, tab, monkeypatch, capsys):
    """Sphinx builds every page without a warning, and without the network; in a browser each fits a phone.

    In this process, which has imported most of what it looks at.
    """
    for scheme in ("http", "https"):
        monkeypatch.setenv(f"{scheme}_proxy", "http://127.0.0.1:9")
    folders = ["-d", str(tmp_path / "doctrees"), str(ROOT / "docs"), str(tmp_path / "html")]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of Sphinx's own code; what it says of the pages is no Python warning
        built = importlib.import_module("sphinx.cmd.build").build_main(["-W", "--keep-going", "-q", *folders])
    assert built == 0, capsys.readouterr().err
    pages = sorted((tmp_path / "html").rglob("*.html"))
    elsewhere = re.compile(r"<(?:script|link|img|iframe)\b[^>]*\b(?:src|href)=[\"']?(?:https?:)?//[^>]*>")
    assert [found for file in pages for found in elsewhere.findall(file.read_text(encoding="utf-8"))] == []
    if tab is not None:
        assert [fault for file in pages for fault in faults(tab, file)] == []
        tab.open((tmp_path / "html" / "index.html").as_uri())
        tab.run(COPY)
        assert tab.run("copied").replace("\r", "").startswith("def softmax(x):\n    weights = ")
    page = (tmp_path / "html" / "api.html").read_text()
    for public in pagedkv.__all__:
        assert f'id="pagedkv.{public}"' in page
    # napoleon takes what stands before a colon in the first line of a property for its type.
    assert ">Type<" not in page
    # "P." alone is the beginning of a list, and a default that is a class or a function has no repr to type.
    assert re.findall(r'<ol class="\w+alpha|&lt;(?:class|function) ', page) == []
    # Names in single backticks and the drawing of the memory manager.
    assert 'href="#pagedkv.PagedKVCache.reset"' in page
    assert "fork.svg" in (tmp_path / "html" / "memory.html").read_text()
    # The search finds what guests look for, also where the answer is that it is not there.
    index = (tmp_path / "html" / "searchindex.js").read_text(encoding="utf-8")
    found = json.loads(index.removeprefix("Search.setIndex(").removesuffix(")"))["terms"]
    assert SOUGHT.split() == [word for word in SOUGHT.split() if word in found]
    # The interactive page finds its scripts.
    interactive = tmp_path / "html" / "explanation" / "step_by_step.html"
    scripts = re.findall(r'<script defer src="([^"?]*step_by_step/\w+\.js)"', interactive.read_text())
    assert len(scripts) == len([*(ROOT / "docs" / "_static" / "step_by_step").glob("*.js")])
    assert all((interactive.parent / script).is_file() for script in scripts)


DRAWING = (ROOT / "docs" / "images" / "performance.svg").as_uri()


@pytest.mark.skipif(find_browser() is None, reason="no Chromium")
@pytest.mark.parametrize(
    ("body", "fault"),
    [
        ("<p>words", ""),
        ("<div style='overflow-x: auto'><pre style='width: 600px'>scrolls</pre></div>", ""),
        ("<pre style='width: 600px'>code</pre>", "wider than 360 pixels: pre code"),
        ("<article><p>see {func}`decode`</p></article>", "not rendered: see {func}`decode`"),
        ("<img src='nowhere.png'>", "no picture"),
        (f"<article><img width=300 src='{DRAWING}'>", "its words are too small: performance.svg"),
        (f"<article><p style='overflow-x: auto'><img src='{DRAWING}'>", "white in the dark: file:"),
        ("<div style='overflow-x: auto'><article><p style='width: 600px'>cut", "wider than 360 pixels: p cut"),
    ],
)
def test_pages_that_do_not_fit_are_noticed(tmp_path, tab, body, fault):
    file = tmp_path / "page.html"
    file.write_text(f"<!doctype html><meta name=viewport content='width=device-width'><body>{body}")
    found = faults(tab, file)
    assert (fault in found[0]) if fault else found == []

"""The interactive page: its data is what the package does now, its files fit together, and it works in a browser.

Where there is no Chromium, the tests of the browser are skipped and say so; the others need Python alone.
"""

import importlib
import json
import math
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from .browser import Page, browser, find_browser

DOCS = Path(__file__).parents[2] / "docs"
SOURCE = DOCS / "explanation" / "step_by_step.md"
FOLDER = DOCS / "_static" / "step_by_step"
SCRIPT = re.compile(r'<script defer src="\.\./_static/step_by_step/(\w+\.js)"></script>')
RAW = re.compile(r"^```\{raw\} html\n(.*?)^```$|^!\[([^\]]*)\]\(([^)]*)\)$", re.MULTILINE | re.DOTALL)


def data_of(script: str) -> dict:
    """The data of a script that docs/scripts/record_*.py writes."""
    return json.loads(script.partition(" = ")[2].rstrip().removesuffix(";"))


def differences(actual, expected, where="data") -> list[str]:
    """Places where two data differ: floats in more than their fourth digit, anything else at all."""
    if isinstance(expected, dict) and isinstance(actual, dict) and actual.keys() == expected.keys():
        return [x for key in expected for x in differences(actual[key], expected[key], f"{where}.{key}")]
    if isinstance(expected, list) and isinstance(actual, list) and len(actual) == len(expected):
        return [x for i, each in enumerate(expected) for x in differences(actual[i], each, f"{where}[{i}]")]
    if isinstance(expected, float) and isinstance(actual, float):
        return [] if math.isclose(actual, expected, rel_tol=1e-4, abs_tol=1e-6) else [where]
    return [] if actual == expected else [where]


@pytest.mark.usefixtures("without_lines")
@pytest.mark.parametrize("module", ["record_pool", "record_v1"])
def test_recordings_are_up_to_date(monkeypatch, module):
    monkeypatch.syspath_prepend(DOCS / "scripts")
    for file, write in importlib.import_module(module).SCRIPTS.items():
        kept = (FOLDER / file).read_text(encoding="utf-8")
        assert len(kept) < 100_000
        assert differences(data_of(kept), data_of(write())) == [], f"run docs/{module}.py"


@pytest.mark.usefixtures("without_lines")
def test_drawings_of_lanes_are_up_to_date(monkeypatch):
    monkeypatch.syspath_prepend(DOCS / "scripts")
    for file, draw in importlib.import_module("draw_lanes").DRAWINGS.items():
        assert (DOCS / "images" / file).read_text(encoding="utf-8") == draw(), "run docs/scripts/draw_lanes.py"


# -- without a browser
def scripts() -> dict[str, str]:
    """The page's scripts, in the order in which they run."""
    return {file: (FOLDER / file).read_text(encoding="utf-8") for file in SCRIPT.findall(SOURCE.read_text())}


def test_every_file_is_on_the_page():
    text = SOURCE.read_text()
    assert text.count('<link rel="stylesheet" href="../_static/step_by_step/step_by_step.css">') == 1
    assert sorted([*scripts(), "step_by_step.css"]) == sorted(path.name for path in FOLDER.iterdir())


def test_names_are_there_before_they_are_used():
    """A script uses names of those above it, and nothing of the network."""
    seen: set[str] = set()
    for file, text in scripts().items():
        seen |= set(re.findall(r"^(?:const|class|function) (\w+)", text, re.MULTILINE))
        used = set(re.findall(r"\bnew ([A-Z]\w+)|\b([A-Z0-9]+_RUN)\b|\b(element|tableOf|shown|field)\(", text))
        names = {name for match in used for name in match if name} - {"Map", "Set", "View"}
        assert names <= seen, file
        for forbidden in ("fetch(", "import ", "http:", "https:", "innerHTML", "XMLHttpRequest"):
            assert forbidden not in text, file


def test_what_scripts_look_up_is_there():
    page, start, view = SOURCE.read_text(), scripts()["start.js"], scripts()["thread_block_view.js"]
    for place in re.findall(r'\["([\w-]+)", \w+_RUN', start):
        assert page.count(f'id="{place}"') == 1
        assert f'class="still-of-{place}"' in page
    methods = set(re.findall(r"^  (\w+)\([\w, ]*\) \{$", view, re.MULTILINE))
    used = set(re.findall(r"this\.run\.(\w+)", view)) - {"steps"}
    run = data_of(scripts()["v1_run.js"])
    assert used <= set(run)
    assert {step["show"] for step in run["steps"]} <= methods
    for step in [*run["steps"], *data_of(scripts()["pool_run.js"])["steps"]]:
        assert step["why"].endswith(".")
        assert step["what"]


def test_the_still_pictures_are_described():
    pictures = [(words, file) for _, words, file in RAW.findall(SOURCE.read_text()) if file]
    assert len(pictures) == 3
    for words, file in pictures:
        assert len(words) > 40
        assert (SOURCE.parent / file).resolve().is_file()


@pytest.mark.skipif(find_browser() is not None, reason="the browser parses the scripts")
@pytest.mark.skipif(shutil.which("node") is None, reason="no node and no Chromium: nothing here parses the scripts")
def test_scripts_parse():
    program = "for (const file of process.argv.slice(1)) new (require('vm').Script)(fs.readFileSync(file), file)"
    checked = subprocess.run(
        ["node", "-e", program, *(FOLDER / file for file in scripts())], capture_output=True, text=True
    )
    assert checked.returncode == 0, checked.stderr


# -- in a browser
@pytest.fixture(scope="module")
def page(tmp_path_factory) -> Iterator[Page]:
    """A tab, with the page outside of the theme in its window."""
    path = find_browser()
    if path is None:
        pytest.skip("no Chromium: only the structure of the page and its data are checked")
    root = tmp_path_factory.mktemp("html")
    for folder in ("_static", "images"):
        (root / folder).symlink_to(DOCS / folder)
    parts = [raw or f'<p><img alt="{words}" src="{file}"></p>' for raw, words, file in RAW.findall(SOURCE.read_text())]
    head = '<!doctype html><html lang="en"><meta charset="utf-8"><meta name="viewport" content="width=device-width">'
    style = "<style>:root{color-scheme:light dark} img{max-width:100%} *{box-sizing:border-box}</style>"
    (root / "explanation").mkdir()
    file = root / "explanation" / "page.html"
    file.write_text(f"{head}<title>Steps</title>{style}<body>{''.join(parts)}</body></html>", encoding="utf-8")
    with browser(path) as tab:
        tab.url = file.as_uri()
        tab.open(tab.url)
        yield tab


@pytest.fixture(autouse=True)
def no_errors(request) -> Iterator[None]:
    """No script of the page has thrown anything, and nothing failed to load."""
    yield
    if "page" in request.fixturenames and request.node.get_closest_marker("skip") is None:
        assert request.getfixturevalue("page").errors == []


RUNS = {"pool-player": "pool_run.js", "v1-player": "v1_run.js"}


def text_of(page: Page, selector: str) -> str:
    return page.run(f"document.querySelector({selector!r}).textContent")


def choose(page: Page, name: str, value: int | str) -> None:
    """Choose from a list."""
    page.run(
        f"{{const list = document.getElementById('{name}'); list.value = {json.dumps(value)};"
        "list.dispatchEvent(new Event('change'))}"
    )


def at_every_step(page: Page, place: str, expression: str) -> list:
    """The value of JavaScript at each step."""
    return page.run(
        f"(() => {{ const list = document.getElementById('{place}-step'); return [...list.options].map((option) => {{"
        f"list.value = option.value; list.dispatchEvent(new Event('change')); return {expression}; }}); }})()"
    )


@pytest.mark.parametrize("place", RUNS)
def test_every_step_is_reported(page, place):
    steps = data_of(scripts()[RUNS[place]])["steps"]
    parts = f"[...document.querySelectorAll('#{place} .telling p, #{place} .code')].map((each) => each.textContent)"
    told = at_every_step(page, place, parts)
    for number, (step, words) in enumerate(zip(steps, told, strict=True)):
        title = f"Step {number + 1} of {len(steps)}, {step['chapter']}: {step['title']}"
        assert words == ["\n".join((title, step["what"], f"Why: {step['why']}")), step["code"]]


def test_the_pool_is_drawn_as_recorded(page):
    """Words say it all: who has a block, what is in it, and whether it has changed."""
    steps, before = data_of(scripts()["pool_run.js"])["steps"], None
    blocks = (
        "[...document.querySelectorAll('#pool-player .block')].map((block) => [block.querySelector('.owner')"
        ".textContent, [...block.querySelectorAll('.slot:not(.empty)')].map((slot) => slot.textContent), block"
        ".querySelector('.news').textContent, block.matches('.changed')])"
    )
    rows = "document.querySelectorAll('#pool-player tbody tr').length"
    for step, (drawn, num_rows) in zip(steps, at_every_step(page, "pool-player", f"[{blocks}, {rows}]"), strict=True):
        assert num_rows == len(step["tables"]) + len(step["requests"])
        for i, ((owner, words, news, is_marked), block) in enumerate(zip(drawn, step["blocks"], strict=True)):
            owners = " and ".join(block["owners"]) + (", shared" if len(block["owners"]) > 1 else "")
            assert owner == (owners or block["kind"])
            assert words == block["words"]
            changed = before is not None and any(
                block[x] != before["blocks"][i][x] for x in ("kind", "owners", "words")
            )
            assert (news == "changed") == is_marked == changed
        before = step


def test_every_lane_of_every_chunk_is_drawn(page):
    wrong = page.run(
        "(() => { const wrong = [], all = (id) => [...document.getElementById(id).options].map((each) => each.value);"
        "const choose = (id, value) => { const list = document.getElementById(id); list.value = value; "
        "list.dispatchEvent(new Event('change')); };"
        "for (const step of all('v1-player-step')) { choose('v1-player-step', step);"
        "for (const chunk of all('v1-player-chunk')) for (const lane of [0, 31]) {"
        "choose('v1-player-chunk', chunk); choose('v1-player-lane', lane);"
        "const text = document.querySelector('#v1-player .state').textContent;"
        "if (/undefined|NaN|null|object/.test(text) || text.length < 60) wrong.push([step, chunk, lane, text]); } }"
        "return wrong; })()"
    )
    assert wrong == []


# Keep each change of a live region: its text, and how many elements or texts came into it.
WATCH = """{ globalThis.said = []; new MutationObserver((records) => said.push(...records
  .map(({ target, addedNodes }) => [target.closest("[aria-live=polite]"), addedNodes.length])
  .filter(([region]) => region).map(([region, count]) => [region.textContent, count])))
  .observe(document.body, { childList: true, subtree: true }); }"""
SAID = "new Promise((done) => setTimeout(() => done(said.splice(0))))"


@pytest.mark.parametrize("place", [*RUNS, "pool-play"])
def test_a_step_is_said_in_one_go(page, place):
    """Nothing while the page loads, then one change of one live region for each step; the focus stays."""
    page.open(page.url)
    loaded = page.run("performance.getEntriesByType('resource').map((each) => each.name)")
    assert all(url.startswith("file://") for url in loaded)
    assert page.run("document.querySelectorAll('[aria-live]:not([aria-live=off])').length") == 0
    button = "Add" if place == "pool-play" else "Next"
    page.run(f"[...document.querySelectorAll('#{place} button')].find((x) => x.textContent === '{button}').focus()")
    telling = f"document.querySelector('#{place} .telling')"
    assert page.run(f"[{telling}.ariaLive, {telling}.ariaAtomic]") == ["polite", "true"]
    page.run(WATCH)
    for _ in range(6):
        page.press("Enter")
        assert page.run(SAID) == [[page.run(f"{telling}.textContent"), 1]]
        assert page.run("document.activeElement.textContent") == button
    # An element with a role would be said apart.
    roles = {role for role, _ in page.spoken(f"#{place} .telling")}
    assert roles <= {"generic", "paragraph", "StaticText", "InlineTextBox"}


def test_fits_a_phone(page):
    page.width(360, 740)
    for place in RUNS:
        widths = at_every_step(page, place, "[document.documentElement.scrollWidth, window.innerWidth]")
        assert widths == [[360, 360]] * len(widths)
    page.width(1280)


def test_without_scripts(page):
    """It says what is missing, and shows pictures, which are hidden where the steps are."""
    seen = "[...document.querySelectorAll('img')].map((each) => each.checkVisibility())"
    missing = "document.body.innerText.split('The steps are missing').length - 1"
    assert (page.run(seen), page.run(missing)) == ([False] * 3, 0)
    page.scripts(False)
    try:
        page.open(page.url)
        assert (page.run(seen), page.run(missing)) == ([True] * 3, 2)
    finally:
        page.scripts(True)
        page.open(page.url)

"""What is wrong with a page on a phone: too wide, too small to read, white in the dark, or not rendered."""

from __future__ import annotations

from pathlib import Path
from urllib.parse import unquote, urlsplit

from .browser import Page

WIDTH = 360
# Elements that end right of the window, but for those in a box of the article that scrolls, and for menus that wait
# outside of it.
WIDE = """(() => { const scrolls = (each) => {
  for (let box = each; box && box !== document.body && !box.querySelector("article"); box = box.parentElement) {
    const { overflowX, position } = getComputedStyle(box);
    if (position === "fixed" || (box !== each && overflowX !== "visible")) return true;
  } return false; };
return [...document.body.querySelectorAll("*")].filter((each) => each.getBoundingClientRect().width
  && each.getBoundingClientRect().right > document.documentElement.clientWidth + 1 && !scrolls(each))
  .map((each) => `${each.tagName.toLowerCase()} ${each.textContent.trim().slice(0, 40)}`); })()"""
# Roles, directives and code that Markdown or reStructuredText left as they are.
RAW = r"""(() => { const raw = /`|\]\(|:(func|class|meth|mod|ref|doc|py:\w+):/;
const words = (each) => { const copy = each.cloneNode(true);
  copy.querySelectorAll("pre, code, .math, li, p, td").forEach((x) => x.remove()); return copy.textContent; };
return [...document.querySelectorAll("article :is(p, li, td)")].map(words).filter((x) => raw.test(x)); })()"""
SMALL = """[...document.querySelectorAll("article img")]
  .filter((x) => x.clientWidth && x.clientWidth < 0.9 * x.naturalWidth).map((x) => x.src.split("/").at(-1))"""

UNTURNED = """[...document.querySelectorAll("article img[src$='.svg']")]
  .filter((x) => x.clientWidth && getComputedStyle(x).filter === "none").map((x) => x.src)"""


def is_for_the_dark(drawing: str) -> bool:
    """Whether a drawing has colours of its own for dark pages."""
    return "prefers-color-scheme" in Path(unquote(urlsplit(drawing).path)).read_text(encoding="utf-8")


def faults(page: Page, file: Path) -> list[str]:
    """What is wrong with a built page on a phone, in the dark."""
    page.prefer(prefers_color_scheme="dark")
    page.width(WIDTH, 740)
    page.open(file.as_uri())
    found = [f"{file.name}: wider than {WIDTH} pixels: {each}" for each in page.run(WIDE)[:3]]
    if (width := page.run("document.documentElement.scrollWidth")) > WIDTH:
        found.append(f"{file.name}: the page is {width} pixels wide")
    found += [f"{file.name}: not rendered: {text[:60]}" for text in page.run(RAW)[:3]]
    found += [f"{file.name}: its words are too small: {drawing}" for drawing in page.run(SMALL)]
    white = [url for url in page.run(UNTURNED) if not is_for_the_dark(url)]
    found += [f"{file.name}: white in the dark: {url}" for url in white]
    missing = "[...document.images].filter((x) => x.complete && !x.naturalWidth && x.src).map((x) => x.src)"
    return found + [f"{file.name}: no picture {url}" for url in page.run(missing)]

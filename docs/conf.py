"""Settings of Sphinx; build with ``sphinx-build -W docs docs/_build``. Nothing is fetched while it runs."""

import re
from importlib.metadata import version as version_of
from typing import Any

project = "pagedkv"
author = "The pagedkv authors"
copyright = "2026, The pagedkv authors"
release = version = version_of("pagedkv")

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx_copybutton"]
exclude_patterns = ["_build"]

html_theme = "furo"
html_static_path = ["_static"]
html_title = f"pagedkv {release}"
html_css_files = ["pages.css"]
# Drawings on white turn over in the dark, and keep their hues.
html_theme_options = {"dark_css_variables": {"drawing-filter": "invert(.93) hue-rotate(180deg)"}}
pygments_dark_style = "github-dark"
# A literalinclude up to the next function would end with empty lines.
highlight_options = {"python": {"stripnl": True}}

# What a button copies can be pasted: no prompts, and not what they print.
copybutton_exclude = ".linenos, .gp, .go"

myst_heading_anchors = 3

autodoc_typehints = "none"
autodoc_member_order = "bysource"
autodoc_class_signature = "mixed"
napoleon_google_docstring = False
# Types are shapes in words: as fields of Sphinx every word of them would be looked up as a class.
napoleon_use_param = False
napoleon_custom_sections = [("Attributes", "params_style")]
napoleon_use_rtype = False

# Names in single backticks link where they are public objects; parameters and shapes stay as they are.
default_role = "py:obj"
nitpicky = True
nitpick_ignore_regex = [("py:class", r"(?!pagedkv\.).*"), ("py:obj", r"(?!pagedkv\.).*")]


def unnumber_references(_app: Any, _what: str, _name: str, _object: Any, _options: Any, lines: list[str]) -> None:
    """Make list items of the footnotes under References: several functions on a page have a [1]."""
    lines[:] = [re.sub(r"^\.\. \[\d+\] ", "* ", line) for line in lines]


def name_defaults(
    _app: Any, _what: str, _name: str, _object: Any, _options: Any, signature: str | None, returns: Any
) -> Any:
    """Say ``eviction=LRU``, without the angle brackets of its repr."""
    return signature and re.sub(r"<(?:class|function) '?(?:\w+\.)*(\w+)'?>", r"\1", signature), returns


def setup(app: Any) -> None:
    app.connect("autodoc-process-signature", name_defaults)
    app.connect("autodoc-process-docstring", unnumber_references)

"""The README and the pages of the docs, and what stands between their fences."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
GUIDES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md", ROOT / "SECURITY.md"]
PAGES = [*GUIDES, *sorted(path for path in ROOT.glob("docs/**/*.md") if "_build" not in path.parts)]
# MyST's directives ({toctree}) and every language: the word behind the fence, and what is between the fences.
FENCE = re.compile(r"^```(\S*)[^\n]*\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def name(path):
    return path.relative_to(ROOT).as_posix()


def blocks(path, language):
    return [body for found, body in FENCE.findall(path.read_text()) if found == language]

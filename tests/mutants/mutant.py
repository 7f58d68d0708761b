"""What a mutant is: a small wrong change to the package, and the test that must notice it."""

from dataclasses import dataclass
from pathlib import Path


def sources(package: Path) -> dict[Path, str]:
    """The text of every module of a package."""
    return {path: path.read_text() for path in package.rglob("*.py")}


@dataclass(frozen=True)
class Mutant:
    """A wrong change.

    Attributes
    ----------
    name : str
        The bug.
    old, new : str
        The text to replace, which occurs exactly once in pagedkv/, and what replaces it.
    test : str
        What pytest runs, and what must fail: a test, a class of tests or a file.
    """

    name: str
    old: str
    new: str
    test: str

    def files(self, texts: dict[Path, str]) -> list[Path]:
        """The files that have the old text, each as often as it occurs there."""
        return [path for path, text in texts.items() for _ in range(text.count(self.old))]

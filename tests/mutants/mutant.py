"""What a mutant is: a small wrong change to the package, and the tests that must notice it."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Mutant:
    """A wrong change.

    Attributes
    ----------
    name : str
        What is wrong.
    file : str
        Where, relative to pagedkv.
    old, new : str
        The text to replace, which occurs exactly once in the file, and what replaces it.
    tests : tuple of str
        Arguments of pytest: tests of which at least one must fail.
    ci : bool
        Whether CI runs it, too: it has no time for all of them.
    """

    name: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]
    ci: bool = False

"""A table of a number that was found by trying: conditions, values and reasons."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

Subject = TypeVar("Subject")


@dataclass(frozen=True, slots=True)
class Row(Generic[Subject]):
    """A condition, the limit where it holds, and what was seen without it."""

    when: Callable[[Subject], bool]
    value: int
    why: str


@dataclass(frozen=True, slots=True)
class Limit(Generic[Subject]):
    """Rows, the most particular ones first; the last one always applies.

    Attributes
    ----------
    meaning : str
        What the value is.
    rows : tuple of Row
    """

    meaning: str
    rows: tuple[Row[Subject], ...]

    def row(self, subject: Subject) -> Row[Subject]:
        """The first row that applies."""
        return next(row for row in self.rows if row.when(subject))

    def __call__(self, subject: Subject) -> int:
        return self.row(subject).value


def otherwise(_: object) -> bool:
    """The condition of a last row."""
    return True

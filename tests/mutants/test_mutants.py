"""The mutants keep up with the code: a stale one shows without a run."""

from .__main__ import MUTANTS, stale
from .mutant import Mutant


def test_every_mutant_can_be_applied():
    assert stale(MUTANTS) == []


def test_stale_mutants_are_told():
    gone = Mutant("of a text that is gone", "memory/pool.py", "no such text", "", ())
    twice = Mutant("of two texts", "memory/pool.py", "import ", "", ())
    assert [line.split(": ")[0] for line in stale([gone, twice, twice])] == [
        "STALE     of a text that is gone",
        *["STALE     of two texts"] * 4,
    ]

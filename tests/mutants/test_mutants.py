"""The mutants keep up with the code and with the tests: a stale one shows without a run."""

import re

from .__main__ import MUTANTS, stale
from .mutant import Mutant
from .mutant_run import ROOT


def test_every_mutant_can_be_applied():
    assert stale(MUTANTS) == []


def test_stale_mutants_are_told():
    gone = Mutant("of a text that is gone", "memory/pool.py", "no such text", "", ())
    twice = Mutant("of two texts", "memory/pool.py", "import ", "", ())
    assert [line.split(": ")[0] for line in stale([gone, twice, twice])] == [
        "STALE     of a text that is gone",
        *["STALE     of two texts"] * 4,
    ]


def test_every_test_that_a_mutant_names_exists():
    """But for what is in brackets, which only a run of the mutant looks at."""
    named = {test.partition("[")[0] for mutant in MUTANTS for test in mutant.tests}
    texts = {file: (ROOT / file).read_text() for file in {test.partition("::")[0] for test in named}}
    for test in named:
        file, *names = test.split("::")
        for name in names:
            assert re.search(rf"^ *(def|class) {name}\b|^{name} = ", texts[file], re.MULTILINE), test

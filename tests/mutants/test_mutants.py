"""The mutants keep up with the code and with the tests: a stale one shows without a run."""

import ast
import builtins
import re

from .__main__ import MUTANTS, stale
from .mutant import Mutant, sources
from .mutant_run import ROOT


def test_every_mutant_can_be_applied():
    assert stale(MUTANTS) == []


def test_stale_mutants_are_reported():
    gone = Mutant("of a text that is gone", "no such text", "", "")
    twice = Mutant("of two texts", "import ", "", "")
    assert [line.split(": ")[0] for line in stale([gone, twice, twice])] == [
        "STALE     of a text that is gone",
        *["STALE     of two texts"] * 4,
    ]


def wrong_names(text):
    """The names that a module reads and neither binds anywhere nor has from Python; or why it is no module."""
    try:
        nodes = list(ast.walk(ast.parse(text)))
    except SyntaxError as error:
        return {str(error)}
    names = [node for node in nodes if isinstance(node, ast.Name)]
    bound = {name.id for name in names if not isinstance(name.ctx, ast.Load)} | set(vars(builtins)) | {"__file__"}
    bound |= {node.arg for node in nodes if isinstance(node, ast.arg)}
    bound |= {(node.asname or node.name).partition(".")[0] for node in nodes if isinstance(node, ast.alias)}
    kinds = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.ExceptHandler
    bound |= {node.name for node in nodes if isinstance(node, kinds)}
    return {name.id for name in names} - bound


def test_every_mutant_is_a_module_that_has_its_names():
    """Else it would say nothing about its tests, and only a run of it would tell."""
    wrong = {}
    texts = sources(ROOT / "pagedkv")
    for mutant in MUTANTS:
        [path] = mutant.files(texts)
        if names := wrong_names(texts[path].replace(mutant.old, mutant.new)):
            wrong[mutant.name] = names
    assert wrong == {}


def test_wrong_names_are_told():
    module = "import a.b, c as d\ndef f(x):\n    y = x + len(d)\n    {}return a + y + e"
    assert wrong_names(module.format("")) == {"e"}
    assert wrong_names(module.format("e = ")) == {"invalid syntax (<unknown>, line 4)"}
    assert wrong_names(module.format("e = 1; ")) == set()
    assert wrong_names(module.format(" ")) == {"unexpected indent (<unknown>, line 4)"}


def test_every_test_that_a_mutant_names_exists():
    """But for what is in brackets, which only a run of the mutant looks at."""
    named = {mutant.test.partition("[")[0] for mutant in MUTANTS}
    texts = {file: (ROOT / file).read_text() for file in {test.partition("::")[0] for test in named}}
    for test in named:
        file, *names = test.split("::")
        for name in names:
            assert re.search(rf"^ *(def|class) {name}\b|^{name} = ", texts[file], re.MULTILINE), test

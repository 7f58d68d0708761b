"""The command line."""

from .mutant import Mutant

MAIN = ("tests/test_main.py",)

MUTANTS = [
    Mutant(
        "options of other benches are ignored",
        "__main__.py",
        "_parser(chosen, module).parse_args(words)",
        "_parser(chosen, module).parse_known_args(words)[0]",
        MAIN,
    ),
    Mutant(
        "one bench imports another",
        "bench/memory.py",
        "from .report import Row, median, spread\n",
        "from .emulated import emulated_on\nfrom .report import Row, median, spread\n",
        MAIN,
    ),
]

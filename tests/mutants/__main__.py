"""A test of the tests: every mutant must make one of its tests fail.

    python -m tests.mutants [--all] [part of a name]

Without --all only the mutants marked `ci` run: CI has no time for all of them. Each one is applied to a copy of
pagedkv/, which is what its tests import; kernels that it does not change come from PAGEDKV_CACHE_DIR, if that is set.
The tests that fail then run once more without a mutant. Exits with 1 if a mutant survives or does not compile, or what
caught it does not pass without it; before that, if the text of any mutant, marked or not, is stale.
"""

import os
import re
import shutil
import sys
import tempfile
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from importlib import import_module
from itertools import groupby
from multiprocessing import get_context
from pathlib import Path

from .mutant import Mutant
from .mutant_run import ROOT, import_libraries, run_tests

SUBJECTS = sorted(
    path for path in Path(__file__).parent.rglob("[a-z]*.py") if not path.stem.startswith(("mutant", "test_"))
)
MUTANTS = [
    mutant
    for subject in SUBJECTS
    for mutant in import_module(".".join(subject.relative_to(ROOT).with_suffix("").parts)).MUTANTS
]

PROCESSES = 2
PASSED, FAILED = 0, 1
COMPILE_ERROR = "core.errors.TypingError"  # numba's: the mutant says nothing about the tests


def verdict(mutant: Mutant, compiled: Path) -> tuple[tuple[str, ...], str]:
    """The tests that caught the mutant, all of its own if it is unknown which, and a line that says how."""
    status, output = run_tests(mutant, mutant.tests, compiled)
    if status == PASSED:
        return (), f"SURVIVED  {mutant.name}"
    if status is not None and status < 0:
        return mutant.tests, f"caught    {mutant.name}  (killed by signal {-status})"
    if status not in (FAILED, None):
        return (), f"BROKEN    {mutant.name}: pytest exited with {status}\n{output}"
    if COMPILE_ERROR in output:
        return (), f"BROKEN    {mutant.name}: it does not compile\n{output}"
    if status is None:
        return mutant.tests, f"caught    {mutant.name}  (taking too long)"
    failed = re.search(r"^(?:FAILED|ERROR) (tests/.+?)(?: - |$)", output, re.MULTILINE)
    if not failed:
        return (), f"BROKEN    {mutant.name}: no test failed\n{output}"
    return (failed[1],), f"caught    {mutant.name}  ({failed[1]})"


def by_file(tests: set[str]) -> list[tuple[str, ...]]:
    """Tests, those of each file together."""
    return [tuple(those) for _, those in groupby(sorted(tests), lambda test: test.partition("::")[0])]


def stale(mutants: list[Mutant]) -> list[str]:
    """A line for each mutant whose text does not occur exactly once in its file, or whose name another one has."""
    lines = []
    names = Counter(mutant.name for mutant in mutants)
    for mutant in mutants:
        occurrences = (ROOT / "pagedkv" / mutant.file).read_text().count(mutant.old)
        if occurrences != 1:
            lines.append(f"STALE     {mutant.name}: its text occurs {occurrences} times in {mutant.file}")
        if names[mutant.name] != 1:
            lines.append(f"STALE     {mutant.name}: {names[mutant.name]} mutants have this name")
    return lines


def main() -> int:
    if lines := stale(MUTANTS):
        print("\n".join(lines))
        return 1
    part = " ".join(argument for argument in sys.argv[1:] if argument != "--all")
    mutants = [mutant for mutant in MUTANTS if part in mutant.name and (mutant.ci or "--all" in sys.argv)]
    if not mutants:
        print("no such mutant")
        return 1
    import_libraries()
    with (
        tempfile.TemporaryDirectory() as directory,
        ProcessPoolExecutor(PROCESSES, get_context("fork")) as executor,
    ):
        compiled = Path(directory, "compiled")
        compiled.mkdir()
        kept = os.environ.get("PAGEDKV_CACHE_DIR")
        if kept and Path(kept).is_dir():
            shutil.copytree(kept, compiled, dirs_exist_ok=True)
        num_caught, catching = 0, set()
        for caught_by, line in executor.map(partial(verdict, compiled=compiled), mutants):
            print(line, flush=True)
            num_caught += bool(caught_by)
            catching.update(caught_by)
        print(f"{num_caught} of {len(mutants)} caught", flush=True)
        for status, output in executor.map(partial(run_tests, None, compiled=compiled), by_file(catching)):
            if status != PASSED:
                print(f"the tests do not pass without a mutant\n{output}")
                return 1
    return 0 if num_caught == len(mutants) else 1


if __name__ == "__main__":
    sys.exit(main())

"""A test of the tests: every mutant must make its test fail.

    python -m tests.mutants [part of a name]

Each mutant is applied to a copy of pagedkv/, which its test imports; kernels that it does not change come from
PAGEDKV_CACHE_DIR, if that is set. The tests that fail then run once more without a mutant. The command exits with 1 if
a mutant survives or does not compile, if a test that caught one fails without it, or, before any run, if the text of a
mutant is stale.
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

from .mutant import Mutant, sources
from .mutant_run import ROOT, import_libraries, run_tests

SUBJECTS = sorted(
    path.stem for path in Path(__file__).parent.glob("[a-z]*.py") if not path.stem.startswith(("mutant", "test_"))
)
MUTANTS = [mutant for subject in SUBJECTS for mutant in import_module(f"tests.mutants.{subject}").MUTANTS]

PROCESSES = 2
PASSED, FAILED = 0, 1
COMPILE_ERROR = "core.errors.TypingError"  # numba's: the mutant says nothing about the tests


def verdict(mutant: Mutant, compiled: Path) -> tuple[str | None, str]:
    """Return the test that caught the mutant, or None, and a line that says how."""
    status, output = run_tests(mutant, (mutant.test,), compiled)
    if status == PASSED:
        return None, f"SURVIVED  {mutant.name}"
    if status is not None and status < 0:
        return mutant.test, f"caught    {mutant.name}  (killed by signal {-status})"
    if status not in (FAILED, None):
        return None, f"BROKEN    {mutant.name}: pytest exited with {status}\n{output}"
    if COMPILE_ERROR in output:
        return None, f"BROKEN    {mutant.name}: it does not compile\n{output}"
    if status is None:
        return mutant.test, f"caught    {mutant.name}  (taking too long)"
    failed = re.search(r"^(?:FAILED|ERROR) (tests/.+?)(?: - |$)", output, re.MULTILINE)
    if not failed:
        return None, f"BROKEN    {mutant.name}: no test failed\n{output}"
    return failed[1], f"caught    {mutant.name}  ({failed[1]})"


def by_file(tests: set[str]) -> list[tuple[str, ...]]:
    """Tests, those of each file together."""
    return [tuple(those) for _, those in groupby(sorted(tests), lambda test: test.partition("::")[0])]


def stale(mutants: list[Mutant]) -> list[str]:
    """A line for each mutant whose text does not occur exactly once, or whose name another one has."""
    lines = []
    texts = sources(ROOT / "pagedkv")
    names = Counter(mutant.name for mutant in mutants)
    for mutant in mutants:
        occurrences = len(mutant.files(texts))
        if occurrences != 1:
            lines.append(f"STALE     {mutant.name}: its text occurs {occurrences} times in pagedkv/")
        if names[mutant.name] != 1:
            lines.append(f"STALE     {mutant.name}: {names[mutant.name]} mutants have this name")
    return lines


def main() -> int:
    if lines := stale(MUTANTS):
        print("\n".join(lines))
        return 1
    part = " ".join(sys.argv[1:])
    mutants = [mutant for mutant in MUTANTS if part in mutant.name]
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
            if caught_by:
                num_caught += 1
                catching.add(caught_by)
        print(f"{num_caught} of {len(mutants)} caught", flush=True)
        for status, output in executor.map(partial(run_tests, None, compiled=compiled), by_file(catching)):
            if status != PASSED:
                print(f"the tests do not pass without a mutant\n{output}")
                return 1
    return 0 if num_caught == len(mutants) else 1


if __name__ == "__main__":
    sys.exit(main())

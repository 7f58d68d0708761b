"""A test of the tests: every mutant must make one of its tests fail.

    python -m tests.mutants [--all] [part of a name]

Without --all only the mutants marked `ci` run: CI has no time for all of them. Each one is applied to a copy of src/,
which is what its tests import. Exits with 1 if one survives or does not compile, or its tests do not pass without it;
before that, if the text of any mutant, marked or not, is stale.
"""

import os
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from importlib import import_module
from pathlib import Path

from .mutant import Mutant

ROOT = Path(__file__).parents[2]
SUBJECTS = sorted(
    path for path in Path(__file__).parent.rglob("[a-z]*.py") if not path.stem.startswith(("mutant", "test_"))
)
MUTANTS = [
    mutant
    for subject in SUBJECTS
    for mutant in import_module(".".join(subject.relative_to(ROOT).with_suffix("").parts)).MUTANTS
]

PROCESSES = 2
TIMEOUT_S = 300
PASSED, FAILED = 0, 1
COMPILE_ERROR = "core.errors.TypingError"  # numba's: the mutant says nothing about the tests
# Runs inside of pytest, before any test. The copy is what is tested, though the package may be installed too; the
# examples are the same every time, and a failing one is reported without looking for the smallest.
PLUGIN = """
from pathlib import Path
from hypothesis import HealthCheck, Phase, settings
import pagedkv
assert Path(pagedkv.__file__).is_relative_to({src!r}), pagedkv.__file__
settings.register_profile(
    "mutants",
    derandomize=True,
    database=None,
    deadline=None,
    max_examples=50,
    phases=[Phase.explicit, Phase.generate],
    suppress_health_check=list(HealthCheck),
)
"""
OPTIONS = ("-q", "-x", "-m", "", "-p", "no:cacheprovider", "-p", "mutants_plugin", "--hypothesis-profile=mutants")


def run_tests(mutant: Mutant | None, tests: tuple[str, ...], compiled: Path, *options: str) -> tuple[int | None, str]:
    """The exit status of pytest on a copy with the mutant, None if it took too long, and what it printed.

    Without a mutant the kernels that the tests compile are kept in `compiled`; each mutant has a copy of them.
    """
    with tempfile.TemporaryDirectory() as directory:
        src = Path(directory, "src").resolve()
        shutil.copytree(ROOT / "src", src)  # with its bytecode, which a file that is changed does not use
        if mutant:
            path = src / "pagedkv" / mutant.file
            path.write_text(path.read_text().replace(mutant.old, mutant.new))
            compiled = shutil.copytree(compiled, Path(directory, "compiled"))
        Path(directory, "mutants_plugin.py").write_text(PLUGIN.format(src=str(src)))
        environment = os.environ | {
            "PYTHONPATH": os.pathsep.join([str(src), directory]),
            "PYTHONDONTWRITEBYTECODE": "1",
            "PAGEDKV_CACHE_DIR": str(compiled),
        }
        command = [sys.executable, "-m", "pytest", *OPTIONS, *options, *tests]
        try:
            done = subprocess.run(command, cwd=ROOT, env=environment, timeout=TIMEOUT_S, text=True, capture_output=True)
        except subprocess.TimeoutExpired:
            return None, ""
        return done.returncode, done.stdout + done.stderr


def verdict(mutant: Mutant, compiled: Path) -> tuple[bool, str]:
    """Whether the mutant was caught, and a line that says how."""
    status, output = run_tests(mutant, mutant.tests, compiled)
    if status == PASSED:
        return False, f"SURVIVED  {mutant.name}"
    if status is not None and status < 0:
        return True, f"caught    {mutant.name}  (killed by signal {-status})"
    if status not in (FAILED, None):
        return False, f"BROKEN    {mutant.name}: pytest exited with {status}\n{output}"
    if COMPILE_ERROR in output:
        return False, f"BROKEN    {mutant.name}: it does not compile\n{output}"
    failed = [line for line in output.splitlines() if line.startswith("FAILED")]
    by = failed[0].removeprefix("FAILED ").split(" - ")[0] if failed else "taking too long"
    return True, f"caught    {mutant.name}  ({by})"


def stale(mutants: list[Mutant]) -> list[str]:
    """A line for each mutant whose text does not occur exactly once in its file, or whose name another one has."""
    lines = []
    names = Counter(mutant.name for mutant in mutants)
    for mutant in mutants:
        occurrences = (ROOT / "src" / "pagedkv" / mutant.file).read_text().count(mutant.old)
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
    tests = tuple(dict.fromkeys(test for mutant in mutants for test in mutant.tests))
    with tempfile.TemporaryDirectory() as directory:
        compiled = Path(directory)
        status, output = run_tests(None, tests, compiled, "-n", str(PROCESSES))
        if status != PASSED:
            print(f"the tests do not pass without a mutant\n{output}")
            return 1
        num_caught = 0
        with ThreadPoolExecutor(PROCESSES) as executor:
            for caught, line in executor.map(partial(verdict, compiled=compiled), mutants):
                print(line, flush=True)
                num_caught += caught
    print(f"{num_caught} of {len(mutants)} caught")
    return 0 if num_caught == len(mutants) else 1


if __name__ == "__main__":
    sys.exit(main())

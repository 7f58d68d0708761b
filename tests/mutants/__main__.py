"""A test of the tests: every mutant must make one of its tests fail.

    python -m tests.mutants [--all] [part of a name]

Without --all only those of the allocator and the ones of the CUDA kernels that matter most are run: CI has no time for
all of them. Each mutant is applied to a copy of src/, which is what its tests import. Exits with 1 if one survives,
cannot be applied or compiled, or its tests do not pass without it.
"""

import os
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from importlib import import_module
from pathlib import Path

from .mutant import Mutant

ROOT = Path(__file__).parents[2]
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
OPTIONS = ("-q", "-x", "-p", "no:cacheprovider", "-p", "mutants_plugin", "--hypothesis-profile=mutants")


def run_tests(mutant: Mutant | None, tests: tuple[str, ...], *options: str) -> tuple[int | None, str]:
    """The exit status of pytest on a copy with the mutant, None if it took too long, and what it printed."""
    with tempfile.TemporaryDirectory() as directory:
        src = Path(directory, "src").resolve()
        shutil.copytree(ROOT / "src", src, ignore=shutil.ignore_patterns("__pycache__"))
        if mutant:
            path = src / "pagedkv" / mutant.file
            path.write_text(path.read_text().replace(mutant.old, mutant.new))
        Path(directory, "mutants_plugin.py").write_text(PLUGIN.format(src=str(src)))
        environment = os.environ | {
            "PYTHONPATH": os.pathsep.join([str(src), directory]),
            "PYTHONDONTWRITEBYTECODE": "1",
            "PAGEDKV_CACHE_DIR": directory,
        }
        command = [sys.executable, "-m", "pytest", *OPTIONS, *options, *tests]
        try:
            done = subprocess.run(command, cwd=ROOT, env=environment, timeout=TIMEOUT_S, text=True, capture_output=True)
        except subprocess.TimeoutExpired:
            return None, ""
        return done.returncode, done.stdout + done.stderr


def verdict(mutant: Mutant) -> tuple[bool, str]:
    """Whether the mutant was caught, and a line that says how."""
    occurrences = (ROOT / "src" / "pagedkv" / mutant.file).read_text().count(mutant.old)
    if occurrences != 1:
        return False, f"STALE     {mutant.name}: its text occurs {occurrences} times in {mutant.file}"
    status, output = run_tests(mutant, mutant.tests)
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


def collect(part: str, names: tuple[str, ...]) -> list[Mutant]:
    """The mutants of these modules with `part` in their names."""
    modules = [import_module(f"{__package__}.{name}") for name in names]
    mutants = [mutant for module in modules for mutant in module.MUTANTS]
    assert len({mutant.name for mutant in mutants}) == len(mutants), "two mutants of one name"
    return [mutant for mutant in mutants if part in mutant.name]


def main() -> int:
    arguments = [argument for argument in sys.argv[1:] if argument != "--all"]
    more = ("kernels", "device_more", "split_more") if "--all" in sys.argv else ()
    names = ("allocator", "device", "split", *more)
    mutants = collect(" ".join(arguments), names)
    if not mutants:
        print("no such mutant")
        return 1
    tests = tuple(dict.fromkeys(test for mutant in mutants for test in mutant.tests))
    status, output = run_tests(None, tests, "-n", str(PROCESSES))
    if status != PASSED:
        print(f"the tests do not pass without a mutant\n{output}")
        return 1
    num_caught = 0
    with ThreadPoolExecutor(PROCESSES) as executor:
        for caught, line in executor.map(verdict, mutants):
            print(line, flush=True)
            num_caught += caught
    print(f"{num_caught} of {len(mutants)} caught")
    return 0 if num_caught == len(mutants) else 1


if __name__ == "__main__":
    sys.exit(main())

"""Runs on a GPU that is there for minutes: ``.ci/gpu first`` and ``.ci/gpu second``, which sets up what they need.

The first says whether kernels load, are right, and how fast they are; its machine code is for the second, which tests
and measures all the rest. With ``--dry`` both take every step without a GPU: the emulator's side of each test, and
benches that say what they lack.
"""

from __future__ import annotations

import argparse
import os
import shlex
import sys
import tarfile
import tempfile
from collections.abc import Sequence
from datetime import date
from pathlib import Path

from . import results
from .steps import Run, Step

CARRIED = Path(".gpu")  # what is taken along; ignored by git
KERNELS = "kernels"
# What a test may take, the compilation of its kernel included.
TEST_SECONDS = 90
USUAL = "not long and not late"
RACES = "compute-sanitizer --tool racecheck --error-exitcode 1 --kernel-name kns=pagedkv_"
COUNTERS = (
    "ncu --clock-control none --set full --kernel-name regex:^pagedkv_{}$ --launch-skip 1 --launch-count 1 --kill yes"
)
ENVIRONMENT = """
import sys, torch
from pagedkv.compiler.link import compiler
print(compiler(), "torch", torch.__version__)
if "--dry" not in sys.argv:
    from pagedkv.cuda.driver import capabilities
    print(torch.cuda.get_device_name(), capabilities())
"""


def python(*args: str) -> list[str]:
    return [sys.executable, *args]


def bench(name: str, *groups: str, subjects: Sequence[str]) -> list[str]:
    return python("-m", "pagedkv", "bench", name, "--json", "--only", *groups, "--subjects", *subjects)


class Commands:
    """The commands of steps on a GPU, or without one."""

    def __init__(self, is_dry: bool) -> None:
        self.is_dry, self.dry = is_dry, ["--dry"] if is_dry else []

    def environment(self) -> Step:
        return Step("environment", 45, python("-c", ENVIRONMENT, *self.dry), required=True)

    def pytest(self, *args: str, markers: str, workers: int) -> list[str]:
        """Tests that launch on the GPU; each has a limit of time, and a warning is no error."""
        where = "not gpu and not long" if self.is_dry else "gpu"
        workers = min(workers, 2) if self.is_dry else workers
        options = f"-q -n {workers} --timeout {TEST_SECONDS} --timeout-method thread -W default -p tests.gpu.results"
        more = "--durations", "10", "--continue-on-collection-errors", "-m", f"{where} and {markers}"
        return python("-m", "pytest", *options.split(), *more, *args)

    def speeds(self, *operations: str) -> list[str]:
        return python("-m", "tests.gpu.speeds", *operations, *self.dry)

    def under(self, tool: str, command: Sequence[str]) -> list[str]:
        """A command under a tool of NVIDIA's, and without one where there is no GPU."""
        return [*([] if self.is_dry else tool.split()), *command]

    def counted(self, operation: str, kernel: str) -> Step:
        """Counters of a kernel, and what each of its instructions waits for; no time counts under a profiler."""
        tool, report = COUNTERS.format(kernel), f"/tmp/{kernel}.ncu-rep"
        profiled = shlex.join(self.under(f"{tool} --force-overwrite --export {report}", self.speeds(operation)))
        pages = [f"ncu --import {report} --page {page}" for page in ("details", "source --csv")]
        command = profiled if self.is_dry else "; ".join([profiled, *pages])
        return Step(f"ncu {kernel}", 35, ["bash", "-c", command], {results.VARIABLE: os.devnull})


def first(is_dry: bool) -> list[Step]:
    """Does it load, is it right, how fast."""
    commands = Commands(is_dry)
    own = [f"{sys.executable} -m {command}" for command in ("pip freeze", "pagedkv info")]
    facts = "nvidia-smi", "nvidia-smi conf-compute -f", "lscpu", *own
    right = "tests/gpu/test_families.py", "tests/test_on_a_gpu.py"
    return [
        Step("machine", 35, ["bash", "-c", "; ".join(facts)]),
        commands.environment(),
        Step("right", 130, commands.pytest(*right, markers=USUAL, workers=12)),
        Step("decode", 45, commands.speeds("decode")),
        Step("prefill", 40, commands.speeds("prefill")),
        Step("host", 25, commands.speeds("host")),
        commands.counted("decode", "split"),
        commands.counted("prefill", "prefill"),
        commands.counted("prefill", "prefill_wgmma"),
    ]


def second(is_dry: bool) -> list[Step]:
    """Instructions one by one, tests, benches with peers, races, counters; then drawn problems while there is time."""
    commands = Commands(is_dry)
    instructions = "tests/kernels/device", "tests/emulator"
    others = (
        *("tests/attention", "tests/kernels", "tests/bench/gpu"),
        *("--ignore=tests/kernels/device", "--ignore=tests/kernels/same"),
        *("tests/project/test_snippets.py", "tests/examples/test_generate_on_a_gpu.py"),
        *(f"tests/integrations/transformers/test_{name}.py" for name in ("families", "engine")),
    )
    raced = commands.pytest(
        "tests/gpu/test_families.py", "-k", "split and 64 or wgmma and 128 or few or many", markers=USUAL, workers=0
    )
    own, dense = ["split NHD", "split HND"], ["SDPA", "SDPA rows"]
    return [
        commands.environment(),
        Step("instructions", 70, commands.pytest(*instructions, markers="not late", workers=16)),
        Step("tests", 110, commands.pytest(*others, markers=USUAL, workers=16)),
        Step("late", 20, commands.pytest("tests/emulator/machine/test_warp.py", markers="late", workers=2)),
        Step("decode", 90, bench("decode", "headline", "one", "kernelbench", "fp8", subjects=[*own, *dense])),
        Step("launch", 20, bench("decode", "launch", subjects=own[:1])),
        Step("prefill", 90, bench("prefill", "prompt", "verify", "dims", subjects=["prefill NHD", "SDPA"])),
        Step("peers", 40, bench("decode", "headline", "one", subjects=[*own[:1], "Triton"])),
        Step("compiled", 50, bench("decode", "headline", subjects=[*own[:1], "FlexAttention"])),
        Step("races", 90, commands.under(RACES, raced), {"PAGEDKV_REPEATS": "2"}),
        Step("same", 400, commands.pytest("tests/kernels/same", markers="not late", workers=16)),
    ]


# What the steps may take: the rest of 320 and 500 seconds is for what begins and ends them.
RUNS = {"first": (first, 300.0), "second": (second, 480.0)}


def main() -> None:
    parser = argparse.ArgumentParser(prog=".ci/gpu", description=__doc__)
    parser.add_argument("run", choices=RUNS)
    parser.add_argument("--dry", action="store_true", help="without a GPU, to see that each step begins")
    parser.add_argument("--seconds", type=float, help="other than those of the run")
    parser.add_argument("--only", nargs="+", metavar="STEP", help="these steps, and those that the others need")
    given = parser.parse_args()
    out = Path(os.environ.get("OUT", f"gpu-{date.today()}"))
    out.mkdir(parents=True, exist_ok=True)
    os.environ[results.VARIABLE] = str(out.absolute() / f"{given.run}.jsonl")
    make, seconds = RUNS[given.run]
    with tempfile.TemporaryDirectory(prefix="pagedkv-gpu-", ignore_cleanup_errors=True) as scratch:
        folders = {name: Path(scratch, name) for name in ("logs", KERNELS)}
        for folder in folders.values():
            folder.mkdir()
        if (kept := CARRIED / f"{KERNELS}.tgz").exists():
            with tarfile.open(kept) as archive:
                archive.extractall(scratch, filter="data")
        os.environ["PAGEDKV_CACHE_DIR"] = str(folders[KERNELS])
        chosen = [step for step in make(given.dry) if step.required or not given.only or step.name in given.only]
        failed = Run(out, folders, given.seconds or seconds).take(chosen)
    sys.exit(f"not ok: {', '.join(failed)}" if failed else 0)


if __name__ == "__main__":
    main()

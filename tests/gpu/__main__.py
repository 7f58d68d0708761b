"""Runs on a GPU that is there for minutes, for which ``.ci/gpu`` sets up what they need.

``first`` says whether kernels load, are right, and how fast they are; its machine code is for ``second``, which tests
and measures all the rest. ``compare`` and ``repeat`` are of kernels of several commits, which `tests.gpu.variants` has
recorded: the one times them in turns, the other looks for races. With ``--dry`` they take every step without a GPU: the
emulator's side of each test, and benches that say what they lack.
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
MOST_VARIANTS = 8  # that a profiler looks at
USUAL = "not long and not late"
RACES = "compute-sanitizer --tool racecheck --error-exitcode 1 --kernel-name kns=pagedkv_"
COUNTERS = (
    "ncu --clock-control none --set full --kernel-name regex:^pagedkv_{}$ --launch-skip {} --launch-count {} --kill yes"
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

    def variants(self, operation: str, *options: str) -> list[str]:
        return python("-m", "tests.gpu.variants", operation, *options, *self.dry)

    def under(self, tool: str, command: Sequence[str]) -> list[str]:
        """A command under a tool of NVIDIA's, and without one where there is no GPU."""
        return [*([] if self.is_dry else tool.split()), *command]

    def counted(self, command: Sequence[str], kernel: str, seconds: int = 35, skipped: int = 1, count: int = 1) -> Step:
        """Counters of a kernel, and what each of its instructions waits for; no time counts under a profiler."""
        tool, report = COUNTERS.format(kernel, skipped, count), f"/tmp/{kernel}.ncu-rep"
        profiled = shlex.join(self.under(f"{tool} --force-overwrite --export {report}", command))
        pages = [f"ncu --import {report} --page {page}" for page in ("details", "source --csv")]
        command = profiled if self.is_dry else "; ".join([profiled, *pages])
        return Step(f"ncu {kernel}", seconds, ["bash", "-c", command], {results.VARIABLE: os.devnull})


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
        commands.counted(commands.speeds("decode"), "split"),
        commands.counted(commands.speeds("prefill"), "prefill"),
        commands.counted(commands.speeds("prefill"), "prefill_wgmma"),
    ]


def second(is_dry: bool) -> list[Step]:
    """Instructions one by one, tests, benches with peers; then drawn problems while there is time."""
    commands = Commands(is_dry)
    instructions = "tests/kernels/device", "tests/emulator"
    others = (
        *("tests/attention", "tests/kernels", "tests/bench/gpu"),
        *("--ignore=tests/kernels/device", "--ignore=tests/kernels/same"),
        *("tests/project/test_snippets.py", "tests/examples/test_generate_on_a_gpu.py"),
        *(f"tests/integrations/transformers/test_{name}.py" for name in ("families", "engine")),
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
        Step("same", 400, commands.pytest("tests/kernels/same", markers="not late", workers=16)),
    ]


def compare(is_dry: bool) -> list[Step]:
    """Kernels of several commits in turns, with counters of them; then peers on the same cells."""
    commands = Commands(is_dry)
    rivals = ["cuDNN", "FlashInfer fa3", "FlashAttention 3"]
    return [
        commands.environment(),
        Step("decode", 110, commands.variants("decode")),
        Step("prefill", 120, commands.variants("prefill")),
        Step("few rows", 50, commands.variants("few")),
        commands.counted(commands.variants("once"), "split", 50, 0, MOST_VARIANTS),
        commands.counted(commands.variants("once", "--cells", "prefill"), "prefill_wgmma", 50, 0, MOST_VARIANTS),
        Step("serving", 70, bench("decode", "serving", subjects=["split NHD", *rivals, "FlashInfer XQA"])),
        Step(
            "prompts",
            90,
            bench("prefill", "prompt", "chunk", "mixed", subjects=["prefill NHD", "cuDNN dense", *rivals]),
        ),
    ]


def repeat(is_dry: bool) -> list[Step]:
    """Kernels of several commits 200 times, with the same bits, and under racecheck; then families under it."""
    commands = Commands(is_dry)
    families = "split and 64 or wgmma and 128 or few or many"
    raced = commands.pytest("tests/gpu/test_families.py", "-k", families, markers=USUAL, workers=0)
    return [
        commands.environment(),
        Step("same bits", 90, commands.variants("same")),
        Step("races of variants", 200, commands.under(RACES, commands.variants("same", "--repeats", "1"))),
        Step("races", 200, commands.under(RACES, raced), {"PAGEDKV_REPEATS": "2"}),
    ]


# What the steps may take: the rest of 320, 500 and 480 seconds is for what begins and ends them.
RUNS = {"first": (first, 300.0), "second": (second, 480.0), "compare": (compare, 460.0), "repeat": (repeat, 460.0)}


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

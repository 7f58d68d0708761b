"""Steps of a run that has little time: each in a process of its own, with a limit of its own, and none past the end."""

from __future__ import annotations

import os
import signal
import subprocess
import tarfile
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from pathlib import Path
from time import monotonic, sleep
from typing import IO, NamedTuple

from . import results

PACK_SECONDS = 15.0
GRACE = 8.0  # seconds after Ctrl-C in which a step says what it has, or a quarter of its time
LEAST = 5.0  # seconds with which no step begins


class Step(NamedTuple):
    """A command, which may take so many seconds.

    A step that is `required` ends the run when it fails: what comes after it would say nothing.
    """

    name: str
    seconds: float
    command: Sequence[str]
    environment: Mapping[str, str] = {}
    required: bool = False


class Run:
    """Steps one after another until `seconds` are over, with what they write.

    Parameters
    ----------
    out : pathlib.Path
        Where results.jsonl lies, and each packed folder.
    folders : dict of str to pathlib.Path
        Folders by the name of their archive, packed anew every PACK_SECONDS. That called logs has what steps print.
    seconds : float
    """

    def __init__(self, out: Path, folders: Mapping[str, Path], seconds: float) -> None:
        self._out, self._folders, self._end = out, folders, monotonic() + seconds
        self._packed = monotonic()

    def take(self, steps: Sequence[Step]) -> list[str]:
        """The names of the steps that failed, or had no time."""
        failed = []
        for step in steps:
            began, left = monotonic(), self._end - monotonic()
            outcome = self._take(step, min(step.seconds, left)) if left > LEAST else "no time left"
            results.append(step=step.name, outcome=outcome, seconds=round(monotonic() - began, 1))
            print(f"{step.name:<14} {monotonic() - began:4.0f} s  {outcome:<12} {self._last_line(step)}", flush=True)
            self.pack()
            if outcome != "ok":
                failed.append(step.name)
                if step.required:
                    break
        return failed

    def _take(self, step: Step, seconds: float) -> str:
        """How a step ends, which gets Ctrl-C up to GRACE seconds before its time is over, and is killed then."""
        end, interrupted = monotonic() + seconds, False
        with self._log(step).open("w") as log, self._output(step, log) as output:
            try:
                process = subprocess.Popen(
                    step.command,
                    **{"stdin": subprocess.DEVNULL, "stdout": output, "stderr": log, "start_new_session": True},
                    env=os.environ | step.environment,
                )
            except OSError as error:  # a tool that is not here
                log.write(f"{error}\n")
                return "cannot begin"
        try:
            while process.poll() is None and monotonic() < end:
                if not interrupted and monotonic() > end - min(GRACE, seconds / 4):
                    interrupted = True
                    os.killpg(process.pid, signal.SIGINT)
                if monotonic() > self._packed + PACK_SECONDS:
                    self.pack()
                sleep(0.05)
        finally:
            status = process.poll()
            with suppress(ProcessLookupError):  # what it has left running, too
                os.killpg(process.pid, signal.SIGKILL)
            with suppress(subprocess.TimeoutExpired):  # a driver may keep it
                process.wait(5)
        if status is None:
            return "hung"
        return "too slow" if interrupted else "ok" if status == 0 else f"exit {status}"

    def pack(self) -> None:
        """Pack each folder into its archive, which is whole at any time."""
        self._packed = monotonic()
        for name, folder in self._folders.items():
            new = self._out / f"{name}.new"
            with tarfile.open(new, "w:gz", compresslevel=1) as archive:
                for path in sorted(folder.rglob("*")):
                    with suppress(FileNotFoundError):  # kernels are written beside their name, and moved
                        archive.add(path, Path(name) / path.relative_to(folder), recursive=False)
            new.replace(self._out / f"{name}.tgz")

    def _output(self, step: Step, log: IO[str]) -> AbstractContextManager[IO[str]]:
        """Where a step prints to: JSON to a file of its own."""
        return self._log(step).with_suffix(".json").open("w") if "--json" in step.command else nullcontext(log)

    def _log(self, step: Step) -> Path:
        return self._folders["logs"] / f"{step.name.replace(' ', '-')}.log"

    def _last_line(self, step: Step) -> str:
        with suppress(OSError):
            return (self._log(step).read_text(errors="replace").splitlines() or [""])[-1][:200]
        return ""

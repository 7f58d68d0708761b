"""``python -m pagedkv fuzz``: problems of every operation against the reference, for some minutes."""

from __future__ import annotations

import os
import signal
import time
from argparse import ArgumentParser, ArgumentTypeError
from collections import Counter
from collections.abc import Callable, Generator
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import closing
from multiprocessing import active_children, get_context
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Any, NamedTuple

from ...cpu.threads import set_num_threads
from ...emulator import EmulatorDevice
from ...errors import BackendUnavailableError
from ..problems.attention import Spec
from ..search import search
from .cases import draw_case
from .checks import Moved, check
from .script import script

BACKENDS = ("cpu", "emulator")
# Problems per turn: a turn's kernels take seconds to compile.
TURN = {"cpu": 600, "emulator": 25}


class Turn(NamedTuple):
    """The result of a turn: how many problems of which operation, and for a failure its message and script."""

    operation: str
    num_problems: int
    said: str = ""
    script: str = ""


def _minutes(text: str) -> float:
    try:
        if (minutes := float(text)) > 0:
            return minutes
    except ValueError:
        pass
    raise ArgumentTypeError(f"must be a number above 0, got {text}")


def _minutes_of_seconds(text: str) -> float:
    return _minutes(text) / 60


def add_options(parser: ArgumentParser) -> None:
    """Add the options of the command line."""
    parser.add_argument("--backend", choices=BACKENDS, default="cpu", help="what computes (default: cpu)")
    how_long = parser.add_mutually_exclusive_group()
    how_long.add_argument("--minutes", type=_minutes, default=5.0, metavar="N", help="how long (default: 5)")
    how_long.add_argument("--seconds", type=_minutes_of_seconds, dest="minutes", metavar="N", help="in seconds")
    parser.add_argument("--seed", type=int, metavar="S", help="the same problems again (default: others each time)")
    parser.add_argument("--processes", type=int, metavar="N", help="at once (default: one for each core)")
    parser.add_argument(
        "--script", default="fuzz_failure.py", metavar="PATH", help="where a failure goes (default: fuzz_failure.py)"
    )


def run(
    *,
    backend: str = "cpu",
    minutes: float = 5.0,
    seed: int | None = None,
    processes: int | None = None,
    script: str = "fuzz_failure.py",
    progress: Callable[[str], Any] = print,
) -> list[dict[str, Any]]:
    """Compare operations with the reference on drawn problems until the time is up or one fails.

    Parameters
    ----------
    backend : {"cpu", "emulator"}
    minutes : float
    seed : int or None
        None: a random one, which the result names. Problems depend on the seed alone, in which order they are tried
        on the number of processes, too.
    processes : int or None
        None: one for each core that this process may run on.
    script : str
        Where to write the script that reproduces a failure.
    progress : callable
        Called with what has been done.

    Returns
    -------
    list of dict
        A row for each operation, and one for all.

    Raises
    ------
    SystemExit
        A problem failed: the message says how, and where the script is. Or a process died, or the time was too short
        for a single problem.
    ValueError
        `processes` is less than 1.
    BackendUnavailableError
        The backend lacks a package.
    """
    seed = int.from_bytes(os.urandom(4)) if seed is None else seed
    if processes is None:
        processes = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 1
    if processes < 1:
        raise ValueError(f"--processes must be at least 1, got {processes}")
    counts: Counter[str] = Counter()
    turns: Counter[str] = Counter()
    end = time.time() + 60 * minutes
    progress(f"fuzz {backend}, seed {seed}: for {minutes:.3g} minutes (--minutes), after kernels are compiled")
    with closing(_turns(backend, seed, processes, end)) as done:  # which ends the processes
        for turn in done:
            counts[turn.operation] += turn.num_problems
            turns[turn.operation] += 1
            if turn.said:
                progress("")
                raise SystemExit(
                    f"{turn.operation} failed after {counts.total()} problems with seed {seed}: {turn.said}\n"
                    f"{_write_script(script, turn.script)}"
                )
            minutes_left, seconds = divmod(max(0, round(end - time.time())), 60)
            left = f"{minutes_left}:{seconds:02} left"
            progress(f"fuzz {backend}, seed {seed}: {counts.total():,} problems, none fails; {left}")
    if not counts.total():
        raise SystemExit(f"no problem was tried in {minutes:.3g} minutes, which the start took: give --minutes more")
    rows = [{"operation": name, "problems": counts[name], "turns": turns[name]} for name in sorted(counts)]
    total = {"operation": "all", "problems": counts.total(), "turns": turns.total(), "failed": 0, "seed": seed}
    return [*rows, total]


def play(backend: str, seed: int, number: int, end: float) -> Turn:
    """Run one turn: the problems of one case, until one fails or the time is up."""
    case = draw_case(backend, seed, number)
    device = EmulatorDevice(global_race=True, seed=number) if backend == "emulator" else backend
    changes = {"backend": device, **case.changes}
    found = search(
        case.strategy,
        lambda spec: check(spec, **changes),
        max_examples=TURN[backend],
        seed=hash((seed, number)),
        stop_at=time.monotonic() + end - time.time(),
    )
    if found.failure is None:
        return Turn(case.operation, found.num_examples)
    spec, error = found.failure
    if isinstance(error, BackendUnavailableError):  # on this machine every problem fails like this
        raise error
    said = f"{type(error).__name__}: {error}\n{spec.explained() if isinstance(spec, Spec) else spec}"
    moved = error.spec if isinstance(error, Moved) else None
    return Turn(case.operation, found.num_examples, said, script(spec, said, moved=moved, **changes))


def _write_script(path: str, text: str) -> str:
    """Write the script and say how to run it; a temporary file takes it if `path` cannot be written."""
    try:
        Path(path).write_text(text)
    except OSError as error:
        with NamedTemporaryFile("w", prefix="fuzz_failure_", suffix=".py", delete=False) as file:
            file.write(text)
        return f"{path} cannot be written: {error.strerror}; to reproduce it: python {file.name}"
    return f"to reproduce it: python {path}"


def _turns(backend: str, seed: int, processes: int, end: float) -> Generator[Turn]:
    """Yield turns as `processes` processes finish them."""
    number = 0
    if processes == 1:
        while time.time() < end:
            yield play(backend, seed, number, end)
            number += 1
        return
    before = os.environ.get("OPENBLAS_NUM_THREADS")
    os.environ["OPENBLAS_NUM_THREADS"] = "1"  # inherited by the processes
    others = {*active_children()}
    executor = ProcessPoolExecutor(processes, get_context("spawn"), _prepare)
    running: dict[Future[Turn], int] = {}
    try:
        while time.time() < end or running:
            while len(running) < processes and time.time() < end:
                running[executor.submit(play, backend, seed, number, end)] = number
                number += 1
            done, _ = wait(running, return_when=FIRST_COMPLETED)
            for future in done:
                yield future.result()
                del running[future]
    except BrokenProcessPool:
        raise SystemExit(
            f"a process died with seed {seed} in turn {' or '.join(map(str, running.values()))}: it crashed, or was "
            f"killed, for want of memory perhaps; to see where: python -X faulthandler -m pagedkv fuzz --backend "
            f"{backend} --seed {seed} --processes 1"
        ) from None
    finally:
        for process in {*active_children()} - others if running else ():  # or they would finish their turns
            process.terminate()
        executor.shutdown(cancel_futures=True)
        if before is None:
            del os.environ["OPENBLAS_NUM_THREADS"]
        else:
            os.environ["OPENBLAS_NUM_THREADS"] = before


def _prepare() -> None:
    """Prepare a new process: it uses one thread, and leaves Ctrl-C to its parent."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    set_num_threads(1)

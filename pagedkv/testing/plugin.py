"""A plugin for pytest: a fixture with an emulator that checks everything, and faults that show the kernel's lines.

    pytest_plugins = ["pagedkv.testing.plugin"]  # in conftest.py

or ``pytest -p pagedkv.testing.plugin``. No entry point loads it, since importing NumPy and this package would slow
down all tests of everyone who has it installed.
"""

from __future__ import annotations

import linecache
import zlib
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType

import pytest

from ..emulator import EmulatorDevice, KernelFault

PACKAGE = str(Path(__file__).parents[1])
LINES_AROUND = 2


@pytest.fixture
def emulator_device(request: pytest.FixtureRequest) -> EmulatorDevice:
    """A fresh `EmulatorDevice` with all checks, in a random order that is the same in each run of the test.

    Options of EmulatorDevice replace these:
    ``@pytest.mark.parametrize("emulator_device", [{"seed": 1}, {"seed": 2}], indirect=True)``.
    """
    options = {"seed": zlib.crc32(request.node.nodeid.encode()), "global_race": True}
    return EmulatorDevice(**options | getattr(request, "param", {}))


@pytest.hookimpl(wrapper=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> Iterator[None]:
    """Show a fault at the line of the test and at that of the kernel, without the emulator's frames in between."""
    try:
        return (yield)
    except BaseException as error:
        for fault in _faults(error):
            fault.add_note(place(fault))
            if not pyfuncitem.config.getoption("fulltrace"):
                fault.__traceback__ = _without_ours(fault.__traceback__)
        raise


def place(fault: KernelFault) -> str:
    """Describe the thread of a fault, and the Python lines around it."""
    lines = [f"kernel {fault.kernel}"]
    if fault.thread_block is not None:
        lines[0] += f", thread block {fault.thread_block}, thread {fault.thread}"
    for source in (fault.source, *fault.callers) if fault.source else ():
        lines.append(f"{source.file}:{source.line}")
        for number in range(source.line - LINES_AROUND, source.line + LINES_AROUND + 1):
            if text := linecache.getline(source.file, number).rstrip():
                lines.append(f"{'>' if number == source.line else ' '} {number:4}  {text}")
    return "\n".join(lines)


def _faults(error: BaseException | None) -> Iterator[KernelFault]:
    """Yield the faults among an exception and its causes, as pytest shows them."""
    while error is not None:
        if isinstance(error, KernelFault):
            yield error
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)


def _without_ours(traceback: TracebackType | None) -> TracebackType | None:
    """Drop the frames of this package and of code that it generates."""
    if traceback is None:
        return None
    rest = _without_ours(traceback.tb_next)
    file = traceback.tb_frame.f_code.co_filename
    if file.startswith((PACKAGE, "<ptx ")):
        return rest
    return TracebackType(rest, traceback.tb_frame, traceback.tb_lasti, traceback.tb_lineno)

"""What the tests of the memory manager share: state as bytes, and calls that must change none of it."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np
import pytest

from pagedkv.memory import BlockPool, PagedKVCache, SequenceTable
from pagedkv.memory.handles import Handles
from pagedkv.memory.transaction import Tally

Manager = BlockPool | SequenceTable | PagedKVCache


def state(owner: Manager | Handles) -> dict[str, bytes]:
    """Every array that the manager remembers anything in, by name; K and V included."""
    found = {}
    for name, value in vars(owner).items():
        if isinstance(value, np.ndarray):
            found[name] = value.tobytes()
        elif isinstance(value, (BlockPool, SequenceTable, Handles)):
            found |= {f"{name}.{inner}": content for inner, content in state(value).items()}
        elif isinstance(value, tuple):
            found[name] = b"".join(np.asarray(array).tobytes() for array in value)
        else:
            assert isinstance(value, (int, Tally)) or name in ("_lock", "_arrays", "_mirrors"), f"is {name} state?"
    return found


@contextmanager
def refused(owner: Manager, error: type[Exception], match: str | None = None) -> Iterator[None]:
    """The block raises exactly this error, and the owner's state is byte-identical after it."""
    before = state(owner)
    with pytest.raises(error, match=match) as raised:
        yield
    assert raised.type is error
    assert state(owner) == before
    owner.check()


def fails_after(calls: int, function: Callable, error: BaseException) -> Callable:
    """The function for that many calls, then the error."""
    left = calls

    def wrapped(*args, **kwargs):
        nonlocal left
        if left == 0:
            raise error
        left -= 1
        return function(*args, **kwargs)

    return wrapped


@contextmanager
def interrupted_at(line: int, package: str = "pagedkv") -> Iterator[list[int]]:
    """Raise KeyboardInterrupt before the line-th line that runs in the package; yields the lines that ran so far.

    The lines of with statements are passed over: there a trace function runs where signal handlers do not.
    """
    ran = [0]

    def trace(frame, event, _):
        if package not in frame.f_globals.get("__name__", ""):
            return None
        if event == "line" and frame.f_lineno not in with_lines(frame.f_code.co_filename):
            ran[0] += 1
            if ran[0] == line:
                raise KeyboardInterrupt
        return trace

    outer = sys.gettrace()
    sys.settrace(trace)
    try:
        yield ran
    finally:
        sys.settrace(outer)


_WITH_LINES: dict[str, set[int]] = {}


def with_lines(path: str) -> set[int]:
    """The line numbers of the with statements of a file."""
    if path not in _WITH_LINES:
        with open(path) as file:
            _WITH_LINES[path] = {number for number, text in enumerate(file, 1) if text.lstrip().startswith("with ")}
    return _WITH_LINES[path]

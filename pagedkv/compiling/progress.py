"""A line on the terminal while a kernel is compiled, which takes seconds."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress

# DEC's sequences, which every terminal of today knows: keep the cursor and cut what is too long, instead of scrolling;
# then go back at once. What the program has written in this line stays, and what it or another thread writes meanwhile
# comes where it would without the line: the end erases what is right of the cursor, wherever that is by then.
_BEGIN, _BACK, _END = "\0337\033[?7l", "\033[?7h\0338", "\033[K"


@contextmanager
def told(what: str) -> Iterator[None]:
    """Say on stderr that something is being compiled, if that is a terminal, and take it back at the end."""
    terminal = is_terminal()
    if terminal:
        _write(f"{_BEGIN}pagedkv: compiling {what}, once ...{_BACK}")
    try:
        yield
    finally:
        if terminal:
            _write(_END)


def erase() -> None:
    """Take the line back before its end: its caller was interrupted, and what is compiled is finished all the same."""
    if is_terminal():
        _write(_END)


def is_terminal() -> bool:
    """Whether stderr is a terminal that can erase."""
    try:
        return sys.stderr.isatty() and os.environ.get("TERM") != "dumb"
    except (AttributeError, ValueError):  # a process without stderr, or one that has closed it
        return False


def _write(text: str) -> None:
    with suppress(OSError, ValueError):
        sys.stderr.write(text)
        sys.stderr.flush()

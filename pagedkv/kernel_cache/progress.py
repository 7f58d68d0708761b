"""Progress of a compilation, which takes seconds: records of the logger, and a line on stderr."""

from __future__ import annotations

import logging
import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

# DEC's sequences, which every terminal of today knows: keep the cursor and cut what is too long, instead of scrolling;
# then go back at once. What the program has written in this line stays, and what it or another thread writes meanwhile
# comes where it would without the line: the end erases what is right of the cursor, wherever that is by then.
_BEGIN, _BACK, _END = "\0337\033[?7l", "\033[?7h\0338", "\033[K"

_logger = logging.getLogger("pagedkv")


@contextmanager
def showing_progress(what: str) -> Iterator[None]:
    """Report that a compilation has begun, and at its end how long it took.

    The logger gets both at INFO. A terminal shows a line on stderr that disappears at the end. Elsewhere, as in a
    notebook or a container, the line stays, unless the program has configured logging: then its handlers decide.
    """
    terminal, begun = is_terminal(), time.perf_counter()
    _logger.info("compiling %s", what)
    if terminal:
        _write(f"{_BEGIN}pagedkv: compiling {what}, once ...{_BACK}")
    elif not _logger.hasHandlers() and _logger.level <= logging.INFO:
        _write(f"pagedkv: compiling {what}, once ...\n")
    try:
        yield
    finally:
        if terminal:
            _write(_END)
    _logger.info("compiled %s in %.1f s", what, time.perf_counter() - begun)


def erase() -> None:
    """Erase the line early: the caller was interrupted, though the compilation goes on."""
    if is_terminal():
        _write(_END)


def is_terminal() -> bool:
    """Whether stderr is a terminal that can erase."""
    try:
        return sys.stderr.isatty() and os.environ.get("TERM") != "dumb"
    except (AttributeError, ValueError):  # a process without stderr, or one that has closed it
        return False


def _write(text: str) -> None:
    with suppress(AttributeError, OSError, ValueError):
        sys.stderr.write(text)
        sys.stderr.flush()

"""Edited functions: a check is worth as much as the wrong edits that it notices."""

from __future__ import annotations

import inspect
import itertools
import linecache
import textwrap
from collections.abc import Callable, Iterable
from types import FunctionType
from typing import Any

_serial = itertools.count()


def edited(function: Callable[..., Any], old: str, new: str) -> Callable[..., Any]:
    """Replace a part of a function's source; faults and tracebacks show the new lines.

    Parameters
    ----------
    function : callable
        A Python function, possibly compiled by numba; decorators in its source are left out.
    old, new : str
        Text that occurs exactly once in its dedented source, and what replaces it.

    Returns
    -------
    function
        The new function, with the globals and the closed-over values of the original one.

    Raises
    ------
    ValueError
        `old` does not occur exactly once.

    Examples
    --------
    >>> from pagedkv.testing import edited, fade
    >>> steeper = edited(fade, "0.01", "0.5")
    >>> fade(1.0, 3, 2, 0, 0), steeper(1.0, 3, 2, 0, 0)
    (0.99, 0.5)
    """
    python = getattr(function, "py_func", function)
    source = textwrap.dedent(inspect.getsource(python))
    source = source[source.index("def ") :]
    if (count := source.count(old)) != 1:
        raise ValueError(f"old must occur exactly once in {python.__name__}, got {count} times: {old!r}")
    file = f"<{python.__name__} edited {next(_serial)}>"
    text = source.replace(old, new)
    linecache.cache[file] = len(text), None, text.splitlines(True), file
    closed = inspect.getclosurevars(python).nonlocals
    scope = {**python.__globals__, **closed}
    exec(compile(text, file, "exec"), scope)
    made: FunctionType = scope[python.__name__]
    made.__kwdefaults__, made.__defaults__ = python.__kwdefaults__, python.__defaults__
    return made


def survivors(
    function: Callable[..., Any], edits: Iterable[tuple[str, str]], check: Callable[[Callable[..., Any]], Any]
) -> list[tuple[str, str]]:
    """Return the edits of a function that a check does not notice.

    Parameters
    ----------
    function : callable
        A function that passes the check.
    edits : iterable of (old, new)
        Arguments of `edited`.
    check : callable
        A function that raises for a wrong function, such as ``assert_matches_reference``.

    Raises
    ------
    ValueError, SyntaxError
        An edit cannot be made, so it would test nothing.

    Examples
    --------
    >>> from pagedkv.testing import fade, survivors
    >>> def check(function):
    ...     assert function(1.0, 3, 2, 0, 0) < 1
    >>> survivors(fade, [("0.01", "0.02"), ("score -", "score +")], check)  # the check notices one edit of the two
    [('0.01', '0.02')]
    """
    check(function)
    left = []
    for old, new in edits:
        wrong = edited(function, old, new)
        try:
            check(wrong)
        except Exception:
            continue
        left.append((old, new))
    return left

"""The functions that a score_mod may be, and the errors for others."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from inspect import CO_VARARGS, CO_VARKEYWORDS
from types import CellType, FunctionType
from typing import Any

import numpy as np


def python_function(score_mod: Any) -> Callable[..., Any] | None:
    """The Python function of a score_mod, which each backend compiles for itself; decorators of numba are dropped.

    Raises
    ------
    TypeError
        It is not a function of five arguments.
    """
    if score_mod is None:
        return None
    function = getattr(score_mod, "py_func", score_mod)
    if not isinstance(function, FunctionType):
        raise TypeError(f"score_mod must be a function made by def or lambda, got {type(score_mod).__name__}")
    code = function.__code__
    if code.co_argcount != 5 or code.co_kwonlyargcount or code.co_flags & (CO_VARARGS | CO_VARKEYWORDS):
        raise TypeError(
            "score_mod must be a function of (score, q_pos, k_pos, head, seq) without other parameters, got one of "
            f"({', '.join(inspect.signature(function).parameters)})"
        )
    return function


def frozen(function: Callable[..., Any]) -> Callable[..., Any]:
    """Copy a function together with the arrays that it closes over or uses as globals.

    numba compiles small contiguous arrays in as constants, but would read others in place in every call.
    """
    code, known = function.__code__, function.__globals__
    arrays = {name: known[name].copy() for name in code.co_names if isinstance(known.get(name), np.ndarray)}
    cells = tuple(map(_frozen_cell, function.__closure__ or ()))
    return FunctionType(code, known | arrays, function.__name__, None, cells or None)


def _frozen_cell(cell: CellType) -> CellType:
    try:
        content = cell.cell_contents
    except ValueError:  # a name without a value yet, for which numba has a better message
        return cell
    return CellType(content.copy() if isinstance(content, np.ndarray) else content)


def refusal(score_mod_error: Exception) -> TypeError:
    """The error for a score_mod that numba cannot compile; the message ends with numba's own."""
    return TypeError(
        "score_mod must be a function of (score, q_pos, k_pos, head, seq) that numba can compile for a float32 and "
        f"four int32: math functions, closed-over numbers and arrays of them only; numba says: {score_mod_error}"
    )


def can_raise(what: str) -> TypeError:
    """The error for a score_mod that can raise: a kernel can neither handle an exception nor free its memory."""
    return TypeError(
        f"it can raise {what}, and a kernel cannot: return math.nan, or -math.inf to mask the key; write x ** float(n) "
        "for x ** n with an int n, and an array for a tuple or list that is indexed"
    )

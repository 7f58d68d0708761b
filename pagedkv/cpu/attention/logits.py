"""What changes a logit between the dot product and the softmax: softcap, ALiBi, score_mod."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from typing import Any

import numpy as np
from numba import float32, int32, njit, types
from numba.core import config as settings
from numba.core.errors import NumbaError

from ...score_mod import can_raise, frozen, refusal
from ..compile import device
from .access import get_float, put_float

SIGNATURE = (float32, int32, int32, int32, int32)

# An exception in numba's code: a pickle of its class and arguments, as text of LLVM.
_EXCEPTION = re.compile(r'^@\.const\.pickledata\.\w+ = .* c"(?:.*?builtins\\94\\8C\\..(\w+))?.*"', re.MULTILINE)
_OF_PRINT = "missing Environment"  # an exception in `print` that only a bug of numba's would raise


def make_modify(score_mod: Callable[..., Any] | None) -> Callable[..., Any]:
    """The device function ``modify(scores, stride, count, first, position, softcap, slope, head, seq)`` of a score_mod.

    It changes `count` float32 logits, `stride` bytes apart from the address `scores` on, of the keys at positions
    first, first + 1, ...

    Raises
    ------
    TypeError
        numba cannot compile `score_mod` for (float32, int32, int32, int32, int32), or what it compiles can raise.
    """
    user = _compile_score_mod(score_mod)

    @device(score_mod)
    def modify(scores, stride, count, first, position, softcap, slope, head, seq):
        for t in range(count):
            score = get_float(scores + t * stride)
            if softcap != np.float32(0):
                score = softcap * np.float32(math.tanh(score / softcap))
            score -= slope * np.float32(abs(first + t - position))
            if user is not None:
                score = np.float32(user(score, np.int32(position), np.int32(first + t), np.int32(head), np.int32(seq)))
            put_float(scores + t * stride, score)

    return modify


def _compile_score_mod(score_mod: Callable[..., Any] | None) -> Callable[..., Any] | None:
    if score_mod is None:
        return None
    user: Any = njit(error_model="numpy", no_cpython_wrapper=True, no_cfunc_wrapper=True)(frozen(score_mod))
    try:
        user.compile(SIGNATURE)
        compiled = user.overloads[SIGNATURE]
        result = compiled.signature.return_type
        if not isinstance(result, (types.Float, types.Integer, types.Boolean)):
            raise TypeError(f"it returns {result}, not a real number")
        # Without optimization, or with checks of bounds, the code has exceptions that are never raised.
        if settings.OPT and not settings.BOUNDSCHECK and (exceptions := _exceptions(compiled.library.get_llvm_str())):
            raise can_raise(" or ".join(exceptions))
    except (NumbaError, TypeError) as error:
        raise refusal(error) from error
    return user


def _exceptions(code: str) -> list[str]:
    """The names of the exceptions that optimized code can raise."""
    found = _EXCEPTION.finditer(code)
    return sorted({match[1] or "an exception" for match in found if _OF_PRINT not in match[0]})

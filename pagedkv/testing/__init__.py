"""Fuzzing of attention kernels and block allocators, yours and ours, with Hypothesis.

It draws problems of decode, prefill, writing and merging in which everything unused is poison, bounds the error of a
result, and checks any function or allocator.
"""

from importlib.util import find_spec

from ..errors import BackendUnavailableError
from ..extras import pip_install

if find_spec("hypothesis") is None:
    raise BackendUnavailableError(
        f"pagedkv.testing draws problems with Hypothesis, which is not installed: {pip_install('testing')}"
    )

from .allocators import AllocatorMachine
from .edits import edited, survivors
from .error_rule import assert_close, error_bound, expect
from .invariance import assert_invariant
from .matching import assert_matches_reference
from .problems.attention import Problem, Spec, build
from .problems.limits import Limits
from .problems.strategies import decode_problems, fade, prefill_problems

__all__ = [
    "AllocatorMachine",
    "Limits",
    "Problem",
    "Spec",
    "assert_close",
    "assert_invariant",
    "assert_matches_reference",
    "build",
    "decode_problems",
    "edited",
    "error_bound",
    "expect",
    "fade",
    "prefill_problems",
    "survivors",
]

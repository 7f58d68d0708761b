"""Streams, copies between host and device, and numba-cuda as the compiler."""

from .mutant import Mutant

PLANS = "tests/cuda/plans/test_cache.py::"
COPIES = "tests/cuda/test_copies.py::"
OVERRIDES = "tests/cuda/compiler/test_numba_overrides.py::"

MUTANTS = [
    Mutant(
        "a call's launches are mixed with those of another thread",
        "cuda/driver.py",
        "    with device.lock:\n        yield device",
        "    if device.lock:\n        yield device",
        (PLANS + "test_the_launches_of_a_call_follow_each_other[merge]",),
    ),
    Mutant(
        "a repeated call's launches are mixed with those of another thread",
        "cuda/plans/cache.py",
        "with device.lock:",
        "if device.lock:",
        (PLANS + "test_the_launches_of_a_call_follow_each_other[decode]",),
    ),
    Mutant(
        "pinned memory is filled again while the GPU reads it",
        "cuda/copies.py",
        "        self._gpu.call(driver.cuEventSynchronize, half.event)\n",
        "",
        (COPIES + "test_what_is_sent_is_what_was_there_at_the_call",),
    ),
    Mutant(
        "what has arrived in one half of the pinned memory is forgotten",
        "cuda/copies.py",
        "for _ in self._halves:",
        "for _ in self._halves[:1]:",
        (COPIES + "test_pageable_memory_is_filled_when_the_call_returns",),
    ),
    Mutant(
        "copies are captured",
        "cuda/driver.py",
        '            self._gpu.refuse_capture(\n                self._handle, "copies',
        '            str(\n                "copies',
        ("tests/cuda/test_driver.py::test_copies_are_not_captured",),
    ),
    Mutant(
        "an operator has the type that it had for other scalars",
        "cuda/compiler/numba_overrides.py",
        "key = function, tuple(args)",
        "key = function",
        (OVERRIDES + "test_an_operator_is_typed_once_for_the_same_scalars",),
    ),
    Mutant(
        "arrays are taken for scalars",
        "cuda/compiler/numba_overrides.py",
        "            or not all(isinstance(arg, scalars) for arg in args)\n",
        "",
        (OVERRIDES + "test_what_is_no_operator_on_scalars_is_typed_each_time",),
    ),
    Mutant(
        "numba-cuda keeps an override",
        "cuda/compiler/numba_overrides.py",
        "        vars(owner).update(own)\n",
        "        setattr(owner, name, value)\n",
        (OVERRIDES + "test_numba_is_itself_after_a_compilation_and_after_an_error",),
    ),
]

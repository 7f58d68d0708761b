"""The formula by which partial attention states are merged, for all kernels that compute attention in pieces.

Attention over some keys leaves a state: the largest logit m, the sum l of exp(logit - m), and the sum o of
exp(logit - m) * v. The states of disjoint sets of keys merge into the state of all these keys (Milakov and Gimelshein,
"Online normalizer calculation for softmax", 2018)::

    m = max(m_i)    w_i = exp(m_i - m)    l = sum(w_i * l_i)    o = sum(w_i * o_i)

At the end, out is o / l and the LSE is m + log(l). A sink is a state with l = 1 whose o is 0. An output and its LSE are
a state, too: m is the LSE, l is 1 and o is the output.

A state without keys has m = -inf and l = 0; it weighs nothing, beside others and alone. If all states are like that,
out is 0 and the LSE is -inf.

Inside a kernel, logits are in units of log(2): exp is one instruction then. LSEs that users pass are natural
logarithms.
"""

from __future__ import annotations

import math
from typing import Any

from .intrinsics.thread import assign, exp2, for_each, local_array, multiply_and_add, unrolled
from .intrinsics.warp import log2, reciprocal
from .language import float32
from .logits import LN2, NONE
from .source import device_function


@device_function
def finite(largest):
    """The number that exponents are relative to: the largest logit, or 0 without any, because -inf - -inf is NaN."""
    return float32(0) if largest == NONE else largest


@device_function
def weight_of(maximum, largest):
    """The weight of a state by its largest logit: 2 to the power of its distance from the largest of all."""
    return exp2(float32(maximum - finite(largest)))


@device_function
def inverse(total):
    """1 / l, or 0 if there are no keys."""
    return float32(0) if total == float32(0) else reciprocal(total)


@device_function
def lse_of(largest, total):
    """The LSE, a natural logarithm, from m in units of log(2) and l."""
    return NONE if total == float32(0) else float32(float32(largest + log2(total)) * LN2)


@device_function
def weight_of_lse(lse, largest):
    """The weight of an output by its LSE and the largest LSE."""
    return math.exp(float32(lse - finite(largest)))


@device_function
def lse_of_lses(largest, total):
    """The LSE of merged outputs, from the largest of their LSEs and the sum of their weights."""
    return finite(largest) + math.log(total)


def make_add(dims: int, may_be_empty: bool) -> Any:
    """The device function ``add(sums, weight, x, at)``: add one state's weighted values, which are x from `at` on.

    Parameters
    ----------
    dims : int
        Elements of `sums`.
    may_be_empty : bool
        Whether states without keys are among them, which may hold anything. States that weigh nothing are left out
        then: 0 * NaN is NaN, and adding 0 turns a -0 into 0.
    """
    ALL_COUNT = not may_be_empty

    @unrolled(dims)
    def add_dim(d, sums, weight, x, at):
        sums[d] = multiply_and_add(weight, x[at + d], sums[d])

    @device_function
    def add(sums, weight, x, at):
        if ALL_COUNT or weight != float32(0):
            add_dim(sums, weight, x, at)

    return add


def make_add_states(load: Any, add: Any, dims: int, stride: int, most_loads: int, every: int = 1) -> Any:
    """The device function ``add_states(sums, where, weights, at, first, count)``, for states in global memory.

    It adds states first, first + every, ... below count in this order; they weigh ``weights[at + i]``.

    Parameters
    ----------
    load : device function
        From an address to the values of a state that this thread adds.
    add : device function
        From `make_add`.
    dims : int
        The number of these values.
    stride : int
        Bytes from a state to the next one that is added; `where` is the address of the first.
    most_loads : int
        States that a thread loads before it adds the first of them.
    every : int
        The step from a state that is added to the next one; weights and count are those of all states.
    """
    STRIDE, DIMS, EVERY, MOST_LOADS, BUFFERED = stride, dims, every, most_loads, dims * most_loads

    @device_function
    def load_state(j, buffer, where):
        assign(buffer, DIMS * j, load(where + STRIDE * j))

    @device_function
    def add_state(j, sums, weights, at, buffer):
        add(sums, weights[at + EVERY * j], buffer, DIMS * j)

    @device_function
    def add_states(sums, where, weights, at, first, count):
        buffer, i = local_array(BUFFERED, float32), first
        while i + EVERY * (MOST_LOADS - 1) < count:
            for_each(load_state, MOST_LOADS, (buffer, where))
            for_each(add_state, MOST_LOADS, (sums, weights, at + i, buffer))
            where += STRIDE * MOST_LOADS
            i += EVERY * MOST_LOADS
        while i + EVERY * 3 < count:
            for_each(load_state, 4, (buffer, where))
            for_each(add_state, 4, (sums, weights, at + i, buffer))
            where += STRIDE * 4
            i += EVERY * 4
        while i < count:
            for_each(load_state, 1, (buffer, where))
            for_each(add_state, 1, (sums, weights, at + i, buffer))
            where += STRIDE
            i += EVERY

    return add_states

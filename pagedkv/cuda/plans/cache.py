"""Plans of valid calls on GPUs, kept so that the next call like one of them costs little on the host.

Validation reads nothing but metadata of arrays on a device. So the plan of a valid call is kept under a key of all that
validation has read: shapes, strides, dtypes, devices, read-only flags, the low bits of addresses, the bucket of
max_seq_len, and the options by value and type. For a call with a known key, it is enough to read the addresses and to
compare `out` with the inputs.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from numbers import Real
from operator import attrgetter
from typing import Any

import numpy as np

from ...arrays import Facts, device_kinds
from ...buckets import bucket
from ...calls import AttentionArguments
from ...environment import check_setting
from .gpu_plan import ARRAYS, GpuPlan

MOST_PLANS = 1024
# A plan depends on all arguments that are no arrays, and on PAGEDKV_CHECK.
OPTIONS = tuple(name for name in AttentionArguments._fields if name not in (*ARRAYS, "max_seq_len"))
_arrays_of, _options_of = attrgetter(*ARRAYS), attrgetter(*OPTIONS)
# Reading an argument raises these if it is invalid, is not on a device, or has an unknown form.
_UNREADABLE = (AttributeError, IndexError, KeyError, RuntimeError, TypeError, ValueError)


class PlanCache:
    """Plans by the keys of their calls, which is emptied when there are too many."""

    def __init__(self) -> None:
        self._known: dict[Hashable, GpuPlan] = {}

    def __len__(self) -> int:
        return len(self._known)

    def add(self, arguments: AttentionArguments, plan: GpuPlan) -> None:
        """Keep the plan of a call."""
        try:
            key = _read(arguments)[1]
            if len(self._known) >= MOST_PLANS:
                self._known.clear()
            self._known[key] = plan
        except _UNREADABLE:
            return

    def repeat(self, arguments: AttentionArguments) -> Any:
        """Run a call that is like an earlier valid one, and return its result; None if there was none."""
        try:
            addresses, key = _read(arguments)
            known = self._known.get(key)
        except _UNREADABLE:  # validation will say what is wrong
            return None
        if known is None:
            return None
        if arguments.out is not None and not known.overlaps_no_input(addresses):
            return None
        like = device_kinds[arguments.q.__class__]("q", arguments.q)
        return known.attend(like, addresses, arguments.out, return_lse=arguments.return_lse)


def _read(arguments: AttentionArguments) -> tuple[tuple[int, ...], Hashable]:
    """The addresses of the arguments (0 for those that are no arrays), and the key of the call."""
    facts = [_NOTHING if x is None else _readers[x.__class__](x) for x in _arrays_of(arguments)]
    options, max_seq_len = _options_of(arguments), arguments.max_seq_len
    if max_seq_len is not None:
        if type(max_seq_len) is not int and not isinstance(max_seq_len, np.integer):
            raise TypeError
        max_seq_len = bucket(int(max_seq_len))
    # 1, 1.0 and True are equal, but not all are valid.
    key = (*[key for _, key in facts], *options, *map(type, options), max_seq_len, check_setting())
    return tuple([address for address, _ in facts]), key


_NOTHING: Facts = 0, None


class _Readers(dict[type, Callable[[Any], Facts]]):
    """The reader of each type of argument."""

    def __missing__(self, kind: type) -> Callable[[Any], Facts]:
        self[kind] = _number_facts if issubclass(kind, Real) else device_kinds[kind].facts
        return self[kind]


_readers = _Readers()


def _number_facts(x: Any) -> Facts:
    return 0, (x, type(x))

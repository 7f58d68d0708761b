"""Plans of valid calls, kept so that the next call like one of them costs little on the host.

Validation reads nothing but metadata of arrays on a device. So the plan of a valid call is kept under a key of all that
validation has read: shapes, strides, dtypes, devices, read-only flags, the low bits of addresses, the bucket of
max_seq_len, and the options by value and type. For a call with a known key, it is enough to read the addresses and to
compare `out` with the inputs.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Hashable
from numbers import Real
from operator import attrgetter, itemgetter
from typing import Any

import numpy as np
from numpy.lib.array_utils import byte_bounds

from ...arrays import Array, DeviceArgument, Facts, address_of, device_kind
from ...buckets import bucket
from ...calls import AttentionArguments, AttentionCall
from ...layouts import FLOAT32
from .. import driver
from .plan import Plan, arrays_of

MOST_PLANS = 1024
# The arguments that may be arrays, `out` the last of them; a plan depends on all others, and on PAGEDKV_CHECK.
_ARRAYS = (
    *("q", "k_cache", "v_cache", "block_tables", "seq_lens", "query_starts"),
    *("alibi_slopes", "sinks", "leftpad", "mask", "k_scale", "v_scale", "out"),
)
_OPTIONS = tuple(name for name in AttentionArguments._fields if name not in (*_ARRAYS, "max_seq_len"))
_arrays_of, _options_of = attrgetter(*_ARRAYS), attrgetter(*_OPTIONS)
# Reading an argument raises these if it is invalid, is not on a device, or has an unknown form.
_UNREADABLE = (AttributeError, IndexError, KeyError, RuntimeError, TypeError, ValueError)


class KnownCall:
    """A plan that runs with the addresses of any call like one that was valid.

    Parameters
    ----------
    plan : Plan
    call : AttentionCall
        The call that was planned.
    out : numpy.ndarray
        The shadow of its output.
    """

    def __init__(self, plan: Plan, call: AttentionCall, out: Array) -> None:
        self.ordinal = call.placement.ordinal
        self.shape, self.dtype = call.q.shape, call.q.dtype
        arrays = arrays_of(call)
        spans = [(i, *_span(arrays[name])) for i, name in enumerate(_ARRAYS[:-1])]
        self._spans = tuple((i, first, last) for i, first, last in spans if first < last)
        self._out_span = _span(out)
        self._workspaces = plan.workspaces
        names = (*_ARRAYS, "lse", *(name for name, _ in self._workspaces))
        at = {name: i for i, name in enumerate(names)}  # any other name is a null pointer, which stands behind them
        self._launches = [
            (
                x.kernel,
                x.grid,
                itemgetter(*(at.get(name, len(names)) for name in x.pointers)),
                x.scalars,
                x.shared_bytes,
            )
            for x in plan.launches
        ]
        # In decode only the last launch stores output.
        self._fills_in_parts = call.query_starts is not None and len(self._launches) > 1

    def overlaps_no_input(self, addresses: tuple[int, ...]) -> bool:
        """Whether `out` spans no memory that an input spans; if it does, they may still be interleaved."""
        first, last = self._out_span
        begin, end = addresses[-1] + first, addresses[-1] + last
        for i, start, stop in self._spans:
            address = addresses[i]
            if address + start < end and begin < address + stop:
                return False
        return True

    def run(self, device: driver.CudaDevice, addresses: tuple[int, ...], lse: int) -> None:
        """Launch with these addresses of the arguments and of the LSE (0 if there is none)."""
        with device.lock:
            scratch = [device.scratch(name, nbytes) for name, nbytes in self._workspaces]
            addresses = (*addresses, lse, *scratch, 0)
            if self._fills_in_parts:
                device.launch_all([(*x[:2], x[2](addresses) + x[3], x[4]) for x in self._launches])
                return
            for kernel, grid, pointers, scalars, shared_bytes in self._launches:
                device.launch(kernel, grid, pointers(addresses) + scalars, shared_bytes)


def _span(x: Any) -> tuple[int, int]:
    """Where the bytes of an array begin and end, counted from its element 0; (0, 0) for no array or an empty one."""
    if not isinstance(x, np.ndarray) or not x.size:
        return 0, 0
    (begin, end), address = byte_bounds(x), address_of(x)
    return begin - address, end - address


class PlanCache:
    """Known calls by their keys, which is emptied when there are too many."""

    def __init__(self) -> None:
        self._known: dict[Hashable, KnownCall] = {}

    def __len__(self) -> int:
        return len(self._known)

    def add(self, call: AttentionCall, out: Array, plan: Plan) -> None:
        """Keep the plan of a call that has been launched into `out`."""
        known = KnownCall(plan, call, out)
        try:
            key = _read(call.arguments)[1]
            if len(self._known) >= MOST_PLANS:
                self._known.clear()
            self._known[key] = known
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
        q, out = arguments.q, arguments.out
        like = _kinds[q.__class__]("q", q)
        if out is None:
            out = like.empty("out", known.shape, known.dtype, "")
            addresses = (*addresses[:-1], like.facts(out)[0])
        elif not known.overlaps_no_input(addresses):
            return None
        device = driver.cuda_device(known.ordinal, like.stream())
        if not arguments.return_lse:
            known.run(device, addresses, 0)
            return out
        lse = like.empty("lse", known.shape[:2], FLOAT32, "")
        known.run(device, addresses, like.facts(lse)[0])
        return out, lse


def _read(arguments: AttentionArguments) -> tuple[tuple[int, ...], Hashable]:
    """The addresses of the arguments (0 for those that are no arrays), and the key of the call."""
    facts = [_NOTHING if x is None else _readers[x.__class__](x) for x in _arrays_of(arguments)]
    options, max_seq_len = _options_of(arguments), arguments.max_seq_len
    if max_seq_len is not None:
        if type(max_seq_len) is not int and not isinstance(max_seq_len, np.integer):
            raise TypeError
        max_seq_len = bucket(int(max_seq_len))
    # 1, 1.0 and True are equal, but not all are valid.
    key = (*[key for _, key in facts], *options, *map(type, options), max_seq_len, _check_setting())
    return tuple([address for address, _ in facts]), key


def _check_setting() -> str | None:
    """``os.environ.get("PAGEDKV_CHECK")``, in half the time if the variable is not set."""
    try:
        return os.environ["PAGEDKV_CHECK"]
    except KeyError:
        return None


_NOTHING: Facts = 0, None


class _Kinds(dict[type, type[DeviceArgument]]):
    """The kind of device array of each type."""

    def __missing__(self, kind: type) -> type[DeviceArgument]:
        self[kind] = device_kind(kind)
        return self[kind]


class _Readers(dict[type, Callable[[Any], Facts]]):
    """The reader of each type of argument."""

    def __missing__(self, kind: type) -> Callable[[Any], Facts]:
        self[kind] = _number_facts if issubclass(kind, Real) else _kinds[kind].facts
        return self[kind]


_kinds, _readers = _Kinds(), _Readers()


def _number_facts(x: Any) -> Facts:
    return 0, (x, type(x))

"""Plans of calls that were valid, so that the next call like one of them costs little on the host.

Nothing but metadata is looked at when arrays are on a device. So the plan of a checked call is kept under a key of all
that was looked at: shapes, strides, dtypes, devices, read-only flags, the low bits of addresses, and the options by
value and type. A call with a known key needs its addresses read, and `out` compared with the inputs.
"""

from __future__ import annotations

import os
from collections import OrderedDict
from collections.abc import Callable, Hashable
from contextlib import suppress
from functools import lru_cache
from numbers import Real
from operator import itemgetter
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.lib.array_utils import byte_bounds

from ..arrays import Array
from ..checks import FLOAT32, address_of
from ..device_arrays import current_stream, empty, framework_of
from ..layouts import VECTOR_BYTES
from . import driver, interop

if TYPE_CHECKING:
    from ..validation import AttentionCall
    from .driver import CudaDevice
    from .plans.attention import Plan

MAX_PLANS = 1024
_LOW_BITS = VECTOR_BYTES - 1

Read = tuple[int, Hashable]

# The arguments of decode_attention that may be arrays, in the order in which they are given to `repeat`.
NAMES = (
    *("q", "k_cache", "v_cache", "block_tables", "seq_lens"),
    *("alibi_slopes", "sinks", "k_scale", "v_scale", "out"),
)


class Known:
    """A plan, for any addresses, of a call that was valid.

    Parameters
    ----------
    launches : Plan
    call : AttentionCall
        The checked call that it is the plan of.
    out : numpy.ndarray
        The shadow of what it writes to.
    """

    def __init__(self, launches: Plan, call: AttentionCall, out: Array) -> None:
        self.ordinal = call.side.ordinal
        self.shape, self.dtype = call.q.shape, call.q.dtype
        inputs = (call.q, call.k_cache, call.v_cache, call.block_tables, call.seq_lens)
        vectors = (call.options.alibi_slopes, call.options.sinks, call.k_scale, call.v_scale)
        self._spans = tuple(_span(x) for x in (*inputs, *vectors))
        self._out_span = _span(out)
        self._workspaces = launches.workspaces
        names = (*NAMES, "lse", *(name for name, _ in self._workspaces))
        at = {name: i for i, name in enumerate(names)}  # anything else is the null pointer, behind them
        self._launches = [
            (
                x.kernel,
                x.grid,
                itemgetter(*(at.get(name, len(names)) for name in x.pointers)),
                x.scalars,
                x.shared_bytes,
            )
            for x in launches.launches
        ]

    def apart(self, addresses: tuple[int, ...]) -> bool:
        """True if what `out` spans is apart from what the inputs span; False where it takes a closer look to say."""
        first, last = self._out_span
        begin, end = addresses[-1] + first, addresses[-1] + last
        for address, span in zip(addresses, self._spans, strict=False):
            if address + span[0] < end and begin < address + span[1]:
                return False
        return True

    def run(self, device: CudaDevice, addresses: tuple[int, ...], lse: int) -> None:
        """Launch, with these addresses of the arguments and of the LSE (0 if there is none)."""
        with device.lock:
            scratch = [device.scratch(name, nbytes) for name, nbytes in self._workspaces]
            addresses = (*addresses, lse, *scratch, 0)
            for kernel, grid, pointers, scalars, shared_bytes in self._launches:
                device.launch(kernel, grid, pointers(addresses) + scalars, shared_bytes)


def _span(x: Any) -> tuple[int, int]:
    """Where the bytes of an array begin and end, counted from its element 0; (0, 0) where there are none."""
    if not isinstance(x, np.ndarray) or not x.size:
        return 0, 0
    (begin, end), address = byte_bounds(x), address_of(x)
    return begin - address, end - address


class Plans:
    """Known calls by their keys; the ones used longest ago are forgotten.

    Parameters
    ----------
    size : int
        How many are kept.
    """

    def __init__(self, size: int) -> None:
        self._size = size
        self._known: OrderedDict[Hashable, Known] = OrderedDict()

    def __len__(self) -> int:
        return len(self._known)

    def find(self, key: Hashable) -> Known | None:
        known = self._known.get(key)
        if known is not None:
            with suppress(KeyError):  # another thread may have dropped it just now
                self._known.move_to_end(key)
        return known

    def add(self, key: Hashable, known: Known) -> None:
        self._known[key] = known
        while len(self._known) > self._size:
            self._known.popitem(last=False)


_plans = Plans(MAX_PLANS)


def repeat(arguments: tuple[Any, ...], options: tuple[Any, ...], return_lse: bool) -> Any:
    """Run a call that is like a valid one before it, and return what decode_attention returns; otherwise None.

    Parameters
    ----------
    arguments : tuple
        As NAMES says.
    options : tuple
        All other arguments of decode_attention but return_lse.
    return_lse : bool
    """
    found = _read(arguments, options, return_lse)
    known = _plans.find(found[1]) if found else None
    if found is None or known is None:
        return None
    addresses = found[0]
    q, out = arguments[0], arguments[-1]
    if out is None:
        out = empty("out", q, known.shape, known.dtype, "")
        addresses = (*addresses[:-1], reader(out.__class__)(out)[0])
    elif not known.apart(addresses):
        return None
    device = driver.cuda_device(known.ordinal, current_stream(q))
    if not return_lse:
        known.run(device, addresses, 0)
        return out
    lse = empty("lse", q, known.shape[:2], FLOAT32, "")
    known.run(device, addresses, reader(lse.__class__)(lse)[0])
    return out, lse


def remember(
    arguments: tuple[Any, ...],
    options: tuple[Any, ...],
    return_lse: bool,
    call: AttentionCall,
    out: Array,
    launched: Plan,
) -> None:
    """Keep the plan of a call that has been launched, for `repeat`; the first three as there."""
    if found := _read(arguments, options, return_lse):
        _plans.add(found[1], Known(launched, call, out))


def _read(
    arguments: tuple[Any, ...], options: tuple[Any, ...], return_lse: bool
) -> tuple[tuple[int, ...], Hashable] | None:
    """The addresses of the arguments, 0 for those that are no arrays, and the key of the call.

    None if there is something among them that no valid call on a device has, or that is not known well enough: then
    it is for validation to say what.
    """
    try:
        pairs = [reader(x.__class__)(x) for x in arguments]
        # 1 and 1.0 and True are equal, and are not all valid.
        key = (
            *[pair[1] for pair in pairs],
            *options,
            *[type(option) for option in options],
            return_lse,
            type(return_lse),
            os.environ.get("PAGEDKV_CHECK"),
        )
        hash(key)
    except (AttributeError, IndexError, KeyError, RuntimeError, TypeError, ValueError):
        return None
    return tuple([pair[0] for pair in pairs]), key


@lru_cache(maxsize=64)
def reader(kind: type) -> Callable[[Any], Read]:
    """What reads the address of an argument of this type, and everything else that matters of it as a hashable."""
    if issubclass(kind, (type(None), Real)):
        return _read_number
    framework = framework_of(kind)
    return _read_cupy if framework == "cupy" else _read_torch if framework == "torch" else _read_interface


def _low_bits(address: int) -> int:
    """Where in a vector an address is; -1 if there is no memory, which is not like any."""
    return address & _LOW_BITS if address else -1


def _read_number(x: Any) -> Read:
    return 0, (x, type(x))


def _read_cupy(x: Any) -> Read:
    data = x.data
    address = data.ptr
    return address, (x.shape, x.strides, x.dtype, data.device_id, _low_bits(address))


def _read_torch(x: Any) -> Read:
    if not x.is_cuda:
        raise ValueError("not on a device")
    address = x.data_ptr()
    return address, (x.shape, x.stride(), x.dtype, x.device, x.layout, x.is_neg(), _low_bits(address))


def _read_interface(x: Any) -> Read:
    interface = x.__cuda_array_interface__
    address, read_only = interface["data"]
    typestr = interface["typestr"]
    own = x.dtype if typestr[1] == "V" else None
    ordinal = interop.ordinal_of(address) if interop.has_several_devices() else 0
    key = (interface["shape"], interface.get("strides"), typestr, own, interface.get("mask"), read_only, ordinal)
    return address, (key, _low_bits(address))

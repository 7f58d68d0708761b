"""A plan on a GPU: the parameters of its launches are built once for a stream, and each run writes addresses there."""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Sequence
from typing import Any, NamedTuple

from numpy.lib.array_utils import byte_bounds

from ...arrays import Array, DeviceArgument, address_of
from ...calls import CACHES, AttentionCall
from ...layouts import FLOAT32
from .. import driver
from .plan import Plan

# What a run has addresses of, in this order, and then that of the LSE; 0 for what there is not.
ARRAYS = (
    *("q", *CACHES, "block_tables", "seq_lens", "query_starts"),
    *("alibi_slopes", "sinks", "leftpad", "mask", "k_scale", "v_scale", "out"),
)
_NUM_ADDRESSES = len(ARRAYS) + 1
_PARAMETER_BYTES = 8


class _Bound(NamedTuple):
    """A plan on one stream."""

    epoch: int  # of the stream's workspaces, whose addresses are among the values
    values: Any  # int64: the addresses of a run, then of workspaces, then scalars
    launches: list[tuple[Any, ...]]  # for `CudaDevice.start`, which read the values


class GpuPlan:
    """A plan that runs with the addresses of any call like its own.

    Parameters
    ----------
    plan : Plan
    call : AttentionCall
        The valid call that was planned; its arrays are shadows.

    Attributes
    ----------
    ordinal, stream : int
        Of the call.
    addresses : list of int
        Those of the call's arrays, by `ARRAYS`.
    arrays : dict of str to shadow
        The call's tables, lengths and arrays of options.
    """

    def __init__(self, plan: Plan, call: AttentionCall) -> None:
        self.ordinal, self.stream = call.placement.ordinal, call.placement.stream
        self.shape, self.dtype = call.q.shape, call.q.dtype
        self.arrays = plan.arrays
        arrays = {"q": call.q, **dict(zip(CACHES, call.caches, strict=False)), **plan.arrays}
        self.addresses = [address_of(arrays[name]) if name in arrays else 0 for name in ARRAYS]
        self._spans = [(ARRAYS.index(name), *_span(x)) for name, x in arrays.items() if x.size]
        self._out_span = (0, call.q.size * call.q.itemsize) if call.out is None else _span(call.out)
        self._plan = plan
        self._bound: dict[driver.CudaDevice, _Bound] = {}

    def overlaps_no_input(self, addresses: Sequence[int]) -> bool:
        """Whether `out` spans no memory that an input spans; if it does, they may still be interleaved."""
        first, last = self._out_span
        begin, end = addresses[-1] + first, addresses[-1] + last
        for i, start, stop in self._spans:
            address = addresses[i]
            if address + start < end and begin < address + stop:
                return False
        return True

    def attend(self, like: DeviceArgument, addresses: Sequence[int], out: Any, *, return_lse: bool) -> Any:
        """Run on the current stream of the framework of `like`, which new results belong to; `out` is None for one."""
        if out is None:
            out = like.empty("out", self.shape, self.dtype, "")
            addresses = (*addresses[:-1], like.address(out))
        lse = like.empty("lse", self.shape[:2], FLOAT32, "") if return_lse else None
        self.run(like.stream(), [*addresses, 0 if lse is None else like.address(lse)])
        return (out, lse) if return_lse else out

    def run(self, stream: int, addresses: Sequence[int]) -> None:
        """Launch on a stream with these addresses: by `ARRAYS`, and that of the LSE, 0 if there is none."""
        device = driver.cuda_device(self.ordinal, stream)
        with device.lock:  # of the values, too
            bound = self._bound.get(device)
            is_ready = bound is not None and bound.epoch == device.epoch
            if bound is None or not is_ready:
                bound = self._bound[device] = self._bind(device)
            bound.values[:_NUM_ADDRESSES] = addresses
            device.start(bound.launches, is_ready)

    def _bind(self, device: driver.CudaDevice) -> _Bound:
        plan = self._plan
        scratch = [device.scratch(name, nbytes) for name, nbytes in plan.workspaces]
        names = (*ARRAYS, "lse", *(name for name, _ in plan.workspaces))
        at = {name: i for i, name in enumerate(names)}
        given: list[int | float] = [*[0] * _NUM_ADDRESSES, *scratch, 0]  # the last is the null pointer
        wanted = []
        for x in plan.launches:
            pointers = [at.get(name, len(names)) for name in x.pointers]
            wanted.append((x, [*pointers, *range(len(given), len(given) + len(x.scalars))]))
            given += x.scalars
        values = (ctypes.c_int64 * len(given))(*(_bits(x) for x in given))
        first = ctypes.addressof(values)
        launches = []
        for x, places in wanted:
            parameters = (ctypes.c_void_p * len(places))(*(first + _PARAMETER_BYTES * i for i in places))
            launches.append((x.kernel, x.grid, x.shared_bytes, parameters))
        return _Bound(device.epoch, values, device.prepare_all(launches))


def _bits(x: float) -> int:
    """The 64 bits of a parameter: an int64 as it is, or those of a float64."""
    bits: int = x if isinstance(x, int) else struct.unpack("q", struct.pack("d", x))[0]
    return bits


def _span(x: Array) -> tuple[int, int]:
    """Where the bytes of an array begin and end, counted from its element 0."""
    (begin, end), address = byte_bounds(x), address_of(x)
    return begin - address, end - address

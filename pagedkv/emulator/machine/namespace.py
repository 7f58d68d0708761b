"""All that generated code calls, by the names that it uses."""

from __future__ import annotations

from typing import Any

import numpy as np

from ..errors import UnsupportedInstructionError
from ..ptx.instruction import Instruction
from ..ptx.types import VIEW_DTYPE, dtype_of
from ..state.frame import Frame
from ..state.order import Order
from ..translation.mem_op import Fence
from . import numeric
from .access import Access
from .async_copy import AsyncCopies
from .matrix import MatrixOps
from .printing import Printer
from .warp import WarpOps
from .warp_barriers import WarpBarriers
from .warpgroup import WarpgroupOps

_NUMPY = (
    "add subtract multiply divide fmin fmax minimum maximum negative absolute bitwise_and bitwise_or bitwise_xor "
    "invert logical_and logical_or logical_xor logical_not left_shift right_shift equal not_equal less less_equal "
    "greater greater_equal copyto"
)
_NUMERIC = (
    "mulhi idiv irem add_sat bfe bfi clz bfind brev prmt lop3 funnel dp4a fma32 round32 flush flushed to_int saturate "
    "load_narrow store_narrow pack_narrow to_tf32 fp8x2_unpack fp8x2_pack"
)
_WARP = "member shfl vote match redux elect activemask"
_MATRIX = "mma ldmatrix stmatrix movmatrix"
_WARPGROUP = "wgmma wgmma_fence wgmma_commit wgmma_wait proxy_fence misuse"


def _blend(dst: np.ndarray, mask: np.ndarray, value: Any) -> None:
    """Store dst[mask] = value[mask]; putmask is several times faster than where=."""
    if value.dtype == dst.dtype:
        np.putmask(dst, mask, value)
    else:
        np.copyto(dst, value, where=mask, casting="unsafe")


FUNCTIONS: dict[str, Any] = {
    "np": np,
    "blend": _blend,
    **{name: getattr(np, name) for name in _NUMPY.split()},
    **{name: getattr(numeric, name) for name in _NUMERIC.split()},
    **{name: dtype.type for name, dtype in VIEW_DTYPE.items()},
}


def operations(
    frame: Frame,
    access: Access,
    warp_barriers: WarpBarriers,
    warpgroups: WarpgroupOps | None,
    order: Order | None,
    params: dict[str, bytes],
) -> dict[str, Any]:
    """The calls of generated code that work on the memory and the lanes of one batch."""
    copies = AsyncCopies(frame, access)
    ns: dict[str, Any] = {}
    for space in ("global", "shared", "local", "generic"):
        for what in ("ld", "st", "atom"):
            if (what, space) != ("atom", "local"):
                ns[f"{what}_{space}"] = getattr(access, f"{what}_{space}")
    for names, ops in ((_WARP, WarpOps(frame)), (_MATRIX, MatrixOps(frame, access)), (_WARPGROUP, warpgroups)):
        ns.update((name, getattr(ops, name)) for name in names.split() if ops is not None)
    if warpgroups is None:
        ns["proxy_fence"] = lambda m: None  # for then nothing uses the asynchronous proxy

    def param(name: str, off: int, view: str) -> Any:
        return np.frombuffer(params[name], dtype_of(view), 1, off)[0]

    def unsupported(ins: Instruction, m: np.ndarray | None) -> None:
        if m is None or m.any():
            what = ins.operands[0] if ins.op == "unsupported" else f"instruction {ins.op}"
            raise UnsupportedInstructionError(
                f"the emulator does not model this: {what}; kernel {frame.name}; PTX line {ins.line}: {ins.text}"
            )

    def fence(what: Fence, m: np.ndarray | None) -> None:
        if order is not None:
            order.fence(what, m)

    ns.update(
        vprintf=Printer(access).vprintf, param=param, unsupported=unsupported, warp_sync=warp_barriers.sync, fence=fence
    )
    ns.update(async_copy=copies.copy, async_commit=copies.commit, async_wait=copies.wait)
    return ns

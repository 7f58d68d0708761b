"""The online softmax beside a product that still reads P and adds to O."""

from __future__ import annotations

from ....device.intrinsics.warpgroup import fence_proxy
from ....device.language import float32, uint32
from ....device.source import Steps, device_function
from ...config import TensorConfig
from ..softmax import make_exponentials, make_hide_unseen, make_logits
from .shape import WgmmaShape


def make_softmax(config: TensorConfig, shape: WgmmaShape) -> Steps:
    """The device functions ``exponentiate``, ``finish_exponentials``, ``rescale`` and ``round_p``.

    The caller waits for the product before it rescales O, if a pivot has moved, and rounds the exponentials to P.
    """
    logits, hide_unseen = make_logits(config, shape), make_hide_unseen(config, shape)
    exponentials, rescale, round_p = make_exponentials(config, shape)

    @device_function
    def exponentiate(registers, largest_exponent, where, tiles, first, warp, lane):
        """Turn S into exponentials, and return whether a pivot has moved."""
        mine = uint32(first + uint32(uint32(lane & 3) << 1))
        logits(registers, tiles.options, mine, uint32(0))
        if uint32(first - tiles.span.unmasked) >= tiles.span.num_unmasked:
            hide_unseen(registers, tiles.visible, where, mine, warp, uint32(lane >> 2))
        return exponentials(registers, largest_exponent, tiles.unit)

    @device_function
    def finish_exponentials(registers):
        """Compute the exponentials before what follows: ptxas moves a wait up among them, but past no branch."""
        if float32(registers.sums[0] + registers.sums[1]) < float32(0):  # never
            fence_proxy()

    return Steps(exponentiate, finish_exponentials, rescale, round_p)

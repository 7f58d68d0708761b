"""What tensor cores and CUDA cores share of storing output rows."""

from __future__ import annotations

from typing import Any

from ..device.intrinsics.thread import address, larger, multiply_and_add, store_4
from ..device.intrinsics.warp import reciprocal
from ..device.language import float32, int64, uint32
from ..device.logits import LOG2E, NONE
from ..device.merging import lse_of, weight_of
from ..device.source import device_function
from .config import NUM_THREADS


@device_function
def finish(total, shift, has_sink, sink):
    """The factor of a row of O and its LSE, from the sum of its exponentials and its shift.

    The sink is merged as one more state (device/merging.py): the larger of its logit and the pivot is the new pivot.
    """
    pivot, weight = float32(-shift), float32(0)
    if has_sink:
        logit = float32(sink * LOG2E)
        pivot = larger(pivot, logit)
        weight = weight_of(logit, pivot)
    own = weight_of(float32(-shift), pivot)
    denominator = multiply_and_add(total, own, weight)
    if total == float32(0):
        return float32(0), sink if has_sink else NONE
    return float32(own * reciprocal(denominator)), lse_of(pivot, denominator)


def make_store_nothing(rows: int, row_words: int, num_threads: int = NUM_THREADS) -> Any:
    """The device function ``store_nothing(output, item, group_size, thread)``: rows of zeros, and LSEs of -inf."""
    ROWS, ROW_WORDS, STEP = rows, row_words, num_threads

    @device_function
    def store_nothing(output, item, group_size, thread):
        first = uint32(0)
        while first < uint32(ROWS * ROW_WORDS):
            i = uint32(first + thread)
            row = uint32(item.first_row + uint32(i // uint32(ROW_WORDS)))
            word = uint32(i % uint32(ROW_WORDS))
            if row < item.num_rows:
                token = uint32(row // group_size)
                head = uint32(row - uint32(token * group_size))
                target = output.address + int64(token) * output.token_stride + int64(head) * output.head_stride
                store_4(target + int64(word) * 4, uint32(0))
                if word == 0 and address(output.lse) != 0:
                    output.lse[output.lse_row + int64(token) * output.num_heads + int64(head)] = NONE
            first = uint32(first + STEP)

    return store_nothing

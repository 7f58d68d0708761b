"""The scales of a cache: one number for all KV heads, or an array with one for each."""

from __future__ import annotations

from .intrinsics.thread import address, bits_float
from .language import uint32
from .source import device_function


@device_function
def scale_of(scales, number, kv_head):
    """A KV head's scale: from the array if there is one, else the float32 whose bits are `number`."""
    return scales[kv_head] if address(scales) != 0 else bits_float(uint32(number))

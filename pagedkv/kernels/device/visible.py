"""Which keys a row sees by its position: the one rule of all attention kernels; padding and masks come on top."""

from __future__ import annotations

from typing import Any, NamedTuple

from .language import int32, int64, types, uint32
from .source import device_function


class Visible(NamedTuple):
    """The scalars of `pagedkv.visible.Visible`, as a parameter of kernels."""

    before: Any
    after: Any


VISIBLE = types.NamedUniTuple(int64, len(Visible._fields), Visible)


@device_function
def first_key(position, visible):
    """The first key that a row at this position sees."""
    return uint32(max(int32(int32(position) - int32(visible.before)), int32(0)))


@device_function
def first_key_of_last(seq_len, visible):
    """The first key that the last row of a sequence sees; 0 of an empty one."""
    return first_key(uint32(max(seq_len, uint32(1)) - uint32(1)), visible)


@device_function
def last_key(position, visible, seq_len):
    """The last key of a sequence that a row at this position sees."""
    return min(uint32(position + uint32(visible.after)), uint32(seq_len - 1))

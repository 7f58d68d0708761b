"""Loads and stores of vectors of neighbouring elements, from and to a thread's array of float32.

A vector has a power of two of elements, 2 to 32 bytes, and begins at a multiple of its size or of 16 bytes.
"""

from __future__ import annotations

from typing import Any

from .conversions import narrow, unpack
from .intrinsics.thread import (
    load_2,
    load_4,
    load_8,
    load_16,
    load_written_2,
    load_written_4,
    load_written_8,
    load_written_16,
    store_2,
    store_4,
    store_8,
    store_16,
)
from .language import cuda, uint16, uint32
from .sizes import ELEMENT_BITS
from .source import device_function

_LOADS = {2: load_2, 4: load_4, 8: load_8, 16: load_16}
_LOADS_OF_WRITTEN = {2: load_written_2, 4: load_written_4, 8: load_written_8, 16: load_written_16}


def make_load(kind: str, num_elements: int, *, written: bool = False) -> Any:
    """The device function (values, row, vector) that fills `values` with the vector-th num_elements elements of a row.

    `written` says that the launch may also write them.
    """
    nbytes = num_elements * ELEMENT_BITS[kind] // 8
    per_load = min(nbytes, 16)
    num_loads, num_words, per_word = nbytes // per_load, max(1, per_load // 4), 32 // ELEMENT_BITS[kind]
    load_part = (_LOADS_OF_WRITTEN if written else _LOADS)[per_load]
    is_tuple, widen = per_load > 4, unpack(kind)
    last = num_elements - 1

    @device_function
    def load(values, row, vector):
        source = row + vector * nbytes
        for i in range(num_loads):
            part = load_part(source + i * per_load)
            for j in range(num_words):
                wide = widen(part[j]) if is_tuple else widen(uint32(part))
                for k in range(per_word):
                    # A lone 16-bit element has a word to itself.
                    values[min((i * num_words + j) * per_word + k, last)] = wide[min(k, last)]

    return load


def make_store(kind: str, num_elements: int) -> Any:
    """The device function (target, values) that stores values at an address as elements of a kind."""
    itemsize = ELEMENT_BITS[kind] // 8
    round_ = narrow(kind)
    if itemsize == 2 and num_elements == 1:

        @device_function
        def store_half(target, values):
            store_2(target, uint16(round_(values[0])))

        return store_half
    num_words = num_elements * itemsize // 4
    halves = itemsize == 2

    @device_function
    def store(target, values):
        words = cuda.local.array(num_words, uint32)
        for i in range(num_words):
            if halves:
                words[i] = uint32(round_(values[2 * i]) | uint32(round_(values[2 * i + 1]) << uint32(16)))
            else:
                words[i] = round_(values[i])
        if num_words == 1:
            store_4(target, words[0])
        elif num_words == 2:
            store_8(target, words[0], words[1])
        else:
            for i in range(num_words // 4):
                at = 4 * i
                store_16(target + 16 * i, words[at], words[at + 1], words[at + 2], words[at + 3])

    return store

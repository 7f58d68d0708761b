"""StateArrays: the states of sequences, one row of some named arrays for each state slot."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from ...arrays import to_host
from ...layouts import float_dtype
from ..arguments import as_int
from ..ids import Int64Array
from .arrays import Arrays

Spec = tuple[tuple[int, ...], np.dtype[Any]]


class StateArrays:
    """The arrays of all states, zero at first.

    Parameters
    ----------
    arrays : Arrays
    specs : dict
        From `specs_of`.
    num_slots : int

    Attributes
    ----------
    by_name : dict of str to array
        (num_slots, *shape) each.
    specs : dict
        As given.

    Raises
    ------
    MemoryError
        The device or the host has no room for them.
    """

    def __init__(self, arrays: Arrays, specs: dict[str, Spec], num_slots: int) -> None:
        self._arrays, self.specs = arrays, specs
        self.slot_bytes = bytes_of_state(specs)
        try:
            self.by_name = {name: arrays.zeros((num_slots, *shape), dtype) for name, (shape, dtype) in specs.items()}
        except (MemoryError, RuntimeError, ValueError) as error:  # of NumPy or CuPy, of torch, of sizes beyond 64 bits
            needed, free = num_slots * self.slot_bytes, arrays.free_bytes()
            if free is None or needed <= free:
                raise
            raise MemoryError(
                f"state_memory must fit into the {free:,} bytes of memory that are free, got {num_slots:,} states, "
                f"which take {needed:,} bytes"
            ) from error

    def read(self, slots: Int64Array) -> dict[str, Any]:
        """Copy states out, (n, *shape) each; zeros where a slot is negative."""
        index, empty = self._arrays.asarray(np.maximum(slots, 0)), (slots < 0).nonzero()[0]
        states = {name: array[index] for name, array in self.by_name.items()}
        if len(empty):
            index = self._arrays.asarray(empty)
            for state in states.values():
                state[index] = 0
        return states

    def write(self, index: Any, values: Mapping[str, Any]) -> None:
        """Copy states, from `checked`, into distinct slots, an array of the module."""
        for name, array in self.by_name.items():
            array[index] = values[name]

    def to_bytes(self, states: Mapping[str, Any]) -> list[npt.NDArray[np.uint8]]:
        """Copy the bytes of each state of one sequence to the host; `states` are from `read`."""
        return [to_host(self._arrays.as_bytes(states[name])) for name in self.by_name]

    def from_bytes(self, parts: Sequence[npt.NDArray[np.uint8]]) -> dict[str, Any]:
        """What `to_bytes` had, as `write` takes it."""
        values = {}
        for (name, array), (shape, _), part in zip(self.by_name.items(), self.specs.values(), parts, strict=True):
            values[name] = self._arrays.asarray(part.copy()).view(array.dtype).reshape(1, *shape)
        return values

    def checked(self, values: Any, num_seqs: int) -> dict[str, Any]:
        """The states of so many sequences as `write` takes them, or TypeError or ValueError.

        Values that share memory with the slots are copied: torch would refuse them, and writing one array would change
        the values for another.
        """
        if not isinstance(values, Mapping):
            raise TypeError(f"values must be a mapping from the names of states to arrays, got {type(values).__name__}")
        if set(values) != set(self.specs):
            raise ValueError(f"values must have the states {', '.join(self.specs)}, got {', '.join(map(str, values))}")
        for name, (shape, dtype) in self.specs.items():
            value, array = values[name], self.by_name[name]
            if not isinstance(value, type(array)):
                raise TypeError(f"values[{name!r}] must be a {type(array).__name__}, got {type(value).__name__}")
            if tuple(value.shape) != (num_seqs, *shape):
                raise ValueError(
                    f"values[{name!r}] must have shape (num_seqs, ...) = {(num_seqs, *shape)}, got {tuple(value.shape)}"
                )
            if value.dtype != array.dtype:
                raise TypeError(f"values[{name!r}] must have dtype {dtype.name}, got {value.dtype}")
            if getattr(value, "device", None) != getattr(array, "device", None):
                raise ValueError(f"values[{name!r}] must be on {array.device}, got {value.device}")
        slots = [*self.by_name.values()]
        return {name: self._arrays.apart(values[name], slots) for name in self.specs}


def specs_of(states: Any) -> dict[str, Spec]:
    """Check what a caller says of the states of one sequence: names, and the shape and dtype of each."""
    expected = 'states must be a dict from names to (shape, dtype), such as {"conv": ((6, 512, 4), "bfloat16")}'
    if not isinstance(states, Mapping):
        raise TypeError(f"{expected}, got {type(states).__name__}")
    if not states:
        raise ValueError(f"{expected}, got none")
    specs: dict[str, Spec] = {}
    for name, spec in states.items():
        if not isinstance(name, str) or not isinstance(spec, (tuple, list)) or len(spec) != 2:
            raise TypeError(f"{expected}, got {name!r}: {spec!r}")
        shape, dtype = spec
        if not isinstance(shape, (tuple, list)):
            raise TypeError(f"{expected}, got {name!r}: {spec!r}")
        sizes = tuple(as_int(f"states[{name!r}]", size, minimum=1) for size in shape)
        specs[name] = sizes, float_dtype(dtype)
    return specs


def bytes_of_state(specs: dict[str, Spec]) -> int:
    """The bytes of one state."""
    return sum(math.prod(shape) * dtype.itemsize for shape, dtype in specs.values())

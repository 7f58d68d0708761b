"""Sizes: the bytes of K and V of a model, and the blocks that fit into an amount of memory."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from fractions import Fraction
from typing import Any, NamedTuple

import numpy as np

from ..layouts import KvFormat, require_head_dim
from ..typing import KvDtype
from .arguments import as_int, per_layer
from .device.arrays import Arrays
from .device.layer_caches import bytes_of_block, bytes_of_layers
from .groups import LayerGroups, Shape

_UNITS = {"B": 1} | {f"{prefix}iB": 1024 ** (i + 1) for i, prefix in enumerate("KMGT")}
_UNITS |= {"kB": 1000} | {f"{prefix}B": 1000 ** (i + 1) for i, prefix in enumerate("KMGT")}


def kv_bytes(
    num_tokens: int,
    num_layers: int,
    num_kv_heads: int | Sequence[int],
    head_dim: int | Sequence[int],
    dtype: Any = "float32",
    *,
    kv_dtype: KvDtype | None = None,
    block_size: int = 1,
    windows: Any = None,
    same_as: Mapping[int, int] | None = None,
    group_size: int | None = None,
) -> int:
    """Bytes that the K and V of a sequence take in all layers: 2 * num_layers * Hkv * D * itemsize for each slot.

    Rows of int8 take D + 4 bytes, with their scale. That is what `PagedKVCache` allocates for as many slots; scales of
    an fp8 cache are a few numbers more. With windows it is what a sequence of this length holds while it decodes, in
    whole blocks of `group_size` layers.

    Parameters
    ----------
    num_tokens : int
        At least 0.
    num_layers : int
        Of the model, at least 1.
    num_kv_heads, head_dim : int, or list of int
        For all layers, or for each; at least 1, and D a multiple of 8 from 8 to 512.
    dtype : dtype-like
        float32, float16 or bfloat16.
    kv_dtype : str or None
        "fp8_e4m3", "fp8_e5m2" or "int8" for a cache in 8 bits.
    block_size : int
        P: the tokens are rounded up to whole blocks.
    windows, same_as, group_size
        As in `PagedKVCache`. With a group_size of 1 and one shape no group is padded: the bytes are those that the
        windows need.

    Returns
    -------
    int

    Raises
    ------
    TypeError, ValueError
        An argument is not as described.

    Examples
    --------
    Llama 3.1 8B, a sequence of 1,000 tokens in blocks of 16:

    >>> from pagedkv import kv_bytes
    >>> llama = {"num_layers": 32, "num_kv_heads": 8, "head_dim": 128, "dtype": "bfloat16"}
    >>> kv_bytes(1000, **llama, block_size=16) / 2**20
    126.0

    Gemma 3 27B at 32,768 tokens, in which five of six layers see the last 1,024 tokens, in MiB:

    >>> gemma = {"num_layers": 62, "num_kv_heads": 16, "head_dim": 128, "dtype": "bfloat16", "block_size": 16}
    >>> windows = [None if layer % 6 == 5 else 1024 for layer in range(62)]
    >>> [kv_bytes(32768, **gemma, windows=w) / 2**20 for w in (None, windows)]
    [15872.0, 3006.875]
    """
    num_tokens = as_int("num_tokens", num_tokens)
    num_layers = as_int("num_layers", num_layers, minimum=1)
    shapes = shapes_of(num_layers, num_kv_heads, head_dim)
    block_size = as_int("block_size", block_size, minimum=1)
    sizes: Any = KvFormat.of(dtype, kv_dtype), "NHD", block_size
    if len(shapes) == 1 and windows is None and same_as is None and group_size is None:
        [of_layer] = bytes_of_layers(shapes, *sizes)
        return num_layers * sum(of_layer) * -(-num_tokens // block_size)
    of_groups: dict[str, Any] = {"same_as": same_as, "group_size": group_size, "shapes": shapes}
    groups = LayerGroups.of(windows, num_layers, block_size, **of_groups)
    return bytes_of_block(groups, shapes, *sizes) * groups.held(num_tokens)


def shapes_of(num_layers: int, num_kv_heads: Any, head_dim: Any) -> list[Shape]:
    """Check Hkv and D of the layers: a list with one if all have the same, or else with one for each."""
    for name, value in (("num_kv_heads", num_kv_heads), ("head_dim", head_dim)):
        if hasattr(value, "tolist") and not isinstance(value, np.integer):
            raise TypeError(
                f"{name} must be an int, or a list with one for each layer, got {type(value).__name__}: pass its "
                "tolist()"
            )
    if not isinstance(num_kv_heads, (list, tuple)) and not isinstance(head_dim, (list, tuple)):
        num_layers = 1  # that of all
    heads = [as_int("num_kv_heads", n, minimum=1) for n in per_layer("num_kv_heads", num_kv_heads, num_layers)]
    dims = [as_int("head_dim", n) for n in per_layer("head_dim", head_dim, num_layers)]
    for dim in dims:
        require_head_dim(dim)
    shapes = [*zip(heads, dims, strict=True)]
    return shapes if len({*shapes}) > 1 else shapes[:1]


class Capacity(NamedTuple):
    """What a `PagedKVCache` has room for.

    Attributes
    ----------
    num_blocks, num_states, max_seqs : int
    """

    num_blocks: int
    num_states: int
    max_seqs: int

    @classmethod
    def of(
        cls,
        arrays: Arrays,
        *,
        block_bytes: int,
        state_bytes: int,
        num_blocks: int | None,
        memory: str | int | float | None,
        max_seqs: int,
        state_memory: str | int | float | None,
    ) -> Capacity:
        """Divide memory into blocks of `block_bytes` and states of `state_bytes`, 0 if there are none.

        Raises
        ------
        TypeError, ValueError
            An argument is not as `PagedKVCache` describes it.
        """
        if (num_blocks is None) == (memory is None):
            raise ValueError("either num_blocks or memory must be given, and not both")
        room = 0 if memory is None else bytes_of("memory", memory, arrays)
        num_states = taken = 0  # the latter are the bytes of states that come out of `memory`
        if state_bytes:
            max_seqs = as_int("max_seqs", max_seqs, minimum=1)
            if state_memory is not None:
                room_of_states = bytes_of("state_memory", state_memory, arrays)
                num_states = count_in("state_memory", room_of_states, state_bytes, "one state in all layers")
            else:
                of_kv = room // 2 if num_blocks is None else as_int("num_blocks", num_blocks) * block_bytes
                num_states = min(2 * max_seqs, max(2, of_kv // state_bytes))
                taken = num_states * state_bytes
            max_seqs = min(max_seqs, num_states)
        elif state_memory is not None:
            raise ValueError(f"state_memory is for states, which must say what they are then, got {state_memory!r}")
        if num_blocks is None:
            unit = "one block in all layers beside the states" if taken else "one block in all layers"
            num_blocks = count_in("memory", room, block_bytes, unit, taken)
        return cls(num_blocks, num_states, max_seqs)


def count_in(name: str, num_bytes: int, unit_bytes: int, unit: str, taken: int = 0) -> int:
    """How many units, of which at least one must, fit into an amount of memory beside what is taken of it."""
    if num_bytes < taken + unit_bytes:
        raise ValueError(f"{name} must be at least {taken + unit_bytes} bytes, {unit}, got {num_bytes}")
    return (num_bytes - taken) // unit_bytes


def bytes_of(name: str, memory: str | int | float, arrays: Arrays) -> int:
    """Convert an amount of memory to bytes.

    Parameters
    ----------
    name : str
        That of the argument.
    memory : str, int or float
        "2GiB", a number of bytes, or a share of what is free now on the device of `arrays`, between 0.0 and 1.0.
    """
    if isinstance(memory, bool) or not isinstance(memory, (str, int, float, np.integer, np.floating)):
        raise TypeError(f"{name} must be a str, an int or a float, got {type(memory).__name__}")
    if isinstance(memory, str):
        match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([kKMGT]?i?B)\s*", memory)
        if match is None or match[2] not in _UNITS:
            raise ValueError(
                f"{name} must be a number and a unit of B, KB, KiB, MB, MiB, GB, GiB, TB and TiB, such as 2GiB, "
                f"got {memory!r}"
            )
        return int(Fraction(match[1]) * _UNITS[match[2]])
    if isinstance(memory, (float, np.floating)):
        if not 0.0 < memory <= 1.0:
            raise ValueError(f"{name} must be a share above 0.0 and at most 1.0, or bytes as an int, got {memory}")
        if (free := arrays.free_bytes()) is None:
            raise ValueError(
                f"{name} must be bytes, 2GiB say, on a system that does not say what is free, got {memory}"
            )
        return int(memory * free)
    return int(memory)

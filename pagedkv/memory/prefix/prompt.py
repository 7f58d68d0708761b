"""Prompt: the tokens that a sequence begins with."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from ...arrays import to_host
from ..arguments import MAX_INT32, as_int, as_ints, refuse_bools
from .digests import NO_SALT, root_digest


class Prompt(NamedTuple):
    """The tokens that a sequence begins with, if they are known.

    Attributes
    ----------
    num_tokens : int
    tokens : (num_tokens,) int32 or None
    root : bytes
        The root digest of its salt.
    salt : str, bytes or None
        The salt itself, which events name.
    """

    num_tokens: int
    tokens: npt.NDArray[np.int32] | None = None
    root: bytes = NO_SALT
    salt: str | bytes | None = None


class Added(NamedTuple):
    """The sequence that `PagedKVCache.add` started.

    Attributes
    ----------
    seq : int
        The handle of the sequence.
    num_cached : int
        How many of its first tokens have their K and V in the cache already.
    """

    seq: int
    num_cached: int


def prompt_of(tokens: int | Sequence[int], salt: str | bytes | None) -> Prompt:
    """Read a number of tokens, or their ids, and a salt."""
    if isinstance(tokens, (int, np.integer)):
        return Prompt(as_int("num_tokens", tokens), None, root_digest(salt), salt)
    return known_prompt(tokens, salt)


def known_prompt(tokens: Sequence[int], salt: str | bytes | None) -> Prompt:
    """Read token ids and a salt."""
    root, ids = root_digest(salt), ids_of(tokens)
    return Prompt(len(ids), ids, root, salt)


def ids_of(tokens: Any) -> npt.NDArray[np.int32]:
    """Copy token ids from a list or an array of any framework to a new array.

    Raises
    ------
    TypeError, ValueError
        An id is not an integer, or not in 0..2**31 - 1.
    """
    if isinstance(tokens, str):
        raise TypeError("tokens must be ids, got a text: give what a tokenizer makes of it")
    if isinstance(tokens, (list, tuple)):
        # This takes a third of the time of numpy.asarray; as_ints says what is wrong with anything else.
        with suppress(TypeError, OverflowError):
            small = np.frombuffer(array("I", tokens), np.int32)
            if not len(small) or (least := small[small.argmin()]) > 1:
                return small
            refuse_bools("tokens", [tokens[i] for i in (small.view(np.uint32) < 2).nonzero()[0].tolist()])
            if least >= 0:
                return small
    ids = as_ints("tokens", to_host(tokens))
    unsigned_ids = ids.view(np.uint64)
    if len(ids) and unsigned_ids[unsigned_ids.argmax()] > MAX_INT32:  # negative ones are the largest
        raise ValueError(f"tokens must be ids in 0..2**31 - 1, got {ids[(ids < 0) | (ids > MAX_INT32)][0]}")
    return ids.astype(np.int32)

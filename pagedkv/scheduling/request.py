"""Request: a text in the making."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

NOT_RUNNING = -1


@dataclass(eq=False, slots=True)
class Request:
    """What a scheduler knows about a text, whether it runs or not.

    Attributes
    ----------
    number : int
        What callers name it by.
    tokens : (num_tokens,) int32
        Its tokens so far; while it runs, those that it started to run with.
    num_prompt, max_len : int
        How many it has at the start of this turn, and at most at the end.
    priority : int
    key : int
        Its place in the order: the smallest is the first.
    salt : str, bytes or None
    root : bytes
        The root digest of its salt.
    resumable : bool
        Whether it stays when a turn ends.
    num_cached : int or None
        How many of its tokens the prefix cache had when this turn started; None until then.
    lane : int
        Its lane while it runs, else NOT_RUNNING.
    """

    number: int
    tokens: npt.NDArray[np.int32]
    num_prompt: int
    max_len: int
    priority: int
    key: int
    salt: str | bytes | None
    root: bytes
    resumable: bool
    num_cached: int | None = None
    lane: int = NOT_RUNNING

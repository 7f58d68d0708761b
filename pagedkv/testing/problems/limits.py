"""Which problems are drawn: the layouts, dtypes, sizes and options that a function takes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ...layouts import FP8_KINDS, LAYOUTS
from .attention import FLOATS, POISONS

KV_DTYPES = (*FLOATS, *FP8_KINDS)
STRIDES = ("own", "halves", "strided")
# Options that may have another value than their default.
OPTIONS = (
    *("scale", "softcap", "alibi_slopes", "window", "sinks", "causal", "k_scale"),
    *("window_right", "leftpad", "mask", "seq_slopes"),
)
# By the largest power of two up to 64 that divides head_dim, which says whether the CPU has rows in whole chunks.
HEAD_DIMS = {
    8: (8, 24, 40, 72, 120, 504),
    16: (16, 48, 80, 80, 112, 176),
    32: (32, 32, 96, 96, 160, 224),
    64: (64, 64, 128, 128, 192, 256, 512),
}
_ANY_BLOCK_SIZE = (1, 2, 3, 7, 16, 24, 32, 256)
BLOCK_SIZES = {"NHD": _ANY_BLOCK_SIZE, "HND": _ANY_BLOCK_SIZE, "vllm": (8, 16, 32, 256)}
GROUP_SIZES = (1, 2, 3, 4, 5, 7, 8, 16, 48)


@dataclass(frozen=True)
class Limits:
    """Values that problems are drawn from; each problem has one of each.

    Attributes
    ----------
    layouts, q_dtypes, kv_dtypes : tuple of str
        Names as in :class:`Spec`. A cache that is not fp8 is paired with queries of its own dtype or float32, those of
        `q_dtypes` that there are.
    head_dims, nums_kv_heads, group_sizes : tuple of int
    block_sizes : tuple of int, optional
        None: some that the layout can have.
    strides : tuple of str
        "own" caches, "halves" of one array, "strided": gaps on every axis.
    contiguous : bool
        q has no gaps either.
    finite_left_of_window : bool
        Keys and values left of the window are not poisoned in decode.
    options : tuple of str
        Which of scale, softcap, alibi_slopes, window, sinks, causal and k_scale (with v_scale), and in prefill
        window_right, leftpad and mask, may be other than their default; seq_slopes: slopes for each sequence.
    score_mods : tuple
        Functions, or None for none.
    poisons : tuple of str
        What fills the unused: "nan", "inf", "huge" or "zero".
    needles : bool
        Some problems have keys that take all the weight of their heads, and values that say where they lie.
    longest : int
        Tokens of a sequence.
    elements : int
        Elements of the K of a sequence, and a quarter as many in prefill; for a second block within `longest`
        it may be more.
    most_seqs : int
        Sequences of a batch.

    Examples
    --------
    >>> from pagedkv.testing import Limits, decode_problems
    >>> strategy = decode_problems(Limits(layouts=("NHD",), head_dims=(64, 128), longest=100))
    """

    layouts: tuple[str, ...] = LAYOUTS
    q_dtypes: tuple[str, ...] = tuple(FLOATS)
    kv_dtypes: tuple[str, ...] = KV_DTYPES
    head_dims: tuple[int, ...] = HEAD_DIMS[64]
    block_sizes: tuple[int, ...] | None = None
    nums_kv_heads: tuple[int, ...] = (1, 2, 3, 4, 8)
    group_sizes: tuple[int, ...] = GROUP_SIZES
    strides: tuple[str, ...] = STRIDES
    contiguous: bool = False
    finite_left_of_window: bool = False
    options: tuple[str, ...] = OPTIONS
    score_mods: tuple[Callable[..., Any] | None, ...] = (None,)
    poisons: tuple[str, ...] = tuple(POISONS)
    needles: bool = True
    longest: int = 1100
    elements: int = 2**21
    most_seqs: int = 4

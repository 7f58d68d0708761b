"""Limits: the layouts, dtypes, sizes and options from which problems are drawn."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from ...layouts import FORMATS, LAYOUTS, VECTOR_BYTES
from .attention import FLOATS, POISONS

KV_DTYPES = tuple(FORMATS)
STRIDES = ("own", "halves", "strided")
# Options that may differ from their default.
OPTIONS = (
    *("scale", "softcap", "alibi_slopes", "window", "sinks", "causal", "k_scale"),
    *("window_right", "leftpad", "mask", "seq_slopes"),
)
# By the largest power of two up to 64 that divides head_dim, on which the CPU's code for a row depends.
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
    """The values from which problems are drawn; each problem has one value of each kind.

    Attributes
    ----------
    layouts, q_dtypes, kv_dtypes : tuple of str
        Names as in :class:`Spec`. A cache that is not fp8 is paired with queries of its own dtype or float32, if
        `q_dtypes` has them.
    head_dims, nums_kv_heads, group_sizes : tuple of int
    block_sizes : tuple of int, optional
        None for a selection that the layout supports.
    strides : tuple of str
        K and V are "own" arrays, "halves" of one array, or "strided" with gaps on every axis.
    contiguous : bool
        Whether q has no gaps either.
    finite_left_of_window : bool
        Whether keys, values and blocks left of the windows of a sequence are its own, instead of poison.
    options : tuple of str
        Which of scale, softcap, alibi_slopes, window, sinks, causal and k_scale (with v_scale), and in prefill
        window_right, leftpad and mask, may be other than their default; seq_slopes: slopes for each sequence.
    score_mods : tuple
        Functions, or None for none.
    poisons : tuple of str
        Contents of unused memory: "nan", "inf", "huge" or "zero".
    needles : bool
        Whether some problems have keys that take all the weight of their heads, and values that encode their place.
    longest : int
        The most tokens of a sequence.
    elements : int
        The most elements in the K of a sequence, a quarter as many in prefill; more if that is needed for a second
        block within `longest`.
    most_seqs : int
        The most sequences of a batch.

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


def fits(head_dim: int, kv_dtype: str, layouts: Sequence[str]) -> bool:
    """Whether all of the layouts can have heads of this size."""
    return "vllm" not in layouts or head_dim * FORMATS[kv_dtype].stored.itemsize % VECTOR_BYTES == 0

"""The public operation on queries and keys before attention: rotary position embedding."""

from __future__ import annotations

from typing import Any

from ..arrays import between_graphs
from ..backends import backend_of
from ..typing import Backend
from ..validation.rotary import rotary_call


@between_graphs
def apply_rotary(
    q: Any,
    k: Any,
    cos: Any,
    sin: Any,
    positions: Any,
    *,
    interleaved: bool = False,
    rotary_dim: int | None = None,
    backend: Backend = "auto",
    out: Any = None,
    check: bool | None = None,
) -> tuple[Any, Any]:
    """Apply rotary position embedding: rotate pairs of dims of q and k by angles that depend on the position.

    The pair (a, b) becomes ``(a * cos - b * sin, b * cos + a * sin)``, in float32, rounded once to q's dtype.

    Parameters
    ----------
    q : (num_tokens, num_heads, head_dim) array
        float32, float16 or bfloat16; head_dim is a multiple of 8 from 8 to 512. Any outer strides.
    k : (num_tokens, num_kv_heads, head_dim) array or None
        Of q's dtype.
    cos, sin : (max_positions, rotary_dim / 2) array
        Row p has the cosines and sines of the angles at position p, one for each pair; float32, or of q's dtype. They
        may be halves of one table. Dims from rotary_dim on do not change. The tables decide how angles depend on
        positions, and so any scaling to longer contexts. Those of transformers have each column twice: pass the first
        half of the columns.
    positions : (num_tokens,) int32 or int64 array
        The position of each token in its sequence, from 0 to max_positions - 1.
    interleaved : bool
        False: dim i and dim i + rotary_dim / 2 are a pair, as in GPT-NeoX, Llama and Qwen of transformers. True: dims
        2i and 2i + 1, as in GPT-J, and in Llama as Meta published it.
    rotary_dim : int, optional
        How many dims are rotated, as a check: the tables must have half as many columns. Without it, tables on the host
        that have each column twice are refused; those on a device are not read.
    backend : {"auto", "cpu", "cuda", "emulator"} or EmulatorDevice
        "auto" follows the arrays. An `emulator.EmulatorDevice` decides what is checked and counted.
    out : (array, array or None), optional
        Where to write the results: arrays like q and k, writable, with no element twice and no overlap with another
        argument, or q and k themselves: ``out=(q, k)`` rotates in place. The second is None if k is None.
    check : bool, optional
        As in :func:`~pagedkv.decode_attention`, for positions on a device; tokens at bad ones are not written.

    Returns
    -------
    q, k : array
        The rotated arrays, in q's dtype and framework, or the objects given as `out`; None if k is None.

    Raises
    ------
    TypeError
        An argument is not an array, or has the wrong dtype or type; `out` is not a pair.
    ValueError
        A shape, stride, alignment, device or option is wrong; the tables have each column twice; an output is read-only
        or overlaps.
    IndexError
        A position is outside 0..max_positions-1.
    BackendUnavailableError
        The backend that the arrays or the caller ask for is not available.

    Notes
    -----
    After an error nothing has been written; after an interrupt (Ctrl-C) both outputs are unchanged or both complete.
    In the emulator the CUDA kernel gives the same bits as the CPU, except those of a NaN.

    References
    ----------
    .. [1] Su et al., "RoFormer: Enhanced Transformer with Rotary Position Embedding", 2021.

    Examples
    --------
    A quarter turn, which maps each pair (a, b) to (-b, a):

    >>> import numpy as np
    >>> import pagedkv
    >>> q = np.arange(8, dtype=np.float32).reshape(1, 1, 8)
    >>> cos, sin = np.zeros((1, 4), np.float32), np.ones((1, 4), np.float32)
    >>> rotated, _ = pagedkv.apply_rotary(q, None, cos, sin, np.array([0]), rotary_dim=8)
    >>> rotated
    array([[[-4., -5., -6., -7.,  0.,  1.,  2.,  3.]]], dtype=float32)
    """
    call = rotary_call(
        q, k, cos, sin, positions,
        rotary_dim=rotary_dim, interleaved=interleaved, out=out, backend=backend, check=check,
    )  # fmt: skip
    if call.out is not None:
        returned, results = tuple(out), call.out
    else:
        remedy = "give the memory of the results as out="
        new_q, q_result = call.placement.new_array("q", call.q.shape, call.q.dtype, remedy)
        returned, results = (new_q, None), (q_result, None)
        if call.k is not None:
            new_k, k_result = call.placement.new_array("k", call.k.shape, call.k.dtype, remedy)
            returned, results = (new_q, new_k), (q_result, k_result)
    backend_of(call.placement).apply_rotary(call, *results)
    return returned

"""The public operations on the contents of caches: write, gather, copy and swap."""

from __future__ import annotations

from typing import Any

from ..arrays import between_graphs
from ..backends import backend_of
from ..typing import Backend, KvDtype, Layout
from ..validation.caches import copy_call, gather_call, swap_call, write_call


@between_graphs
def write_kv(
    k: Any,
    v: Any,
    k_cache: Any,
    v_cache: Any,
    slots: Any,
    *,
    layout: Layout = "NHD",
    kv_dtype: KvDtype | None = None,
    k_scale: Any = None,
    v_scale: Any = None,
    k_scales: Any = None,
    v_scales: Any = None,
    cos: Any = None,
    sin: Any = None,
    positions: Any = None,
    interleaved: bool = False,
    rotary_dim: int | None = None,
    backend: Backend = "auto",
    check: bool | None = None,
) -> None:
    """Write the keys and values of new tokens into their slots; with tables, rotate the keys on the way.

    Parameters
    ----------
    k, v : (num_tokens, num_kv_heads, head_dim) array
        Of the cache's dtype, or float32, which is rounded to it; float32, float16 or bfloat16 for caches in 8 bits,
        each on its own.
    k_cache, v_cache : array
        Shaped as `layout` says (see :func:`~pagedkv.decode_attention`); written in place, so they must be writable and
        share no element with each other or with another argument.
    slots : (num_tokens,) int64 array
        ``block_id * block_size + offset`` of each token; tokens with a negative slot are skipped.
    layout, kv_dtype
        As in :func:`~pagedkv.decode_attention`.
    k_scale, v_scale : float or (num_kv_heads,) float32 array, optional
        For fp8 caches: values are divided by it in float32, rounded to nearest even, and saturate at the largest
        finite value; NaN stays NaN. 1.0 if None.
    k_scales, v_scales : array, optional
        For int8 caches, shaped as in :func:`~pagedkv.decode_attention`; written in place like the caches. The scale of
        a row is the largest of its absolute values divided by 127, and a code is a number of the row divided by that,
        both rounded to float32 and the code then to the nearest integer, ties to even. A row of zeros has scale 0, and
        one that holds a NaN or an infinity scale NaN.
    cos, sin : (max_positions, rotary_dim / 2) array, optional
        Tables for a rotary position embedding of the stored keys, as in :func:`~pagedkv.apply_rotary`: float32, or of
        k's dtype. `k` itself does not change.
    positions : (num_tokens,) int32 or int64 array, optional
        The position of each token in its sequence; required with cos and sin. That of a skipped token may be anything.
    interleaved, rotary_dim
        As in :func:`~pagedkv.apply_rotary`; only with tables.
    backend, check
        As in :func:`~pagedkv.decode_attention`.

    Raises
    ------
    TypeError
        An argument is not an array, or has the wrong dtype or type.
    ValueError
        A shape, layout, stride, alignment, device or option is wrong; a cache is read-only or overlaps; a slot is named
        twice; some of cos, sin and positions come without the others.
    IndexError
        A slot is at or past ``num_blocks * block_size``, or a position outside 0..max_positions-1.
    BackendUnavailableError
        The backend that the arrays or the caller ask for is not available.

    Notes
    -----
    After an error nothing has been written; after an interrupt (Ctrl-C) both caches are written or neither. Memory for
    the tokens is allocated before that, but NumPy allocates about a kilobyte between K and V: if even that fails, a
    MemoryError leaves K written and V not. Repeating the call writes both.

    With tables the caches get the same bits as from ``write_kv(apply_rotary(q, k, cos, sin, positions)[1], v, ...)``: a
    rotated key is rounded to k's dtype, and then to that of the cache, or divided by its scale in float32 and rounded
    to 8 bits. Only the bits of a NaN may differ, on a GPU and in the emulator.

    Examples
    --------
    >>> import numpy as np
    >>> import pagedkv
    >>> k_cache, v_cache = np.zeros((2, 4, 4, 1, 8), np.float32)  # N = 4, P = 4, Hkv = 1, D = 8
    >>> k = v = np.ones((2, 1, 8), np.float32)
    >>> pagedkv.write_kv(k, v, k_cache, v_cache, slots=np.array([7, 8]))
    >>> np.argwhere(k_cache[:, :, 0, 0])  # block and offset of each token
    array([[1, 3],
           [2, 0]])
    """
    call = write_call(
        k, v, k_cache, v_cache, slots,
        layout=layout, kv_dtype=kv_dtype, k_scale=k_scale, v_scale=v_scale, k_scales=k_scales, v_scales=v_scales,
        cos=cos, sin=sin, positions=positions, rotary_dim=rotary_dim, interleaved=interleaved, backend=backend,
        check=check,
    )  # fmt: skip
    backend_of(call.placement).write_kv(call)


@between_graphs
def gather_kv(
    k_cache: Any,
    v_cache: Any,
    block_table: Any,
    seq_len: int,
    *,
    layout: Layout = "NHD",
    kv_dtype: KvDtype | None = None,
    k_scale: Any = None,
    v_scale: Any = None,
    k_scales: Any = None,
    v_scales: Any = None,
    backend: Backend = "auto",
) -> tuple[Any, Any]:
    """Gather the keys and values of one sequence into new, dense arrays.

    Parameters
    ----------
    k_cache, v_cache : array
        Shaped as `layout` says (see :func:`~pagedkv.decode_attention`).
    block_table : (max_blocks,) int32 array
        The sequence's row of the block tables; entries past its last block may hold anything.
    seq_len : int
        Tokens to gather, from 0 to max_blocks * block_size.
    layout, kv_dtype, k_scale, v_scale, k_scales, v_scales, backend
        As in :func:`~pagedkv.decode_attention`.

    Returns
    -------
    k, v : (seq_len, num_kv_heads, head_dim) array
        In the cache's dtype and framework; 8 bits are widened to float32 and multiplied by their scale.

    Raises
    ------
    TypeError
        An argument is not an array, or has the wrong dtype or type.
    ValueError
        A shape, layout, stride, alignment, device or option is wrong; seq_len is below 0 or beyond the capacity.
    IndexError
        An entry in the used part of the table is outside 0..num_blocks-1.
    BackendUnavailableError
        The backend that the arrays or the caller ask for is not available.

    Examples
    --------
    >>> import numpy as np
    >>> import pagedkv
    >>> k_cache, v_cache = np.zeros((2, 4, 4, 1, 8), np.float32)  # N = 4, P = 4, Hkv = 1, D = 8
    >>> k_cache[...] = np.arange(16).reshape(4, 4, 1, 1)  # each slot holds its number
    >>> k, v = pagedkv.gather_kv(k_cache, v_cache, np.array([2, 0], np.int32), 6)
    >>> k[:, 0, 0]
    array([ 8.,  9., 10., 11.,  0.,  1.], dtype=float32)
    """
    call = gather_call(
        k_cache, v_cache, block_table, seq_len,
        layout=layout, kv_dtype=kv_dtype, k_scale=k_scale, v_scale=v_scale, k_scales=k_scales, v_scales=v_scales,
        backend=backend,
    )  # fmt: skip
    shape = call.seq_len, call.spec.num_kv_heads, call.spec.head_dim
    remedy = "convert the caches to one of them"
    k, k_result = call.placement.new_array("k", shape, call.spec.format.dense, remedy)
    v, v_result = call.placement.new_array("v", shape, call.spec.format.dense, remedy)
    backend_of(call.placement).gather_kv(call, k_result, v_result)
    return k, v


@between_graphs
def copy_blocks(
    k_cache: Any, v_cache: Any, pairs: Any, *, k_scales: Any = None, v_scales: Any = None, backend: Backend = "auto"
) -> None:
    """Copy whole blocks within the caches of one layer, or of all layers in one call.

    This is what copy-on-write needs: pass the copies that an append returned before writing to its slots.

    Parameters
    ----------
    k_cache, v_cache : array or list of arrays
        Caches of any layout with the same num_blocks, or a list of them with one cache per layer; written in place, so
        writable and sharing no element with each other.
    pairs : (num_pairs, 2) int64 array
        Source block and destination block of each copy.
    k_scales, v_scales : array or list of arrays, optional
        The scales of int8 caches, in the order of the caches.
    backend : {"auto", "cpu", "cuda", "emulator"} or EmulatorDevice
        "auto" follows the arrays. An `emulator.EmulatorDevice` decides what is checked and counted.

    Raises
    ------
    TypeError
        An argument is not an array, or has the wrong dtype.
    ValueError
        A shape, stride, alignment or device is wrong; a cache is read-only or overlaps another; a destination is named
        twice or is also a source.
    IndexError
        A block is outside 0..num_blocks-1.
    BackendUnavailableError
        The backend that the arrays or the caller ask for is not available.

    Notes
    -----
    After an error nothing has been written; after an interrupt (Ctrl-C) all caches have been written or none, except
    on a device: there each launch copies in up to 8 caches that are alike, and an interrupt between two launches leaves
    the other caches unchanged. Repeating the call copies in all of them.
    For blocks below 4 KiB NumPy allocates about a kilobyte between two caches: if even that fails, a MemoryError leaves
    the other caches unchanged, too.

    Examples
    --------
    >>> import numpy as np
    >>> import pagedkv
    >>> k_cache, v_cache = np.zeros((2, 4, 4, 1, 8), np.float32)  # N = 4, P = 4, Hkv = 1, D = 8
    >>> k_cache[0] = 1
    >>> pagedkv.copy_blocks(k_cache, v_cache, np.array([[0, 3]]))
    >>> k_cache[:, 0, 0, 0]
    array([1., 0., 0., 1.], dtype=float32)
    """
    call = copy_call(k_cache, v_cache, pairs, k_scales=k_scales, v_scales=v_scales, backend=backend)
    backend_of(call.placement).copy_blocks(call)


@between_graphs
def swap_blocks(source: Any, destination: Any, pairs: Any, *, backend: Backend = "auto") -> None:
    """Copy whole blocks from the caches of one pool to those of another.

    Parameters
    ----------
    source, destination : array, (k, v) pair, or list of them
        Caches of any layout, built alike: the same nesting, block shapes and dtypes. The two pools may differ in
        num_blocks. `destination` is written in place. The scales of int8 caches move as further arrays of the lists.
    pairs : (num_pairs, 2) int64 array
        Block of `source` and block of `destination` of each copy.
    backend : {"auto", "cpu", "cuda", "emulator"} or EmulatorDevice
        "auto" follows the arrays. An `emulator.EmulatorDevice` decides what is checked and counted.

    Raises
    ------
    TypeError
        An argument is not an array, or has the wrong dtype.
    ValueError
        A shape, stride, alignment, nesting or device is wrong; a destination is read-only, or overlaps the source
        without being the same array; a destination block is named twice, or is also a source in the same array.
    IndexError
        A block is outside 0..num_blocks-1 of its pool.
    BackendUnavailableError
        The backend that the arrays or the caller ask for is not available.

    Notes
    -----
    After an error nothing has been written; after an interrupt (Ctrl-C) all caches have been written or none, except
    with a device: it copies in many steps, and an interrupt or an error of the driver may come between them. Repeating
    the call copies everything. On the host the MemoryError of :func:`~pagedkv.copy_blocks` is possible here as well.

    Copies between host and device run in stream order. The call does not wait for those to or from pinned memory:
    synchronise the stream before you read such a destination, or write to such a source. For other host arrays it
    waits. A CUDA graph can capture neither these copies nor pairs on the host: RuntimeError.

    Examples
    --------
    >>> import numpy as np
    >>> import pagedkv
    >>> cache, swapped = np.ones((4, 4, 1, 8), np.float32), np.zeros((2, 4, 1, 8), np.float32)
    >>> pagedkv.swap_blocks(cache, swapped, np.array([[3, 0]]))
    >>> swapped[:, 0, 0, 0]
    array([1., 0.], dtype=float32)
    """
    call = swap_call(source, destination, pairs, backend=backend)
    backend_of(call.placement).swap_blocks(call)

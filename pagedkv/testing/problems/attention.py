"""Problems of paged attention in which everything unused is poison.

A `Spec` has shapes, dtypes and options, and `build` makes the arrays. The contents of a sequence
depend only on the seed and its entry in `ids`, not on block size, layout, placement or the rest of
the batch, so that results for the same sequence can be compared.
"""

import dataclasses
from typing import Any

import numpy as np

from ...layouts import FLOAT32, FLOAT_DTYPES, FORMATS, KvFormat

FLOATS = {dtype.name: dtype for dtype in FLOAT_DTYPES}
# What fills unused slots (a float, the bits of a code) and unused table entries.
POISONS = {
    "nan": (np.nan, 0x7F, (-1, 2**31 - 1, -(2**31), 10**6)),
    "inf": (-np.inf, 0xFC, (2**31 - 1, 10**9)),
    "huge": (6e4, 0x7B, (-(2**31),)),
    "zero": (0.0, 0x00, (0,)),
}


@dataclasses.dataclass(frozen=True, repr=False)
class Spec:
    """The shapes, dtypes and options of a problem, from which `build` makes its arrays.

    Attributes
    ----------
    query_lens : tuple of int or None
        Query tokens of each sequence; None for decode.
    kv_dtype : str
        The type of the cache: the name of a float or fp8 type, or "int8".
    strides : str
        K and V are "own" arrays, "halves" of one array, or "strided" with gaps on every axis.
    kv_scales : str or None
        "scalar" or "per head".
    seq_slopes : bool
        ALiBi slopes are of each sequence, instead of all.
    leftpad : bool
        Sequences begin with padding, which holds poison.
    mask : str or None
        "bool" or "bits": rows see half of the keys that the other options leave.
    needles : tuple of int
        KV head h has one key that takes all the weight, at position ``needles[h % len(needles)]``.
    fingerprint : bool
        Values encode their block, offset and head, instead of being drawn from N(0, 1).
    ids : tuple of int or None
        Contents of a sequence follow from its id and `seed`; None numbers them from 0.
    poison : str
        Contents of unused memory: "nan", "inf", "huge" or "zero".
    contiguous : bool
        Make q without gaps.
    finite_left_of_window : bool
        Leave the sequence's keys, values and blocks left of the windows of all its queries, instead of poison.

    Examples
    --------
    >>> from pagedkv.testing import Spec
    >>> Spec(seq_lens=(5, 3)).replace(block_size=4)
    Spec(seq_lens=(5, 3), block_size=4)
    """

    seq_lens: tuple[int, ...] = (37, 5)
    query_lens: tuple[int, ...] | None = None
    padding_rows: int = 0
    num_kv_heads: int = 2
    group_size: int = 2
    head_dim: int = 64
    block_size: int = 16
    layout: str = "NHD"
    q_dtype: str = "float32"
    kv_dtype: str = "float32"
    strides: str = "own"
    kv_scales: str | None = None
    scale: float | None = None
    softcap: float | None = None
    alibi: bool = False
    seq_slopes: bool = False
    window: int | None = None
    window_right: int | None = None
    leftpad: bool = False
    mask: str | None = None
    sinks: bool = False
    score_mod: Any = None
    causal: bool = True
    needles: tuple[int, ...] = ()
    fingerprint: bool = False
    seed: int = 0
    ids: tuple[int, ...] | None = None
    placement_seed: int = 0
    poison: str = "nan"
    contiguous: bool = False
    finite_left_of_window: bool = False

    @property
    def poisons_left_of_window(self) -> bool:
        """Whether what lies left of all windows of a sequence is poison, since nobody needs it."""
        return self.window is not None and not self.finite_left_of_window

    @property
    def num_heads(self) -> int:
        return self.num_kv_heads * self.group_size

    @property
    def is_fp8(self) -> bool:
        return self.kv_dtype.startswith("fp8")

    @property
    def kv_format(self) -> KvFormat:
        return FORMATS[self.kv_dtype]

    @property
    def has_scales(self) -> bool:
        """Whether rows of the cache have scales of their own."""
        return self.kv_format.scale == "row"

    def replace(self, **changes: Any) -> "Spec":
        """Copy the spec with other values of some fields."""
        return dataclasses.replace(self, **changes)

    def __repr__(self) -> str:
        changed = {f.name: x for f in dataclasses.fields(self) if (x := getattr(self, f.name)) != f.default}
        named = (f"{name}={getattr(x, '__name__', repr(x))}" for name, x in changed.items())
        return f"Spec({', '.join(named)})"

    def explained(self) -> str:
        """The repr, followed by explanations of words in it that are special to this package."""
        value, code, entries = POISONS[self.poison]
        held = f"{code:#04x} in fp8" if self.is_fp8 else f"{code:#04x} with scale {value}" if self.has_scales else value
        said = {
            "needles": "KV head h has one key that takes all the weight, at position needles[h % len(needles)]",
            "fingerprint": "values are the numbers of their block, offset and head",
            "padding_rows": "the last rows of q belong to no sequence, and hold nan",
            "poison": f"unused slots and blocks hold {held}, unused entries of tables {', '.join(map(str, entries))}",
        }
        text = repr(self)
        lines = [f"{word}: {means}" for word, means in said.items() if f"{word}=" in text]
        if self.poisons_left_of_window:
            lines.append(
                f"window: keys and values left of it hold {held}, which times 0 may be nan; finite_left_of_window=True "
                "leaves the sequence's own there"
            )
        return "\n".join([text, *lines])


@dataclasses.dataclass
class Problem:
    """The arguments of a call, and the array for its output.

    Attributes
    ----------
    spec : Spec
        The spec that it was built from.
    args : tuple of array
        q, k_cache, v_cache, block_tables, seq_lens, and in prefill query_starts; each is an attribute, too.
    options : dict
        Keyword arguments of the operation: NumPy arrays and numbers.
    out : (rows, num_heads, head_dim) array
        The array for ``out=``: a view of a larger array of NaN.
    num_written : int
        Rows of `out` that the operation writes; those behind are padding.
    """

    spec: Spec
    q: np.ndarray
    k_cache: np.ndarray
    v_cache: np.ndarray
    block_tables: np.ndarray
    seq_lens: np.ndarray
    query_starts: np.ndarray | None
    options: dict[str, Any]
    out: np.ndarray
    out_buffer: np.ndarray  # `out` is a view of this
    contents: list[tuple[np.ndarray, ...]]  # q, k and v of each sequence, and the scales of rows that have them

    @property
    def args(self) -> tuple[np.ndarray, ...]:
        args = (self.q, self.k_cache, self.v_cache, self.block_tables, self.seq_lens)
        return args if self.query_starts is None else (*args, self.query_starts)

    @property
    def caches(self) -> dict[str, np.ndarray]:
        """K and V, and the scales of rows that have them, by the names of their arguments."""
        caches = {"k_cache": self.k_cache, "v_cache": self.v_cache}
        caches.update((name, x) for name, x in self.options.items() if name in ("k_scales", "v_scales"))
        return caches

    @property
    def num_written(self) -> int:
        return len(self.q) if self.query_starts is None else int(self.query_starts[-1])


def build(spec: Spec, like: Problem | None = None) -> Problem:
    """Make the arrays of a spec, with poison in all unused memory.

    `like` is a problem of the same sequences with blocks elsewhere, whose contents are used again.

    Examples
    --------
    >>> from pagedkv.testing import Spec, build
    >>> problem = build(Spec(seq_lens=(5, 3), block_size=4))
    >>> problem.q.shape, problem.k_cache.shape  # 3 blocks are used, and 3 more hold poison
    ((2, 4, 64), (6, 4, 2, 64))
    """
    ids = spec.ids if spec.ids is not None else tuple(range(len(spec.seq_lens)))
    query_lens = spec.query_lens if spec.query_lens is not None else (1,) * len(spec.seq_lens)
    options = _options(spec, ids, query_lens, np.random.default_rng([spec.seed, 7]))

    place = np.random.default_rng([spec.placement_seed, 11])
    block_counts = [-(-length // spec.block_size) for length in spec.seq_lens]
    num_blocks = sum(block_counts) + 3
    free = place.permutation(num_blocks).astype(np.int32)
    max_blocks = max(block_counts, default=0) + 2
    wide = np.resize(np.array(POISONS[spec.poison][2], np.int32), (len(ids), max_blocks + 3))
    block_tables = wide[:, :max_blocks]
    shape = (num_blocks, spec.block_size, spec.num_kv_heads, spec.head_dim)
    pools = [_full_of_poison(shape, spec.kv_format.stored, spec) for _ in range(2)]
    if spec.has_scales:  # in memory the tokens of a head are side by side, as in a PagedKVCache
        of_heads = num_blocks, spec.num_kv_heads, spec.block_size
        pools += [_full_of_poison(of_heads, FLOAT32, spec).swapaxes(1, 2) for _ in range(2)]
    contents = []
    for seq, (seq_id, length, query_len, count) in enumerate(
        zip(ids, spec.seq_lens, query_lens, block_counts, strict=True)
    ):
        blocks, free = free[:count], free[count:]
        block_tables[seq, :count] = blocks
        own = _contents(spec, seq_id, length, query_len) if like is None else like.contents[seq]
        position = np.arange(length)
        block, offset = blocks[position // spec.block_size], position % spec.block_size
        rows = list(own[1:])
        if spec.fingerprint:
            rows[1::2] = _stored(spec, _fingerprints(spec, block, offset))
        contents.append((own[0], *rows))
        first = int(options["leftpad"][seq]) if spec.leftpad else 0
        if spec.poisons_left_of_window and spec.window:
            first = max(first, length - query_len + 1 - spec.window)
        first = min(first, length)
        block_tables[seq, : first // spec.block_size] = np.resize(POISONS[spec.poison][2], first // spec.block_size)
        for pool, x in zip(pools, rows, strict=True):
            pool[block[first:], offset[first:]] = x[first:]

    num_rows = sum(query_lens) + spec.padding_rows
    q_buffer = np.full((num_rows + 1, spec.num_heads + 1, spec.head_dim + 8), np.nan, FLOATS[spec.q_dtype])
    out_buffer = np.full_like(q_buffer, np.nan)
    inside = (slice(0, num_rows), slice(1, None), slice(8, None))
    for start, (q, *_) in zip(np.cumsum((0, *query_lens)), contents, strict=False):
        q_buffer[inside][start : start + len(q)] = q
    k_cache, v_cache, *scales = _arrange(spec, pools)
    options |= dict(zip(("k_scales", "v_scales"), scales, strict=False))
    q = q_buffer[inside]
    return Problem(
        spec=spec,
        q=np.ascontiguousarray(q) if spec.contiguous else q,
        k_cache=k_cache,
        v_cache=v_cache,
        block_tables=block_tables,
        seq_lens=np.array(spec.seq_lens, np.int32),
        query_starts=None if spec.query_lens is None else np.cumsum((0, *query_lens), dtype=np.int32),
        options=options,
        out=out_buffer[inside],
        out_buffer=out_buffer,
        contents=contents,
    )


def _options(spec: Spec, ids: tuple[int, ...], query_lens: tuple[int, ...], rng: np.random.Generator) -> dict[str, Any]:
    """Make the keyword options of the call that differ from their defaults."""
    heads = np.arange(spec.num_heads)
    options: dict[str, Any] = {"layout": spec.layout, "scale": spec.scale, "softcap": spec.softcap}
    options |= {"window": spec.window, "score_mod": spec.score_mod}
    if spec.query_lens is not None:
        options["causal"] = spec.causal
    if spec.window_right is not None:
        options["window_right"] = spec.window_right
    if spec.alibi:
        slopes = (2.0 ** (-8.0 * (heads + 1) / spec.num_heads)).astype(np.float32)
        options["alibi_slopes"] = slopes * (np.array(ids, np.float32)[:, None] % 3 + 1) if spec.seq_slopes else slopes
    if spec.leftpad:
        padding = [_rng_of(spec, seq_id).integers(0, n + 1) for seq_id, n in zip(ids, spec.seq_lens, strict=True)]
        options["leftpad"] = np.array(padding, np.int32)
    if spec.mask:
        options["mask"] = _mask(spec, ids, query_lens)
    if spec.sinks:
        options["sinks"] = (3 * rng.standard_normal(spec.num_heads)).astype(np.float32)
    if spec.kv_format.coded:
        options["kv_dtype"] = spec.kv_dtype
    if spec.kv_format.scale == "call":
        if spec.kv_scales == "scalar":
            options |= {"k_scale": 0.5, "v_scale": 1.75}
        elif spec.kv_scales == "per head":
            for name in ("k_scale", "v_scale"):
                options[name] = rng.uniform(0.25, 2.0, spec.num_kv_heads).astype(np.float32)
    return options


def _rng_of(spec: Spec, seq_id: int) -> np.random.Generator:
    """The random generator of the options of one sequence."""
    return np.random.default_rng([spec.seed, seq_id, 13])


def _mask(spec: Spec, ids: tuple[int, ...], query_lens: tuple[int, ...]) -> np.ndarray:
    """Half of the keys of each row, whatever the other rows are."""
    masks = []
    for seq_id, length, query_len in zip(ids, spec.seq_lens, query_lens, strict=True):
        rows = _rng_of(spec, seq_id).random((length, length), np.float32)[length - query_len :]
        shown = (rows < 0.5).ravel()
        masks.append(shown if spec.mask == "bool" else np.packbits(shown, bitorder="little"))
    return np.concatenate(masks)


def _contents(spec: Spec, seq_id: int, length: int, query_len: int) -> tuple[np.ndarray, ...]:
    """Draw q (query_len, Hq, D) in its dtype, and k, v (length, Hkv, D) as the cache stores them, with their scales."""
    rng = np.random.default_rng([spec.seed, seq_id])
    k, v = rng.standard_normal((2, length, spec.num_kv_heads, spec.head_dim), np.float32)
    if spec.needles:  # one query for all rows and heads of a group, so that one key can dominate for all
        q = np.repeat(rng.standard_normal((1, spec.num_kv_heads, spec.head_dim), np.float32), spec.group_size, axis=1)
        q = np.repeat(q, query_len, axis=0)
        for head in range(spec.num_kv_heads if query_len else 0):
            needle = spec.needles[head % len(spec.needles)]
            if needle < length:
                k[needle, head] = 40 * q[0, head * spec.group_size]
    else:
        q = rng.standard_normal((query_len, spec.num_heads, spec.head_dim), np.float32)
    (k, *k_scales), (v, *v_scales) = _stored(spec, k), _stored(spec, v)
    return q.astype(FLOATS[spec.q_dtype]), k, v, *k_scales, *v_scales


def _stored(spec: Spec, x: np.ndarray) -> tuple[np.ndarray, ...]:
    """The arrays that hold rows x (length, Hkv, D) in a cache: elements, and scales if rows have them."""
    return spec.kv_format.quantise(x) if spec.has_scales else (spec.kv_format.narrow(x),)


def _fingerprints(spec: Spec, block: np.ndarray, offset: np.ndarray) -> np.ndarray:
    """Make values (length, Hkv, D) that encode their place: D repeats block // 16, block % 16, offset // 16 ...

    A row of int8 has scale 1, as its largest value is 127.
    """
    head = np.broadcast_to(np.arange(spec.num_kv_heads), (len(block), spec.num_kv_heads))
    block, offset = (np.broadcast_to(x[:, None], head.shape) for x in (block, offset))
    last = 127 if spec.has_scales else 3
    parts = [block // 16, block % 16, offset // 16, offset % 16, head, 1 + 0 * head, 2 + 0 * head, last + 0 * head]
    values = np.tile(np.stack(parts, axis=-1), spec.head_dim // 8)
    return values.astype(np.float32)


def _full_of_poison(shape: tuple[int, ...], dtype: np.dtype[Any], spec: Spec) -> np.ndarray:
    value, code, _ = POISONS[spec.poison]
    if dtype.itemsize > 1:
        return np.full(shape, value, dtype)
    return np.full(shape, code, np.uint8).view(dtype)


def _arrange(spec: Spec, pools: list[np.ndarray]) -> list[np.ndarray]:
    """Arrange pools (N, P, Hkv, D) of K and V, and (N, P, Hkv) of scales, in the layout and with the spec's strides."""
    pairs = (in_layout(k, v, spec.layout) for k, v in zip(pools[::2], pools[1::2], strict=True))
    return [x for k, v in pairs for x in _with_strides(spec, k, v)]


def _with_strides(spec: Spec, k: np.ndarray, v: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Copies of K and V, or of their scales, with the strides of the spec."""
    if spec.strides == "own":  # the memory of scales is in order already
        return (k, v) if k.ndim == 3 else (np.ascontiguousarray(k), np.ascontiguousarray(v))
    if spec.strides == "halves":
        combined = np.empty((len(k), 2, k[:1].size), k.dtype)
        k_copy, v_copy = combined[:, 0].reshape(k.shape), combined[:, 1].reshape(v.shape)
    else:  # K and V with different paddings on every axis
        k_copy = _full_of_poison((*(n + 1 for n in k.shape[:-1]), 2 * k.shape[-1]), k.dtype, spec)
        v_copy = _full_of_poison((*(n + 2 for n in v.shape[:-1]), v.shape[-1] + 8), v.dtype, spec)
        k_copy = k_copy[tuple(slice(1, None) for _ in k.shape[:-1])][..., : k.shape[-1]]
        v_copy = v_copy[tuple(slice(2, None) for _ in v.shape[:-1])][..., 8:]
    k_copy[...], v_copy[...] = k, v
    return k_copy, v_copy


def in_layout(k_pool: np.ndarray, v_pool: np.ndarray, layout: str) -> tuple[np.ndarray, np.ndarray]:
    """View pools (N, P, Hkv, D), or those of scales (N, P, Hkv), with the axes of a layout."""
    if layout == "NHD":
        return k_pool, v_pool
    if layout == "HND" or k_pool.ndim == 3:
        return k_pool.swapaxes(1, 2), v_pool.swapaxes(1, 2)
    num_blocks, block_size, num_kv_heads, head_dim = k_pool.shape
    x = 16 // k_pool.itemsize
    k = k_pool.reshape(num_blocks, block_size, num_kv_heads, head_dim // x, x)
    return k.transpose(0, 2, 3, 1, 4), v_pool.transpose(0, 2, 3, 1)

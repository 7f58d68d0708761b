"""What attention requires of shapes, dtypes, strides and options: of everything but addresses and values.

That is the same from one decode step to the next. On the CPU, where reading it is most of what validation costs, the
form of a valid call is kept under a key of all that was looked at, and the next call like it is not looked at again.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, Generic, TypeVar, get_args

import numpy as np

from ..arrays import Array
from ..calls import PREFILL_OPTIONS, SCALES, VECTORS, AttentionOptions, Form
from ..layouts import FLOAT32, Geometry, cache_spec
from ..placement import Placement
from ..typing import Kernel, KvDtype
from . import cache_pair, require

MOST_FORMS = 256
KERNELS = get_args(Kernel)
_INT32 = np.dtype(np.int32)
_INT32_MAX = 2**31 - 1
_INDICES = (int, np.integer, type(None))
_DTYPES = {
    "block_tables": _INT32,
    "seq_lens": _INT32,
    "query_starts": _INT32,
    "alibi_slopes": FLOAT32,
    "sinks": FLOAT32,
}

T = TypeVar("T")


class Forms(Generic[T]):
    """The forms of valid calls on the CPU by their keys; the oldest are forgotten.

    Parameters
    ----------
    checked : callable
        The form of a call with these arguments, views and placement; raises unless it is valid.
    options : sequence of str
        The arguments that it looks at, besides arrays and scales.
    """

    def __init__(
        self, checked: Callable[[Mapping[str, Any], Mapping[str, Array], Placement], T], options: Sequence[str]
    ) -> None:
        self._checked, self._options = checked, options
        self._known: dict[Hashable, T] = {}

    def __len__(self) -> int:
        return len(self._known)

    def of(self, given: Mapping[str, Any], views: Mapping[str, Array], placement: Placement) -> T:
        """The form of a call with these arguments, of which `views` are the arrays; raises unless it is valid."""
        # Another index, such as a tensor of torch, may change its value, but not its hash.
        if placement.backend != "cpu" or not isinstance(given.get("window"), _INDICES):
            return self._checked(given, views, placement)
        key = self._key(given, views)
        try:
            form = self._known.get(key)
        except TypeError:  # an option that cannot be hashed, such as a number in an array
            return self._checked(given, views, placement)
        if form is None:
            form = self._checked(given, views, placement)
            for oldest in list(self._known)[: max(0, len(self._known) + 1 - MOST_FORMS)]:
                self._known.pop(oldest, None)  # another thread may have been first
            self._known[key] = form
        return form

    def _key(self, given: Mapping[str, Any], views: Mapping[str, Array]) -> Hashable:
        options = [given.get(name) for name in self._options]
        options += [None if name in views else given[name] for name in SCALES]
        # 1 and 1.0 and True are equal, and are not all valid.
        arrays = [(x.shape, x.strides, x.dtype, x.flags.num) for x in views.values()]
        return (*views, *arrays, *options, *map(type, options))


def attention_forms() -> Forms[Form]:
    """Of decode_attention and prefill_attention, none known yet."""
    return Forms(_checked, PREFILL_OPTIONS)


def _checked(given: Mapping[str, Any], views: Mapping[str, Array], placement: Placement) -> Form:
    """All shapes come before all dtypes, then strides, then options."""
    q, k_cache, v_cache, block_tables = (views[name] for name in ("q", "k_cache", "v_cache", "block_tables"))
    geometry = cache_pair.geometry_of(given, k_cache, v_cache)
    _require_shapes(views, geometry)
    kind = _kind_of(q, k_cache, v_cache, given["kv_dtype"])
    for name, view in views.items():
        if (expected := _DTYPES.get(name)) is not None:
            require.dtype(name, view, expected)
    if "out" in views:
        require.dtype("out", views["out"], q.dtype, ", that of q")
    require.memory(views, placement)

    kernel, layout = given["kernel"], given["layout"]
    causal, exact = given.get("causal", True), given.get("exact", False)
    _require_kernel(kernel, layout)
    require.boolean("causal", causal)
    require.boolean("exact", exact)
    require.boolean("return_lse", given["return_lse"])
    checked = require.check(given["check"])
    scale, softcap, window = given["scale"], given["softcap"], given["window"]
    options = AttentionOptions(
        scale=1.0 / math.sqrt(geometry.head_dim) if scale is None else require.number("scale", scale),
        causal=bool(causal),
        window=None if window is None else _window(window),
        softcap=None if softcap is None else require.number("softcap", softcap, positive=True),
        alibi_slopes=None,
        sinks=None,
        score_mod=None,
    )
    k_scale, v_scale = (cache_pair.scale_of(name, given[name], views.get(name), kind) for name in SCALES)
    if "out" in views:
        require.writable("out", views["out"])
    return Form(
        spec=cache_spec(layout, kind, geometry),
        capacity=block_tables.shape[1] * geometry.block_size,
        q_shape=q.shape,
        k_strides=k_cache.strides,
        v_strides=v_cache.strides,
        options=options,
        k_scale=k_scale,
        v_scale=v_scale,
        kernel=str(kernel),
        exact=bool(exact),
        checked=checked,
    )


def _require_shapes(views: Mapping[str, Array], geometry: Geometry) -> None:
    q, block_tables, ragged = views["q"], views["block_tables"], "query_starts" in views
    rows = "num_tokens" if ragged else "num_seqs"
    require.ndim("q", q, f"({rows}, num_heads, head_dim)", 3)
    num_rows, num_heads, head_dim = q.shape
    if head_dim != geometry.head_dim:
        require.shape("q", q, f"({rows}, num_heads, head_dim)", (num_rows, num_heads, geometry.head_dim))
    if num_heads < 1 or num_heads % geometry.num_kv_heads:
        raise ValueError(
            f"num_heads must be a positive multiple of num_kv_heads, got {num_heads} heads of q "
            f"and {geometry.num_kv_heads} of k_cache"
        )
    require.ndim("block_tables", block_tables, "(num_seqs, max_blocks)", 2)
    num_seqs = block_tables.shape[0]
    if not ragged and num_seqs != num_rows:
        require.shape("block_tables", block_tables, "(num_seqs, max_blocks)", (num_rows, block_tables.shape[1]))
    require.shape("seq_lens", views["seq_lens"], "(num_seqs,)", (num_seqs,))
    if ragged:
        require.shape("query_starts", views["query_starts"], "(num_seqs + 1,)", (num_seqs + 1,))
    for name in VECTORS:
        if name in views:
            require.shape(name, views[name], "(num_heads,)", (num_heads,))
    cache_pair.scale_shapes(views, geometry.num_kv_heads)
    if "out" in views:
        require.shape("out", views["out"], f"({rows}, num_heads, head_dim)", q.shape)


def _kind_of(q: Array, k_cache: Array, v_cache: Array, kv_dtype: KvDtype | None) -> str:
    require.float_dtype("q", q)
    kind = cache_pair.kind_of(k_cache, v_cache, kv_dtype)
    if kv_dtype is None and k_cache.dtype != q.dtype and q.dtype != FLOAT32:
        raise TypeError(f"k_cache must have dtype {q.dtype}, that of q, or be fp8, got {k_cache.dtype}")
    return kind


def _require_kernel(kernel: object, layout: str) -> None:
    if not (isinstance(kernel, str) and kernel in KERNELS):
        raise ValueError(f'kernel must be "auto", "v1", "v2" or "split", got {kernel!r}')
    if kernel != "auto" and (kernel == "split") == (layout == "vllm"):
        needs = "NHD or HND" if kernel == "split" else "vllm"
        raise ValueError(f'kernel "{kernel}" needs layout {needs}, got {layout}')


def _window(window: object) -> int:
    width = require.integer("window", window)
    if width < 1:
        raise ValueError(f"window must be at least 1, got {width}")
    return min(width, _INT32_MAX)

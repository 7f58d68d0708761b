"""assert_matches_reference: compares any function with the signature of decode or prefill with the reference."""

from __future__ import annotations

import inspect
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import islice, zip_longest
from typing import Any

import numpy as np

from ..layouts import FORMATS, require_head_dim
from .error_rule import assert_close
from .frameworks import Array, as_numpy, hand_over
from .problems.attention import FLOATS, POISONS, Problem, Spec, build
from .problems.limits import GROUP_SIZES, KV_DTYPES, OPTIONS, STRIDES, Limits, fits
from .problems.strategies import fade, specs_within
from .search import search

ARGUMENTS = ("q", "k_cache", "v_cache", "block_tables", "seq_lens", "query_starts")
KNOWN = (*ARGUMENTS, *OPTIONS, "v_scale", "k_scales", "v_scales", "layout", "kv_dtype", "score_mod", "return_lse")
# Head dimensions of each kind; few, because a kernel may be compiled for each of them.
SOME_HEAD_DIMS = (64, 128, 40, 80, 96, 256)
# Of the time that is left, for problems of one dtype, layout and head size: enough for a few in a slow function, and
# little enough that the first five, which have all dtypes and layouts, get theirs.
LEAST_SHARE = 1 / 6


def assert_matches_reference(
    fn: Callable[..., Any],
    *,
    arrays: str | Callable[[Array], Any] = "numpy",
    device: str | None = None,
    operation: str | None = None,
    options: Sequence[str] | None = None,
    layouts: Sequence[str] | None = None,
    dtypes: Sequence[str] | None = None,
    head_dims: Sequence[int] = SOME_HEAD_DIMS,
    block_sizes: Sequence[int] | None = None,
    group_sizes: Sequence[int] | None = None,
    poisons: Sequence[str] = tuple(POISONS),
    contiguous: bool = False,
    finite_left_of_window: bool = False,
    factor: float = 2,
    max_examples: int = 400,
    max_seconds: float = 60,
    seed: int | None = 0,
    spec: Spec | None = None,
) -> int:
    """Fuzz a function that computes decode or prefill attention over a paged cache, and compare with the reference.

    The function is called like :func:`~pagedkv.decode_attention` or :func:`~pagedkv.prefill_attention`, with the
    options that its signature names. It returns out in q's dtype, or (out, lse) if it takes ``return_lse``, with lse in
    float32 or q's dtype. Everything that it should not read is poison: unused slots and blocks, unused entries of
    tables, gaps between rows. It must change none of its arguments.

    Parameters
    ----------
    fn : callable
        ``fn(q, k_cache, v_cache, block_tables, seq_lens, **options)``; prefill takes ``query_starts`` after seq_lens.
    arrays : {"numpy", "torch", "cupy"} or callable
        The framework of its arguments; a callable converts a NumPy array.
    device : str, optional
        The device of torch tensors.
    operation : {"decode", "prefill"}, optional
        None: prefill if `fn` has an argument ``query_starts``.
    options : sequence of str, optional
        Names of the options that it takes; None: those of its signature.
    layouts : sequence of str, optional
        None: all, if it takes ``layout``; else NHD.
    dtypes : sequence of str, optional
        Of q and the cache: "float32", "float16", "bfloat16"; with ``kv_dtype`` fp8 caches, too. None: all if it takes
        ``kv_dtype``, else float32.
    head_dims, block_sizes, group_sizes : sequence of int
        Sizes to draw from; None for a selection. Each of `head_dims` is drawn in at least one dtype and layout.
    poisons : sequence of str
        Contents of unused memory: "nan", "inf" and "huge", with invalid block ids in tables; "zero", with block 0.
    contiguous : bool
        Make each array C-contiguous, without gaps.
    finite_left_of_window : bool
        Leave finite keys and values, and their blocks, left of the windows of a sequence, for a function that
        multiplies them by weights of 0.
        By default they are poison, since no function needs to read them.
    factor : float
        The factor of :func:`assert_close`.
    max_examples : int
        How many problems to try, in all dtypes and head sizes together.
    max_seconds : float
        Time limit, plus 20 seconds to look for the smallest failing problem.
    seed : int or None
        The seed of the problems; None for others each time.
    spec : Spec, optional
        Try this problem alone, as an error message names it; exceptions of `fn` are raised unchanged.

    Returns
    -------
    int
        How many problems were tried.

    Raises
    ------
    AssertionError
        A result is wrong, or `fn` raises; the message contains the smallest failing problem.
    ValueError
        There is nothing to try: an operation, option or head size is unknown, or none fits into the layouts.

    Examples
    --------
    >>> from pagedkv import reference
    >>> from pagedkv.testing import assert_matches_reference
    >>> def attend(q, k_cache, v_cache, block_tables, seq_lens, window=None):
    ...     out = reference.decode_attention(q, k_cache, v_cache, block_tables, seq_lens, window=window)
    ...     return out.astype(q.dtype)
    >>> assert_matches_reference(attend, head_dims=[64], max_examples=3)
    3
    """
    if max_examples < 1 or max_seconds <= 0:
        raise ValueError(f"max_examples and max_seconds must be above 0, got {max_examples} and {max_seconds}")
    if operation not in (None, "decode", "prefill"):
        raise ValueError(f'operation must be "decode", "prefill" or None, got {operation!r}')
    if unknown := {*(options or ())} - {*KNOWN}:
        raise ValueError(f"options must be of {', '.join(KNOWN)}, got {', '.join(sorted(unknown))}")
    for head_dim in head_dims:
        require_head_dim(head_dim)
    takes = _parameters(fn) if options is None else {*options}
    prefill = "query_starts" in takes if operation is None else operation == "prefill"
    call = _make_check(fn, takes, hand_over(arrays, device), factor)
    if spec is not None:
        call(spec)
        return 1
    allowed = tuple(name for name in OPTIONS if name in takes)
    limits = Limits(
        options=allowed,
        block_sizes=None if block_sizes is None else tuple(block_sizes),
        group_sizes=tuple(group_sizes or GROUP_SIZES),
        poisons=tuple(poisons),
        strides=("own",) if contiguous else STRIDES,
        contiguous=contiguous,
        finite_left_of_window=finite_left_of_window,
    )
    layouts = layouts or (("NHD", "HND", "vllm") if "layout" in takes else ("NHD",))
    if dtypes is None:
        dtypes = tuple(FLOATS) if "kv_dtype" in takes else ("float32",)
    coded = [name for name in KV_DTYPES if FORMATS[name].coded and "kv_dtype" in takes]
    if not {"k_scales", "v_scales"} <= takes:
        coded = [name for name in coded if FORMATS[name].scale != "row"]
    forms = _forms(limits, layouts, dtypes, head_dims, coded, "score_mod" in takes)
    if not forms:
        raise ValueError(
            "none of head_dims and block_sizes can be in any of layouts: vllm has heads of whole 16 bytes, and block "
            "sizes that are powers of two from 8 to 256"
        )
    stop_at, num_tried = time.monotonic() + max_seconds, 0
    for i, form in enumerate(forms):
        found = search(
            specs_within(form, prefill),
            call,
            max_examples=max(1, max_examples // len(forms)),
            seed=None if seed is None else seed + i,
            stop_at=stop_at,
            share=max(LEAST_SHARE, 1 / (len(forms) - i)),
        )
        num_tried += found.num_examples
        if found.failure:
            example, error = found.failure
            said = str(error) if isinstance(error, AssertionError) else f"{type(error).__name__}: {error}"
            name = getattr(getattr(fn, "func", fn), "__name__", fn)  # a partial has none
            again = f"try it again with spec={example.explained()}"
            raise AssertionError(f"{name} fails problem {num_tried}: {said}\n{again}") from error
    return num_tried


def _parameters(fn: Callable[..., Any]) -> set[str]:
    """The names of a function's parameters, also if numba has compiled it."""
    try:
        return {*inspect.signature(getattr(fn, "py_func", fn)).parameters}
    except (TypeError, ValueError):
        raise TypeError(f"{fn!r} has no signature to read: name its options with options=[...]") from None


def _forms(
    limits: Limits,
    layouts: Sequence[str],
    dtypes: Sequence[str],
    head_dims: Sequence[int],
    coded: Sequence[str],
    has_score_mod: bool,
) -> list[Limits]:
    """The limits to draw from in turn: each dtype in each layout, and each head size that a layout can have."""
    kv_dtypes = [x for pair in zip_longest(dtypes, coded) for x in pair if x]
    families = [names for names in (("vllm",), tuple(x for x in layouts if x != "vllm")) if {*names} & {*layouts}]
    forms: list[Limits] = []
    # The first ones differ as much as possible, in case there is no time for more.
    for turn in range(1, len(families) + 1):
        for i, kv_dtype in enumerate(kv_dtypes):
            family = families[(turn + i) % len(families)]
            fitting = [d for d in head_dims if fits(d, kv_dtype, family)]
            sizes = limits.block_sizes and tuple(p for p in limits.block_sizes if family != ("vllm",) or _is_vllm(p))
            if fitting and sizes != ():
                form = replace(limits, layouts=family, q_dtypes=tuple(dtypes), kv_dtypes=(kv_dtype,), block_sizes=sizes)
                forms.append(replace(form, head_dims=(fitting[len(forms) % len(fitting)],)))
    whole = [form for form in forms if form.kv_dtypes == (kv_dtypes[0],) and form.layouts == families[-1]] or forms[:1]
    drawn = {form.head_dims[0] for form in (forms if len(kv_dtypes) > 1 else whole)}
    for d in dict.fromkeys(head_dims):
        if d not in drawn:
            others = (form for form in (*whole, *forms) if fits(d, form.kv_dtypes[0], form.layouts))
            forms += [replace(form, head_dims=(d,)) for form in islice(others, 1)]
    with_score_mod = [replace(form, score_mods=(fade,)) for form in whole if has_score_mod]
    return [*forms[: len(kv_dtypes)], *with_score_mod, *forms[len(kv_dtypes) :]]


def _is_vllm(block_size: int) -> bool:
    """Whether layout vllm can have this block size."""
    return block_size in (8, 16, 32, 64, 128, 256)


def _make_check(
    fn: Callable[..., Any], takes: set[str], give: Callable[[Array], Any], factor: float
) -> Callable[[Spec], None]:
    """Make a check of one problem."""

    def call(spec: Spec) -> None:
        problem = build(spec)
        before = _bytes(problem)
        named = {name: x for name, x in problem.options.items() if name in takes}
        if "return_lse" in takes:
            named["return_lse"] = True
        with np.errstate(all="ignore"):
            given = [give(x) for x in problem.args]
            result = fn(*given, **{name: give(x) if isinstance(x, np.ndarray) else x for name, x in named.items()})
        out, lse = result if "return_lse" in takes else (result, None)
        out, lse = as_numpy(out), None if lse is None else as_numpy(lse)
        q, rows = problem.q, problem.num_written
        assert out.shape == q.shape, f"out must have shape {q.shape}, that of q, got {out.shape}"
        assert out.dtype == q.dtype, f"out must have dtype {q.dtype}, that of q, got {out.dtype}"
        if lse is not None:
            assert lse.shape == q.shape[:2], f"lse must have shape {q.shape[:2]}, (rows, heads), got {lse.shape}"
            assert lse.dtype in (np.float32, q.dtype), f"lse must have dtype float32 or that of q, got {lse.dtype}"
            lse = lse[:rows]
        assert_close(problem, out[:rows], lse, factor=factor, lse_dtype="q")
        assert _bytes(problem) == before, "an argument was written to"

    return call


def _bytes(problem: Problem) -> list[bytes]:
    return [x.tobytes() for x in (*problem.args, *problem.options.values()) if isinstance(x, np.ndarray)]

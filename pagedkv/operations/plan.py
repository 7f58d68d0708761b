"""Plans of attention: what the layers of a step have in common is validated and planned once, and each layer runs.

FlashInfer splits its calls into plan and run for the same reason.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from inspect import signature
from types import NoneType
from typing import TYPE_CHECKING, Any, NoReturn, cast

import numpy as np

from ..arrays import Array, DeviceArgument, between_graphs, device_kinds, identify, make_shadow
from ..backends import backend_of
from ..buckets import bucket
from ..calls import CACHES, AttentionArguments, AttentionCall, Caches, caches_of
from ..cpu.threads import get_num_threads
from ..environment import check_setting
from ..layouts import FLOAT32
from ..placement import Placement
from ..validation import require
from ..validation.attention import attention_call
from .attention import decode_attention, prefill_attention

if TYPE_CHECKING:
    from ..cuda.backend import GpuBackend

MOST_PLANS = 1024
_BROUGHT = "q", *CACHES  # by each run
_NEVER_READ = 256  # the address of arrays of which only shape, strides and dtype matter
_ALIGNED = 0x0100  # of flags.num
# Options that plain values describe in full; a call with another one is validated every time.
_OPTIONS = frozenset(
    (
        *("scale", "window", "window_right", "softcap", "alibi_slopes", "sinks", "score_mod", "causal", "exact"),
        *("kernel", "backend", "return_lse", "check"),
    )
)
_PLAIN_TYPES = frozenset((bool, int, float, str, NoneType))
# Reading an argument raises these if it is invalid, is not where it should be, or has an unknown form.
_UNREADABLE = (AttributeError, IndexError, KeyError, RuntimeError, TypeError, ValueError)
_Planned = Sequence[tuple[tuple[int, ...], tuple[int, ...], np.dtype[Any]]]  # shapes, strides and dtypes


class _HostPlan:
    """A plan of a call on the host, of the values that its tables and lengths had."""

    def __init__(self, call: AttentionCall) -> None:
        self._facts = [_facts(x) for x in (call.q, *call.caches)]
        self._returns_lse = call.arguments.return_lse
        self._placement, self._mask = call.placement._replace(beside=None), call.options.mask
        self._backend = backend_of(call.placement)
        self._plan = self._backend.plan(call) if call.has_rows else None

    def run(self, q: Any, k_cache: Any, v_cache: Any, scales: tuple[Any, ...], out: Any) -> Any:
        """Run with q and caches that may differ from those of the call."""
        caches = k_cache, v_cache, *scales
        views = _shadows_of(self._placement, self._facts, q, *caches)
        if [_facts(x) for x in views] != self._facts:
            _refuse(views, self._placement, [x[:3] for x in self._facts])
        require.row_alignment("k_cache", views[1], self._placement)
        require.row_alignment("v_cache", views[2], self._placement)
        return self.attend(identify("q", q), views[0], tuple(views[1:]), out)

    def attend(self, argument: Any, q: Array, caches: Caches, out: Any = None) -> Any:
        """Run with views that are like those of the call."""
        require.row_alignment("q", q, self._placement)
        is_given = out is not None
        if is_given:
            result = _shadow_of("out", out, self._placement)
            inputs = {**dict(zip(_BROUGHT, (q, *caches), strict=False)), "mask": self._mask}
            _require_out(result, q, inputs, self._placement)
        else:
            out, result = argument.new("out", q.shape, q.dtype, 0, "")
        lse = lses = None
        if self._returns_lse:
            lse, lses = argument.new("lse", q.shape[:2], FLOAT32, 0, "")
        if self._plan is not None:
            self._backend.run(self._plan, q, caches, result, lses, is_given=is_given)
        return (out, lse) if self._returns_lse else out


class _DevicePlan:
    """A plan of a call on a GPU, of the addresses of its tables, lengths and arrays of options."""

    def __init__(self, call: AttentionCall) -> None:
        arguments = call.arguments
        self._kind = cast("type[DeviceArgument]", type(call.placement.beside))
        caches = caches_of(arguments.k_cache, arguments.v_cache, arguments.k_scales, arguments.v_scales)
        self._facts = [device_kinds[type(x)].facts(x)[1] for x in (arguments.q, *caches)]
        self._planned: _Planned = [(x.shape, x.strides, x.dtype) for x in (call.q, *call.caches)]
        self._placement = call.placement._replace(beside=None)
        self._returns_lse = arguments.return_lse
        self._out_facts: Hashable = None  # of the last valid `out`
        # of the memory at the plan's addresses
        self._owners = arguments._replace(q=None, k_cache=None, v_cache=None, k_scales=None, v_scales=None)
        self._plan = cast("GpuBackend", backend_of(call.placement)).plan(call) if call.has_rows else None
        self._fixed = () if self._plan is None else tuple(self._plan.addresses[len(self._facts) : -1])
        self._read = self._kind.facts
        self._at, self._of_scales = ([device_kinds[type(x)].address for x in some] for some in (caches[:2], caches[2:]))
        self._seen: dict[tuple[int, ...], tuple[list[int], tuple[Any, ...]]] = {}

    def run(self, q: Any, k_cache: Any, v_cache: Any, scales: tuple[Any, ...], out: Any) -> Any:
        """Run with q and caches that may differ from those of the call."""
        (of_k, of_v), of_scales = self._at, self._of_scales
        try:
            q_at, q_facts = self._read(q)
            at = [of_k(k_cache), of_v(v_cache)]
            ids: tuple[int, ...] = id(k_cache), id(v_cache)
            if scales or of_scales:
                at += [address(x) for address, x in zip(of_scales, scales, strict=True)]
                ids += tuple(map(id, scales))
        except _UNREADABLE:
            shadows = _shadows_of(self._placement, self._planned, q, k_cache, v_cache, *scales)
            _refuse(shadows, self._placement, self._planned)
        # All facts of a cache are read once, since the plan keeps what it has seen.
        seen = self._seen.get(ids)
        if q_facts != self._facts[0] or seen is None or seen[0] != at:
            caches = k_cache, v_cache, *scales
            shadows = _shadows_of(self._placement, self._planned, q, *caches)
            if [device_kinds[type(x)].facts(x)[1] for x in (q, *caches)] != self._facts:
                _refuse(shadows, self._placement, self._planned)
            if len(self._seen) >= MOST_PLANS:
                self._seen.clear()
            self._seen[ids] = at, caches
        return self.attend(q, q_at, at, out)

    def attend(self, q: Any, q_at: int, at: list[int], out: Any = None) -> Any:
        """Run with arrays, by their addresses, that are like those of the call."""
        plan, like = self._plan, self._kind("q", q)
        addresses = [q_at, *at, *self._fixed, 0]
        if out is not None:
            try:
                addresses[-1], facts = device_kinds[type(out)].facts(out)
            except _UNREADABLE:
                _shadow_of("out", out, self._placement)  # which says what is wrong
                raise
            if facts != self._out_facts or not (plan is None or plan.overlaps_no_input(addresses)):
                self._require_out(out, addresses, {} if plan is None else plan.arrays)
                self._out_facts = facts
        if plan is None:
            out = like.empty("out", *self._planned[0][::2], "") if out is None else out
            return (out, like.empty("lse", q.shape[:2], FLOAT32, "")) if self._returns_lse else out
        return plan.attend(like, addresses, out, return_lse=self._returns_lse)

    def _require_out(self, out: Any, addresses: Sequence[int], arrays: Mapping[str, Array]) -> None:
        shadows = [make_shadow(at, *x, False) for at, x in zip(addresses, self._planned, strict=False)]
        inputs = {**dict(zip(_BROUGHT, shadows, strict=False)), **arrays}
        _require_out(_shadow_of("out", out, self._placement), shadows[0], inputs, self._placement)


class AttentionPlan:
    """A planned call of attention, which runs with q and caches of any layer; from `plan_decode` or `plan_prefill`.

    Threads may run one plan at the same time.

    Examples
    --------
    >>> import numpy as np
    >>> import pagedkv
    >>> layers = np.ones((3, 2, 4, 16, 2, 64), np.float32)  # K and V of 3 layers
    >>> q = np.ones((1, 8, 64), np.float32)
    >>> block_tables, seq_lens = np.array([[3, 1]], np.int32), np.array([20], np.int32)
    >>> plan = pagedkv.plan_decode(q, *layers[0], block_tables, seq_lens)
    >>> for k_cache, v_cache in layers:
    ...     q = plan.run(q, k_cache, v_cache)
    >>> seq_lens += 1
    >>> plan.refresh()
    >>> plan.run(q, *layers[0]).shape
    (1, 8, 64)
    """

    def __init__(self, arguments: AttentionArguments) -> None:
        call = attention_call(arguments)
        # For `refresh`: keep the metadata of q and caches alone.
        views = zip(_BROUGHT, (call.q, *call.caches), strict=False)
        brought: dict[str, Any] = {
            name: make_shadow(_NEVER_READ, x.shape, x.strides, x.dtype, False) for name, x in views
        }
        self._arguments = arguments._replace(**brought)
        self._plan: _HostPlan | _DevicePlan | None = (_HostPlan if call.placement.on_host else _DevicePlan)(call)

    @between_graphs
    def run(
        self, q: Any, k_cache: Any, v_cache: Any, *, k_scales: Any = None, v_scales: Any = None, out: Any = None
    ) -> Any:
        """Compute attention, as the planned call does with this q and these caches.

        Parameters
        ----------
        q, k_cache, v_cache : array
            Of the shape, strides, dtype and device that were planned.
        k_scales, v_scales : array, optional
            The scales of int8 caches, likewise.
        out : array of q's shape, optional
            Where to write the result: of q's dtype, C-contiguous, writable, overlapping no input.

        Returns
        -------
        out : array of q's shape, and with return_lse=True the LSE
            As from the call.

        Raises
        ------
        TypeError, ValueError
            An array is not as planned; `out` is wrong.
        RuntimeError
            The plan is closed.
        MemoryError
            The GPU has no room for a workspace.
        """
        plan = self._plan or self._opened()
        scales = () if k_scales is v_scales is None else (k_scales, v_scales)
        return plan.run(q, k_cache, v_cache, scales, out)

    @between_graphs
    def refresh(self) -> None:
        """Check and read the tables, the lengths and the arrays of options on the host again, which a plan copies.

        Does nothing on a device, where each run reads them.

        Raises
        ------
        ValueError, IndexError
            As from the call: the plan is as before.
        RuntimeError
            The plan is closed.
        """
        arguments = self._arguments
        if isinstance(self._opened(), _HostPlan):
            made = _HostPlan(attention_call(arguments))
            self._opened()  # another thread may have closed it meanwhile
            self._plan = made

    def close(self) -> None:
        """Let go of all arrays. Workspaces belong to the stream: see `release_workspaces`."""
        self._plan = None
        self._arguments = AttentionArguments(None, None, None, None, None)

    def _opened(self) -> _HostPlan | _DevicePlan:
        plan = self._plan
        if plan is None:
            raise RuntimeError("this plan is closed: plan_decode and plan_prefill make another one")
        return plan


@between_graphs
def plan_decode(q: Any, k_cache: Any, v_cache: Any, block_tables: Any, seq_lens: Any, **options: Any) -> AttentionPlan:
    """Validate and plan a call of `decode_attention`, which then runs for each layer of a model.

    Parameters
    ----------
    q, k_cache, v_cache : array
        Like those of each run: only shape, strides, dtype and device count.
    block_tables, seq_lens : array
        As in :func:`~pagedkv.decode_attention`. On a device the plan reads them where they are: their values may be
        overwritten, and the next run sees them. On the host it has a copy: see `AttentionPlan.refresh`.
    **options
        All other arguments of :func:`~pagedkv.decode_attention` but `out`. On a device a length beyond max_seq_len,
        rounded up, counts as 0; without max_seq_len the plan is for all lengths that the tables have room for.

    Returns
    -------
    AttentionPlan

    Raises
    ------
    TypeError, ValueError, IndexError, BackendUnavailableError
        As from the call; TypeError also for arrays that only speak DLPack.

    Examples
    --------
    >>> import numpy as np
    >>> import pagedkv
    >>> q, caches = np.ones((1, 8, 64), np.float32), np.ones((2, 4, 16, 2, 64), np.float32)
    >>> plan = pagedkv.plan_decode(q, *caches, np.array([[3, 1]], np.int32), np.array([20], np.int32))
    >>> plan.run(q, *caches).shape
    (1, 8, 64)
    """
    _require_options("plan_decode", decode_attention, options)
    return AttentionPlan(AttentionArguments(q, k_cache, v_cache, block_tables, seq_lens, **options))


@between_graphs
def plan_prefill(
    q: Any, k_cache: Any, v_cache: Any, block_tables: Any, seq_lens: Any, query_starts: Any, **options: Any
) -> AttentionPlan:
    """Validate and plan a call of `prefill_attention`, which then runs for each layer of a model.

    Parameters
    ----------
    q, k_cache, v_cache, block_tables, seq_lens
        As in :func:`~pagedkv.plan_decode`.
    query_starts : (num_seqs + 1,) int32 array
        As in :func:`~pagedkv.prefill_attention`; read as the lengths are.
    **options
        All other arguments of :func:`~pagedkv.prefill_attention` but `out`.

    Returns
    -------
    AttentionPlan

    Raises
    ------
    TypeError, ValueError, IndexError, BackendUnavailableError
        As from `plan_decode`.

    Examples
    --------
    >>> import numpy as np
    >>> import pagedkv
    >>> q, caches = np.ones((5, 8, 64), np.float32), np.ones((2, 4, 16, 2, 64), np.float32)
    >>> where = np.array([[3, 1], [0, 0]], np.int32), np.array([20, 2], np.int32), np.array([0, 3, 5], np.int32)
    >>> pagedkv.plan_prefill(q, *caches, *where).run(q, *caches).shape
    (5, 8, 64)
    """
    _require_options("plan_prefill", prefill_attention, options)
    where = block_tables, seq_lens, query_starts
    return AttentionPlan(AttentionArguments(q, k_cache, v_cache, *where, ragged=True, **options))


def attend(
    operation: Callable[..., Any],
    plans: dict[Hashable, Any],
    caches_key: Hashable,
    q: Any,
    caches: tuple[Any, ...],
    where: dict[str, Any],
    stored: dict[str, Any],
    options: dict[str, Any],
) -> Any:
    """Run an attention call, by the plan of an earlier call like it if there is one.

    Parameters
    ----------
    operation : callable
        decode_attention or prefill_attention.
    plans : dict
        The plans of earlier calls, by everything that they depend on.
    caches_key
        Equal for calls whose caches have the same shapes, strides, dtypes and scales, so that they can share plans.
    q : (num_tokens, num_heads, head_dim) array
    caches : tuple of array
        The arrays of the layer, by `CACHES`; on the host NumPy views.
    where : dict
        block_tables, seq_lens and, for prefill_attention, query_starts.
    stored, options : dict
        All other arguments of the operation: `stored` says how the caches are stored, with max_seq_len, and `options`
        is what the caller of this layer passes, which may change. Where these hold arrays or unknown names but `out`,
        the operation itself runs.

    Returns
    -------
    array, and with return_lse=True the LSE
        What the operation returns.
    """
    out, chosen = options.pop("out", None), options.values()
    if not (_OPTIONS.issuperset(options) and _PLAIN_TYPES.issuperset(map(type, chosen))):
        return operation(q, **where, **dict(zip(CACHES, caches, strict=False)), **stored, **options, out=out)
    argument = identify("q", q)
    settings = *options, *chosen, *map(type, chosen)  # 1, 1.0 and True are equal, but not all are valid
    if not argument.on_device and type(where["seq_lens"]) is np.ndarray:
        view = argument.view()
        # Compare bytes, and plan by them too, since another thread may write to these arrays at any time.
        tables = [(x.shape, x.dtype, x.tobytes()) for x in where.values()]
        bound, checks = stored["max_seq_len"], check_setting() if "backend" in options else None
        key = caches_key, _facts(view), *tables, bound, type(bound), get_num_threads(), checks, *settings
        on_host: _HostPlan | None = plans.get(key)
        if on_host is None:
            copies = (np.frombuffer(raw, dtype).reshape(shape) for shape, dtype, raw in tables)
            where = dict(zip(where, copies, strict=True))
            on_host = _kept(plans, key, _HostPlan, view, caches, where, stored, options)
        return on_host.attend(argument, view, caches, out)
    try:
        kind = cast("DeviceArgument", argument)
        read, address = kind.facts, kind.address
        q_at, facts = read(q)
        bound = bucket(stored["max_seq_len"])
        key = caches_key, facts, *map(read, where.values()), bound, check_setting(), *settings
        on_device: _DevicePlan | None = plans.get(key)
    except _UNREADABLE:  # validation says what is wrong
        return operation(q, **where, **dict(zip(CACHES, caches, strict=False)), **stored, **options, out=out)
    if on_device is None:
        on_device = _kept(plans, key, _DevicePlan, q, caches, where, stored, options)
    return on_device.attend(q, q_at, [*map(address, caches)], out)


def _kept(
    plans: dict[Hashable, Any],
    key: Hashable,
    kind: Callable[[AttentionCall], Any],
    q: Any,
    caches: tuple[Any, ...],
    where: dict[str, Any],
    stored: dict[str, Any],
    options: dict[str, Any],
) -> Any:
    """A new plan, which is kept under its key."""
    ragged = "query_starts" in where
    of_layer = dict(zip(CACHES, caches, strict=False))
    plan = kind(attention_call(AttentionArguments(q, ragged=ragged, **of_layer, **where, **stored, **options)))
    if len(plans) >= MOST_PLANS:
        plans.clear()
    plans[key] = plan
    return plan


def _require_options(name: str, operation: Callable[..., Any], options: Mapping[str, Any]) -> None:
    """Raise TypeError for an option that the operation does not have, or that belongs to a run."""
    known = signature(operation).parameters.keys() - {"out"}
    for option in options:
        if option not in known:
            raise TypeError(f"{name}() got an unexpected keyword argument {option!r}")


def _facts(x: Array) -> tuple[Any, ...]:
    return x.shape, x.strides, x.dtype, x.flags.num & _ALIGNED


def _shadow_of(name: str, x: Any, placement: Placement) -> Array:
    """View an array on the host, or the shadow of one on a device; raise unless it is where the plan's arrays are."""
    argument = identify(name, x)
    if argument.on_device == placement.on_host:
        place = "the host" if placement.on_host else "a device"
        raise ValueError(f"{name} must be on {place}, as the arrays that were planned")
    if not argument.on_device:
        return argument.view()
    shadow, ordinal = argument.metadata(placement.stream)
    if ordinal not in (None, placement.ordinal):
        raise ValueError(f"{name} must be on device {placement.ordinal}, which was planned, got device {ordinal}")
    return shadow


def _shadows_of(placement: Placement, planned: Sequence[Any], *brought: Any) -> list[Array]:
    has_all = all(x is not None for x in brought[3:])  # of the scales
    if len(brought) != len(planned) or not has_all:
        given = "takes no" if len(brought) > len(planned) else "needs"
        raise ValueError(f"the plan {given} k_scales and v_scales, as the call that was planned")
    return [_shadow_of(name, x, placement) for name, x in zip(_BROUGHT, brought, strict=False)]


def _refuse(given: Sequence[Array], placement: Placement, planned: _Planned) -> NoReturn:
    """Raise for the first array that is not as planned."""
    for name, x, (shape, strides, dtype) in zip(_BROUGHT, given, planned, strict=False):
        require.shape(name, x, "as planned", shape)
        require.dtype(name, x, dtype, ", as planned")
        require.memory({name: x}, placement)
        if x.strides != strides:
            raise ValueError(f"{name} must have strides {strides} in bytes, as planned, got {x.strides}")
    raise ValueError(
        f"{', '.join(_BROUGHT[: len(planned) - 1])} and {_BROUGHT[len(planned) - 1]} must be of the framework that was "
        "planned, begin at the same offset in 16 bytes, and be as writable"
    )


def _require_out(out: Array, q: Array, inputs: Mapping[str, Array | None], placement: Placement) -> None:
    require.shape("out", out, "of q", q.shape)
    require.dtype("out", out, q.dtype, ", that of q")
    if not out.flags.c_contiguous:
        raise ValueError(f"out must be C-contiguous for a plan, got strides {out.strides} in bytes")
    require.memory({"out": out}, placement)
    require.writable("out", out)
    require.no_overlap("out", out, ((name, x) for name, x in inputs.items() if x is not None))

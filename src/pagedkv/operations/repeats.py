"""What the layers of a model ask for one after the other on the CPU: validated and planned once.

Their q, k and v are alike, and so are their caches. What follows from a valid call is kept under all that it follows
from: its form, and what decode_attention launches for its tables and lengths.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from inspect import signature
from types import NoneType
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import numpy as np

from ..arrays import Array, identify
from ..calls import Form
from ..cpu import backend as cpu
from ..layouts import CacheSpec
from ..validation.attention import attention_call, known_decode
from ..validation.caches import known_write, write_call
from ..validation.forms import MOST_FORMS
from .attention import decode_attention
from .caches import write_kv

if TYPE_CHECKING:
    from ..cpu.attention.decode import Launch

T = TypeVar("T")

_OPTIONS = frozenset(("scale", "window", "softcap", "alibi_slopes", "sinks", "score_mod", "check"))
_PLAIN = frozenset((bool, int, float, str, NoneType))  # an option of these types is no more than its value


def _defaults(operation: Callable[..., Any]) -> dict[str, Any]:
    parameters = signature(operation).parameters.values()
    return {x.name: x.default for x in parameters if x.default is not x.empty}


_DECODE, _WRITE = _defaults(decode_attention), _defaults(write_kv)


class _Step(NamedTuple):
    """What calls with the same tables and lengths launch: those of the last step alone, for tables may be large."""

    values: tuple[bytes, bytes, int]  # tables, lengths and max_seq_len
    launches: dict[Hashable, Launch]


class Repeats:
    """Calls of decode_attention and write_kv for caches on the host that are all alike and have no scales.

    Parameters
    ----------
    options : dict
        How the caches are stored: options of both.
    """

    def __init__(self, options: dict[str, Any]) -> None:
        self._options = options
        self._decodes: dict[Hashable, Form] = {}
        self._step = _Step((b"", b"", 0), {})
        self._writes: dict[Hashable, CacheSpec] = {}

    def decode(
        self, q: Any, k_cache: Array, v_cache: Array, tables: Array, lens: Array, max_seq_len: int, /, **options: Any
    ) -> Any:
        """What ``decode_attention(q, k_cache, v_cache, tables, lens, ...)`` returns."""
        key = None
        are_plain = _OPTIONS.issuperset(options) and _PLAIN.issuperset(map(type, options.values()))
        if are_plain and type(max_seq_len) is int and max_seq_len >= 0:
            argument = identify("q", q)
            if not argument.on_device:
                view, chosen = argument.view(), options.values()
                key = (_facts(view), _facts(tables), _facts(lens), *options, *chosen, *map(type, chosen))
                launch = self._launch(key, view, k_cache, v_cache, tables, lens, max_seq_len)
                if launch is not None:
                    out, result = argument.new("out", view.shape, view.dtype, 0, "")
                    cpu.run_decode(launch, view, k_cache, v_cache, result)
                    return out
        given = {"q": q, "k_cache": k_cache, "v_cache": v_cache, "block_tables": tables, "seq_lens": lens}
        given |= {"max_seq_len": max_seq_len, **self._options}
        if key is not None and key not in self._decodes:
            _keep(self._decodes, key, attention_call(_DECODE | given | options).form)
        return decode_attention(**given, **options)

    def _launch(
        self,
        key: Hashable,
        q: Array,
        k_cache: Array,
        v_cache: Array,
        tables: Array,
        lens: Array,
        max_seq_len: int,
    ) -> Launch | None:
        """The launch of a call; None where its form is not known, or a sequence has no tokens."""
        form = self._decodes.get(key)
        if form is None:
            return None
        step, values = self._step, (tables.tobytes(), lens.tobytes(), max_seq_len)
        if step.values != values:
            step = self._step = _Step(values, {})
        launch = step.launches.get(key)
        if launch is None:
            # What is planned is what was compared, whatever other threads write meanwhile.
            tables = np.frombuffer(values[0], tables.dtype).reshape(tables.shape)
            lens = np.frombuffer(values[1], lens.dtype)
            call = known_decode(form, q, k_cache, v_cache, tables, lens, max_seq_len)
            if np.count_nonzero(lens) == len(q) > 0:
                launch = cpu.plan_decode(call)
                _keep(step.launches, key, launch)
        return launch

    def write(self, k: Any, v: Any, k_cache: Array, v_cache: Array, slots: Any) -> None:
        """Do what ``write_kv(k, v, k_cache, v_cache, slots, ...)`` does."""
        arguments, key = (identify("k", k), identify("v", v), identify("slots", slots)), None
        hosts = [argument.view() for argument in arguments if not argument.on_device]
        if len(hosts) == len(arguments):
            key = (*map(_facts, hosts), k_cache.flags.num, v_cache.flags.num)
            spec = self._writes.get(key)
            call = None if spec is None else known_write(spec, k_cache, v_cache, *hosts)
            if call is not None:
                cpu.write_kv(call)
                return
        given = {"k": k, "v": v, "k_cache": k_cache, "v_cache": v_cache, "slots": slots} | self._options
        if key is not None and key not in self._writes:
            _keep(self._writes, key, write_call(_WRITE | given).spec)
        write_kv(**given)


def _facts(x: Array) -> Hashable:
    """All that validation looks at but values and addresses."""
    return x.shape, x.strides, x.dtype, x.flags.num


def _keep(known: dict[Hashable, T], key: Hashable, what: T) -> None:
    if len(known) >= MOST_FORMS:
        known.clear()
    known[key] = what

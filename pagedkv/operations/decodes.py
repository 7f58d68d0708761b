"""Calls of decode_attention on the CPU that are like an earlier one: validated and planned once.

The layers of a model pass the same tables and lengths one after the other, and q and caches that are alike. What
follows from a valid call is kept under all that it follows from: its form under what validation looks at, and what it
launches under that and the values of tables and lengths.
"""

from __future__ import annotations

import sys
from collections.abc import Hashable, Mapping
from operator import itemgetter
from types import NoneType
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import numpy as np

from ..arrays import Array
from ..calls import OPTIONS, REQUIRED, SCALES, Form
from ..commit import bits, commit
from ..cpu import backend as cpu
from ..cpu.threads import get_num_threads
from ..validation.attention import known_decode, longest_of
from ..validation.copies import MOST_BYTES
from ..validation.forms import MOST_FORMS
from ..validation.require import apart

if TYPE_CHECKING:
    from ..cpu.attention.decode import Launch

T = TypeVar("T")

PLAIN = frozenset((bool, int, float, str, NoneType))  # an option of these types is no more than its value

_arrays = itemgetter(*REQUIRED)
_options = itemgetter(*OPTIONS, *SCALES, "backend")
_NUMPY = (np.ndarray,) * 5
_RESULTS = (NoneType, np.ndarray)


def key_of(given: Mapping[str, Any]) -> Hashable:
    """All that validation looks at of a call of decode_attention but addresses and values.

    None for a call that is not kept: one whose tables take longer to compare than to validate, or whose options are not
    plain values of Python: an array may hold something else in the next one.
    """
    if not (given["alibi_slopes"] is given["sinks"] is given["score_mod"] is None):
        return None
    arrays, options, bound, out = _arrays(given), _options(given), given["max_seq_len"], given["out"]
    if tuple(map(type, arrays)) != _NUMPY or not (bound is None or (type(bound) is int and bound >= 0)):
        return None
    q, k_cache, v_cache, tables, lens = arrays
    kinds = tuple(map(type, options))  # 1 and 1.0 and True are equal, and are not all valid
    if tables.nbytes > MOST_BYTES or not PLAIN.issuperset(kinds) or type(out) not in _RESULTS:
        return None
    result = None if out is None else facts(out)
    return (kinds, options, facts(q), facts(k_cache), facts(v_cache), facts(tables), facts(lens), result)


def facts(x: Array) -> Hashable:
    """All that validation looks at but values and addresses."""
    return x.shape, x.strides, x.dtype, x.flags.num


def keep(known: dict[Hashable, T], key: Hashable, what: T) -> None:
    """Keep what is known under a key; all else is forgotten where there is too much."""
    if len(known) >= MOST_FORMS:
        known.clear()
    known[key] = what


class _Step(NamedTuple):
    """What calls with the same tables and lengths launch; of the last two steps alone, for tables may be large."""

    values: tuple[bytes, bytes, int, int]  # tables, lengths, max_seq_len and the number of threads
    launches: dict[Hashable, Launch]
    before: dict[Hashable, Launch]  # on as many threads


class Decodes:
    """What valid calls of decode_attention launch, by their keys."""

    def __init__(self) -> None:
        self._forms: dict[Hashable, Form] = {}
        self._step = _Step((b"", b"", 0, 0), {}, {})

    def __contains__(self, key: Hashable) -> bool:
        return key in self._forms

    def keep(self, key: Hashable, form: Form) -> None:
        """Remember the form of all calls with a key."""
        keep(self._forms, key, form)

    def launch(
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
        form = self._forms.get(key)
        if form is None:
            return None
        step, num_threads = self._step, get_num_threads()
        values = tables.tobytes(), lens.tobytes(), max_seq_len, num_threads
        if step.values == values and (launch := step.launches.get(key)) is not None:
            return launch
        tables, lens = tables.copy(), lens.copy()  # what is planned is what is compared, whatever other threads write
        values = tables.tobytes(), lens.tobytes(), max_seq_len, num_threads
        if np.count_nonzero(lens) != len(q) or not len(q):
            return None
        longest = longest_of(form, tables, lens, max_seq_len)
        if step.values != values:
            step = self._step = _Step(values, {}, step.launches if step.values[3] == num_threads else {})
        before = step.before.get(key)
        launch = None if before is None else before.renewed(tables, lens, longest)
        if launch is None:
            launch = cpu.plan_decode(known_decode(form, q, k_cache, v_cache, tables, lens, longest))
        keep(step.launches, key, launch)
        return launch

    def repeat(self, key: Hashable, given: Mapping[str, Any]) -> Any:
        """Run a call, of whose arguments this is the key, and return its result; None where it has to be validated."""
        if key not in self:
            return None
        q, k_cache, v_cache, tables, lens = arrays = _arrays(given)
        bound, out = given["max_seq_len"], given["out"]
        if out is not None:
            apart("out", out, zip(REQUIRED, arrays, strict=True))
        launch = self.launch(key, q, k_cache, v_cache, tables, lens, sys.maxsize if bound is None else bound)
        if launch is None:
            return None
        shape = launch.form.q_shape  # that of q may be another one by now
        result, lse = np.empty(shape, q.dtype), np.empty(shape[:2], np.float32)
        cpu.run_decode(launch, q, k_cache, v_cache, result, lse)
        if out is None:
            out = result
        else:
            commit([(bits(out), ..., bits(result))])
        return (out, lse) if given["return_lse"] else out

"""What the layers of a model ask for one after the other on the CPU: validated and planned once.

Their q, k and v are alike, and so are their caches. What follows from a valid call is kept under all that it follows
from: its form, and what decode_attention launches for its tables and lengths.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from inspect import signature
from typing import Any

import numpy as np

from ..arrays import Array, identify
from ..cpu import backend as cpu
from ..layouts import CacheSpec
from ..validation.attention import attention_call
from ..validation.caches import known_write, write_call
from .attention import decode_attention
from .caches import write_kv
from .decodes import PLAIN, Decodes, facts, keep

# A call with any other option is decode_attention's alone.
_OPTIONS = frozenset(("scale", "window", "softcap", "alibi_slopes", "sinks", "score_mod", "check"))


def _defaults(operation: Callable[..., Any]) -> dict[str, Any]:
    parameters = signature(operation).parameters.values()
    return {x.name: x.default for x in parameters if x.default is not x.empty}


_DECODE, _WRITE = _defaults(decode_attention), _defaults(write_kv)


class Repeats:
    """Calls of decode_attention and write_kv for caches on the host that are all alike and have no scales.

    Parameters
    ----------
    options : dict
        How the caches are stored: options of both.
    """

    def __init__(self, options: dict[str, Any]) -> None:
        self._options = options
        self._decodes = Decodes()
        self._writes: dict[Hashable, CacheSpec] = {}

    def decode(
        self, q: Any, k_cache: Array, v_cache: Array, tables: Array, lens: Array, max_seq_len: int, /, **options: Any
    ) -> Any:
        """What ``decode_attention(q, k_cache, v_cache, tables, lens, ...)`` returns."""
        key = None
        are_plain = _OPTIONS.issuperset(options) and PLAIN.issuperset(map(type, options.values()))
        if are_plain and type(max_seq_len) is int and max_seq_len >= 0:
            argument = identify("q", q)
            if not argument.on_device:
                view, chosen = argument.view(), options.values()
                key = (facts(view), facts(tables), facts(lens), *options, *chosen, *map(type, chosen))
                launch = self._decodes.launch(key, view, k_cache, v_cache, tables, lens, max_seq_len)
                if launch is not None:
                    out, result = argument.new("out", view.shape, view.dtype, 0, "")
                    cpu.run_decode(launch, view, k_cache, v_cache, result, np.empty(view.shape[:2], np.float32))
                    return out
        given = {"q": q, "k_cache": k_cache, "v_cache": v_cache, "block_tables": tables, "seq_lens": lens}
        given |= {"max_seq_len": max_seq_len, **self._options}
        if key is not None and key not in self._decodes:
            self._decodes.keep(key, attention_call(_DECODE | given | options).form)
        return decode_attention(**given, **options)

    def write(self, k: Any, v: Any, k_cache: Array, v_cache: Array, slots: Any) -> None:
        """Do what ``write_kv(k, v, k_cache, v_cache, slots, ...)`` does."""
        arguments, key = (identify("k", k), identify("v", v), identify("slots", slots)), None
        hosts = [argument.view() for argument in arguments if not argument.on_device]
        if len(hosts) == len(arguments):
            key = (*map(facts, hosts), k_cache.flags.num, v_cache.flags.num)
            spec = self._writes.get(key)
            call = None if spec is None else known_write(spec, k_cache, v_cache, *hosts)
            if call is not None:
                cpu.write_kv(call)
                return
        given = {"k": k, "v": v, "k_cache": k_cache, "v_cache": v_cache, "slots": slots} | self._options
        if key is not None and key not in self._writes:
            keep(self._writes, key, write_call(_WRITE | given).spec)
        write_kv(**given)

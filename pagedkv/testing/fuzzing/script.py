"""Scripts that reproduce a failing call with its arrays, and import only pagedkv and NumPy."""

from __future__ import annotations

import base64
import ctypes
import inspect
import textwrap
import zlib
from typing import Any

import numpy as np
from numpy.lib.array_utils import byte_bounds

from ..calls import STEPS
from ..problems.attention import Problem, Spec, build
from ..problems.merges import MergeSpec, states
from ..problems.writes import WriteSpec, build_write

Array = np.ndarray[Any, Any]

HEAD = '''import base64
import math
import zlib

import numpy as np

import pagedkv
from pagedkv import reference


def array(dtype, shape, strides, first, text):
    """An array whose element 0 is `first` bytes into the memory that the text holds."""
    memory = bytearray(zlib.decompress(base64.b64decode(text)))
    return np.ndarray(shape, dtype, memory, first, strides)


'''
CLOSE = """out, lse = pagedkv.{operation}(*arguments, **options, {changes}return_lse=True)
exact, exact_lse = reference.{operation}(*arguments, **options, return_lse=True)
rounded = reference.{operation}(*arguments, **options, round_to=q.dtype)
_, rounded_lse = reference.{operation}(*arguments, **options, return_lse=True, round_to=np.float32)
for name, got, wanted, near in (("out", out, exact, rounded), ("lse", lse, exact_lse, rounded_lse)):
    got, wanted, near = got[:{rows}].astype(float), wanted[:{rows}], near[:{rows}]
    seen = wanted > -np.inf
    assert (got[~seen] == -np.inf).all(), name + " of a row that sees no key"
    error, allowed = (np.abs(x[seen] - wanted[seen]).max(initial=0) for x in (got, near))
    largest = np.abs(wanted[seen]).max(initial=0)
    bound = {factor} * allowed + (1e-5 + 1e-6 * largest if name == "lse" else 1e-5 * max(1, largest / 8))
    print(name, "is off by", error, "where", bound, "is allowed")
    assert error <= bound
"""
SAME = """first = pagedkv.{operation}(*arguments, **options, {changes}return_lse=True)
again = pagedkv.{operation}(*moved, **options, {changes}return_lse=True)
for one, other in zip(first, again):
    assert one[:{rows}].tobytes() == other[:{rows}].tobytes(), "other bits where only blocks have moved"
"""
WRITE = """expected = [k_cache.copy(), v_cache.copy()]
reference.write_kv(k, v, *expected, slots, **options)
pagedkv.write_kv(k, v, k_cache, v_cache, slots, **options{changes})
for cache, wanted in zip((k_cache, v_cache), expected):
    assert cache.tobytes() == wanted.tobytes(), "caches differ"
"""
MERGE = """out, lse = pagedkv.merge_states({given}{changes})
exact, exact_lse = reference.merge_states(outs, lses)
seen = exact_lse > -np.inf
assert (out[~seen] == 0).all()
np.testing.assert_allclose(lse, exact_lse, rtol=1e-6, atol=1e-6)
np.testing.assert_allclose(out.astype(float), exact, rtol={step}, atol={step})
"""


def script(spec: Spec | WriteSpec | MergeSpec, said: str, *, moved: Spec | None = None, **changes: Any) -> str:
    """Write a script that fails as the check of `spec` did.

    Parameters
    ----------
    spec : Spec, WriteSpec or MergeSpec
    said : str
        The failure's message, for the first lines.
    moved : Spec, optional
        The same problem with its blocks elsewhere, whose result has other bits.
    **changes
        More arguments of the call: backend="cpu", or an `EmulatorDevice`, which has the same settings in the script.
    """
    comment = textwrap.indent(said.strip() or "It fails.", "# ", lambda line: True)
    named = ", ".join(f"{name}={value!r}" for name, value in changes.items())
    emulator = "from pagedkv.emulator import EmulatorDevice\n\n" if "EmulatorDevice(" in named else ""
    text = f"# {spec!r}\n{comment}\n{HEAD}{emulator}"
    if isinstance(spec, WriteSpec):
        write = build_write(spec)
        arrays = {"k": write.k, "v": write.v, "k_cache": write.problem.k_cache, "v_cache": write.problem.v_cache}
        text += _assignments(arrays | {"slots": write.slots}) + _options(write.options)
        return text + WRITE.format(changes=f", {named}" if named else "")
    if isinstance(spec, MergeSpec):
        outs, lses = states(spec.seed, spec.num_states, spec.dtype, spec.shape)
        given = "list(outs), list(lses)" if spec.as_list else "outs, lses"
        text += _assignments({"outs": outs, "lses": lses})
        return text + MERGE.format(given=given, changes=f", {named}" if named else "", step=STEPS[spec.dtype])
    problem = build(spec)
    names = ("q", "k_cache", "v_cache", "block_tables", "seq_lens", "query_starts")[: len(problem.args)]
    if spec.score_mod is not None:
        text += textwrap.dedent(inspect.getsource(spec.score_mod)) + "\n\n"
    text += _assignments(dict(zip(names, problem.args, strict=True)))
    text += f"arguments = ({', '.join(names)})\n" + _options(problem.options)
    if moved is not None:
        again = build(moved)
        text += _assignments({f"{name}_moved": x for name, x in zip(names[1:4], again.args[1:4], strict=True)})
        text += f"moved = ({', '.join([names[0], *(f'{name}_moved' for name in names[1:4]), *names[4:]])})\n"
    return text + (CLOSE if moved is None else SAME).format(
        operation="decode_attention" if problem.query_starts is None else "prefill_attention",
        changes=f"{named}, " if named else "",
        rows=problem.num_written,
        factor=5 if _has_large_biases(problem) else 2,
    )


def _has_large_biases(problem: Problem) -> bool:
    spec = problem.spec
    return spec.alibi and max(spec.seq_lens) * float(problem.options["alibi_slopes"].max()) > 100


def _assignments(arrays: dict[str, Array]) -> str:
    return "".join(f"{name} = {_literal(x)}\n" for name, x in arrays.items())


def _options(options: dict[str, Any]) -> str:
    given = {name: value for name, value in options.items() if value is not None}
    texts = {name: _literal(x) if isinstance(x, np.ndarray) else _source_of(x) for name, x in given.items()}
    return f"options = dict({', '.join(f'{name}={text}' for name, text in texts.items())})\n"


def _source_of(value: Any) -> str:
    return value.__name__ if callable(value) else repr(value)


def _literal(x: Array) -> str:
    """Source text of an array: values of integers, otherwise its memory with all gaps."""
    if x.dtype.kind == "i":
        return f"np.array({x.tolist()!r}, np.{x.dtype.name}).reshape({x.shape})"
    if not x.size:
        return f"np.zeros({x.shape}, {x.dtype.name!r})"
    low, high = byte_bounds(x)
    memory = ctypes.string_at(low, high - low)
    text = base64.b64encode(zlib.compress(memory, 9)).decode()
    return f"array({x.dtype.name!r}, {x.shape}, {x.strides}, {x.ctypes.data - low}, {text!r})"

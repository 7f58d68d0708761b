"""Calls of decode_attention on the CPU that are like an earlier one: not validated again, and what differs is."""

from unittest import mock

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import pagedkv
from pagedkv.operations import attention, decodes

B, HEADS, KV_HEADS, DIM, N, P = 2, 4, 2, 16, 9, 8
EMPTY = np.empty((B, HEADS, DIM), np.float32)


NO_SINKS = np.full(HEADS, -np.inf, np.float32)  # they change no bit, and such a call is validated each time


@pytest.fixture
def arguments(monkeypatch):
    monkeypatch.setattr(attention, "_decodes", decodes.Decodes())
    return new_arguments()


def new_arguments():
    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal(shape, np.float32) for shape in ((B, HEADS, DIM), *[(N, P, KV_HEADS, DIM)] * 2))
    tables, lens = np.array([[0, 1, 2, 3], [4, 5, 6, 7]], np.int32), np.array([20, 9], np.int32)
    return {"q": q, "k_cache": k, "v_cache": v, "block_tables": tables, "seq_lens": lens}


@pytest.fixture
def validated(monkeypatch):
    """The calls that are looked at as a whole."""
    calls = []
    whole = attention.attention_call
    monkeypatch.setattr(attention, "attention_call", lambda given: [calls.append(given), whole(given)][1])
    return calls


def _bytes(result):
    return [x.tobytes() for x in (result if isinstance(result, tuple) else (result,))]


@pytest.mark.parametrize("return_lse", [False, True])
@pytest.mark.parametrize("out", [None, EMPTY, np.empty((HEADS, B, DIM), np.float32).swapaxes(0, 1)])
def test_a_call_like_an_earlier_one(arguments, validated, out, return_lse):
    """Other q, caches, tables and lengths of the same form; results of the call's own, or where the caller wants it."""
    asked = {"out": out, "return_lse": return_lse}
    first = _bytes(pagedkv.decode_attention(**arguments, **asked))
    for change in ("q", "k_cache", "v_cache", "block_tables", "seq_lens"):
        arguments[change] = arguments[change][::-1].copy()
        got = pagedkv.decode_attention(**arguments, **asked)
        assert len(validated) == 1
        assert out is None or (got[0] if return_lse else got) is out
        expected = pagedkv.decode_attention(**arguments, return_lse=return_lse, sinks=NO_SINKS)
        validated.pop()
        assert _bytes(got) == _bytes(expected) != first


LENGTHS = st.sampled_from([0, 1, 8, 9, 31, 511, 512, 513, 600, 601]) | st.integers(1, 600)


@given(
    st.lists(
        st.tuples(
            st.tuples(LENGTHS, LENGTHS),
            st.integers(0, 3),
            st.lists(st.sampled_from([{}, {"window": 20}, {"softcap": 1.0}, {"max_seq_len": 550}]), max_size=3),
        ),
        max_size=6,
    )
)
def test_steps_with_other_tables_and_lengths(steps):
    """Short and long ones, on one thread and on two, with layers whose options differ; what is refused, too."""
    arguments, threads = new_arguments(), pagedkv.get_num_threads()
    table = np.arange(75) % N
    try:
        with mock.patch.object(attention, "_decodes", decodes.Decodes()):
            for lens, seed, layers in steps:
                pagedkv.set_num_threads(1 + seed % 2)
                arguments["seq_lens"] = np.array(lens, np.int32)
                arguments["block_tables"] = np.array([(table + seed) % N, (table * 2) % N], np.int32)
                arguments["block_tables"][0, -(-lens[0] // P) :] = [-1, N, 0, 2**31 - 1][seed]
                for options in layers:
                    got, expected = (attempt(arguments | options | more) for more in ({}, {"sinks": NO_SINKS}))
                    assert got == expected
    finally:
        pagedkv.set_num_threads(threads)


def attempt(arguments):
    """The bytes of a result, or what the error says."""
    try:
        return _bytes(pagedkv.decode_attention(**arguments, return_lse=True))
    except ValueError as error:
        return str(error)


def test_a_result_that_overlaps_is_refused(arguments):
    """Where it is may differ from call to call, and is looked at in each."""
    memory = np.zeros((2 * B, HEADS, DIM), np.float32)
    memory[:B] = arguments["q"]
    for begin, is_apart in ((B, True), (B - 1, False), (B, True), (0, False)):
        asked = arguments | {"q": memory[:B], "out": memory[begin : begin + B]}
        if is_apart:
            pagedkv.decode_attention(**asked)
        else:
            with pytest.raises(ValueError, match=r"^out must not overlap q$"):
                pagedkv.decode_attention(**asked)


def test_a_repeated_call_writes_its_result_at_the_end(arguments, validated, monkeypatch):
    def fail(writes):
        raise MemoryError

    out = np.zeros((B, HEADS, DIM), np.float32)
    pagedkv.decode_attention(**arguments, out=out.copy())
    monkeypatch.setattr(decodes, "commit", fail)
    with pytest.raises(MemoryError):
        pagedkv.decode_attention(**arguments, out=out)
    assert (len(validated), np.count_nonzero(out)) == (1, 0)


@pytest.mark.parametrize(
    "other",
    [
        {"sinks": np.zeros(HEADS, np.float32)},
        {"alibi_slopes": np.zeros(HEADS, np.float32)},
        {"scale": np.array(1.0)},
        {"seq_lens": np.array([0, 3], np.int32)},
        {"max_seq_len": np.int64(20)},
        {"block_tables": np.zeros((B, 513), np.int32)},
    ],
)
def test_calls_that_are_validated_each_time(arguments, validated, other):
    for count in (1, 2, 3):
        pagedkv.decode_attention(**arguments | other)
        assert len(validated) == count


@pytest.mark.parametrize(
    ("other", "error"),
    [
        ({"scale": True}, TypeError),
        ({"window": 1.0}, TypeError),
        ({"backend": "cuda"}, ValueError),
        ({"max_seq_len": 19}, ValueError),
        ({"max_seq_len": True}, TypeError),
        ({"return_lse": 0}, TypeError),
        ({"out": np.frombuffer(bytes(4 * B * HEADS * DIM), np.float32).reshape(B, HEADS, DIM)}, ValueError),
        ({"out": np.empty((B, HEADS, DIM), np.float16)}, TypeError),
        ({"q": np.ones((B, HEADS, 2 * DIM), np.float32)[..., ::2]}, ValueError),
        ({"seq_lens": np.array([20, 33], np.int32)}, ValueError),
        ({"block_tables": np.full((B, 4), N, np.int32)}, IndexError),
    ],
)
def test_what_differs_is_refused_as_ever(arguments, other, error):
    with pytest.raises(error) as first:
        pagedkv.decode_attention(**arguments | other)
    pagedkv.decode_attention(**arguments, scale=1, window=1)
    pagedkv.decode_attention(**arguments)
    for options in ({}, {"scale": 1, "window": 1}):
        with pytest.raises(error) as second:
            pagedkv.decode_attention(**arguments | options | other)
        assert str(second.value) == str(first.value)


def test_another_number_of_threads_is_another_plan(arguments):
    threads, steps = pagedkv.get_num_threads(), []
    try:
        for count in (threads, threads, threads + 1):
            pagedkv.set_num_threads(count)
            for _ in range(2):
                pagedkv.decode_attention(**arguments)
            steps.append(attention._decodes._step)
    finally:
        pagedkv.set_num_threads(threads)
    assert steps[0] is steps[1] is not steps[2]
    assert not steps[2].before

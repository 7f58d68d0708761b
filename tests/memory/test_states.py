"""States of sequences: who shares a slot, when a state goes to another one, where a sequence goes back to, refusals."""

from dataclasses import replace

import numpy as np
import pytest

from pagedkv import PagedKVCache, commit
from pagedkv.errors import CapacityError
from pagedkv.memory import BlockRemoved
from pagedkv.memory.device.arrays import Arrays
from pagedkv.memory.device.state_arrays import StateArrays
from pagedkv.memory.sizing import bytes_of

from .manager import fails_after, refused
from .texts import P, Texts, advanced, make_cache, slots_held, snapshots, texts_of

SIZE = {"num_layers": 1, "num_blocks": 8, "block_size": 4, "num_kv_heads": 1, "head_dim": 8}


@pytest.mark.parametrize("module", ["numpy", "torch"])
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_states_are_copied_in_and_out_as_they_are(module, dtype):
    xp = pytest.importorskip(module)
    cache = PagedKVCache(**SIZE, states={"conv": ((2, 3), dtype), "count": ((), "float32")}, array_module=module)
    assert [array.shape[1:] for array in cache.states.values()] == [(2, 3), ()]
    a, b = (cache.add(n).seq for n in (5, 2))
    states = cache.read_states([a, b])
    assert not states["conv"].any()
    for name, state in states.items():
        values = np.arange(1, 1 + np.prod(state.shape), dtype=np.float32).reshape(state.shape)
        states[name] = values.astype(state.dtype) if xp is np else xp.tensor(values, dtype=state.dtype)
    cache.write_states([a, b], states)
    assert cache.state_lens([b, a]).tolist() == [2, 5]
    back = cache.read_states([b, a])
    assert all((back[name] == states[name][[1, 0]]).all() for name in states)
    back["conv"][...] = 0  # a copy
    assert (cache.read_states([a])["conv"] == states["conv"][:1]).all()
    assert cache.stats().state_bytes == sum(array.nbytes for array in cache.states.values())


@pytest.mark.parametrize("module", ["numpy", "torch"])
def test_values_may_be_views_of_the_slots(module):
    pytest.importorskip(module)
    cache = PagedKVCache(**SIZE, states=dict.fromkeys("xy", ((), "float32")), array_module=module, state_memory=16)
    seqs = [cache.add(n).seq for n in (3, 2)]
    for name in "xy":
        cache.states[name][...] = cache.asarray(np.array([1, 2], np.float32)) + 10 * (name == "y")
    cache.write_states(seqs, {"x": cache.states["y"].reshape(1, 2)[0], "y": cache.states["x"][:]})
    written = cache.read_states(seqs)
    assert cache.state_lens(seqs).tolist() == [3, 2]
    assert {name: state.tolist() for name, state in written.items()} == {"x": [11, 12], "y": [1, 2]}


def test_tensors_that_require_gradients_leave_no_graph_behind():
    torch = pytest.importorskip("torch")
    with torch.inference_mode():
        cache = PagedKVCache(**SIZE, states={"x": ((2,), "float32")}, array_module="torch")
    seq = cache.add(3).seq
    cache.write_states([seq], {"x": torch.ones((1, 2), requires_grad=True)})
    assert not cache.states["x"].requires_grad
    assert cache.read_states([seq])["x"].tolist() == [[1, 1]]


def test_a_fork_shares_the_state_until_one_of_both_goes_on():
    texts = Texts(make_cache(3, max_seqs=3))
    seq, _ = texts.start([1, 2, 3])
    texts.compute((seq, [1, 2, 3]))
    forks = [texts.fork(seq), texts.fork(seq)]
    assert texts.cache.stats().used_states == 1
    texts.compute((forks[0], [4]))
    assert texts.cache.stats().used_states == 2
    texts.check()
    texts.compute((seq, [5]), (forks[1], [6]))  # the last one that has the slot needs no other
    assert texts.cache.stats().used_states == 3
    texts.check()
    texts.cache.reorder([seq, *forks], [2, 2, 1])
    assert texts.cache.stats().used_states == 2
    reordered = [[1, 2, 3, 6], [1, 2, 3, 6], [1, 2, 3, 4]]
    assert texts_of(texts.cache.read_states([seq, *forks])) == reordered


def test_a_fork_has_room_for_its_state_at_once():
    texts = Texts(make_cache(2))
    seq, _ = texts.start([1])
    texts.compute((seq, [1]))
    with refused(texts.cache, CapacityError, "^2 more sequences asked for, 1 of 2 rows .* state_memory set the limit$"):
        texts.cache.fork(seq, 2)
    other = texts.fork(seq)
    texts.compute((seq, [2]), (other, [3]))
    texts.check()


def test_states_must_be_written_before_a_commit():
    cache = make_cache()
    done, late = cache.add([1, 2, 3]).seq, cache.add([1, 2, 3, 4, 5]).seq
    cache.write_states([done], advanced(cache.read_states([done]), [[1, 2, 3]]))
    message = f"^seqs must have states that stand for all their tokens, but that of sequence {late} stands for 0 of 5: "
    with refused(cache, ValueError, message):
        cache.commit([done, late])
    cache.append([done], tokens=[4])
    with refused(cache, ValueError, f"but that of sequence {done} stands for 3 of 4: call write_states after the pass"):
        cache.commit([done])


def test_tokens_that_were_never_computed_can_be_taken_back():
    texts = Texts(make_cache())
    seq, _ = texts.prompt(range(1, 8), 7)
    texts.cache.append([seq], 5, [*range(8, 13)])
    texts.cache.truncate(seq, 9)
    assert texts.cache.lens_with_state(seq).tolist() == [0, 4, 7, 8, 9]
    texts.truncate(seq, 7)
    texts.check()


def test_a_sequence_goes_back_to_a_snapshot_of_its_own_text_alone():
    texts = Texts(make_cache())
    other, _ = texts.prompt([9, *range(2, 15)])
    seq, _ = texts.prompt(range(1, 15), 4)
    assert texts.cache.lens_with_state(seq).tolist() == [0, 4, 12, 14]
    for length, nearest in ((13, "12 and 14"), (8, "4 and 12"), (2, "0 and 4")):
        message = f"^length must be one for which sequence {seq} has a state, got {length}: it has one for {nearest}$"
        with refused(texts.cache, ValueError, message):
            texts.cache.truncate([other, seq], [14, length])
    texts.truncate(seq, 12)
    texts.compute((seq, [77]))
    texts.truncate(seq, 0)
    texts.check()
    assert texts.cache.state_lens([seq, other]).tolist() == [0, 14]


@pytest.mark.parametrize("num_states", [2, 3])
def test_an_interrupted_write_shows(monkeypatch, num_states):
    """The state is lost only if it was overwritten in place, and the snapshot before it is still there."""
    texts = Texts(make_cache(num_states, max_seqs=2))
    seq, _ = texts.prompt(range(1, 7))
    cache, states = texts.cache, texts.cache.read_states([seq])
    cache.append([seq], tokens=[7])
    with monkeypatch.context() as patch:
        patch.setattr(StateArrays, "write", fails_after(0, StateArrays.write, KeyboardInterrupt()))
        with pytest.raises(KeyboardInterrupt):
            cache.write_states([seq], advanced(states, [[7]]))
    cache.check()
    assert cache.state_lens([seq]).tolist() == [-1]
    assert cache.lens_with_state(seq).tolist() == [0, 4]
    with refused(cache, ValueError, f"sequence {seq} has a state, got 7: it has one for 4$"):  # its own length
        cache.truncate(seq, 7)
    with refused(cache, ValueError, f"the state of sequence {seq} is lost, since write_states was interrupted"):
        cache.read_states([seq])
    with refused(cache, ValueError, "is lost, .*: truncate it to 4, and compute"):
        cache.commit([seq])
    texts.truncate(seq, 4)
    texts.compute((seq, [5, 6, 7]))


def test_a_lost_state_stays_lost(monkeypatch):
    """Another sequence has completed the block in which it ends, and an append is undone."""
    raises = False

    def listen(event):
        assert not raises

    texts = Texts(make_cache(num_blocks=4, events=listen))
    texts.free(texts.prompt([9, 9, 9, 9])[0])
    seq, _ = texts.prompt([1, 2, 3, 4])
    texts.cache.append([seq], tokens=[5, 6, 7, 8], n=4)
    [other] = texts.cache.fork(seq)
    texts.cache.write_states([seq], advanced(texts.cache.read_states([seq]), [[5, 6, 7, 8]]))
    texts.cache.commit([seq])
    texts.cache.truncate(other, 6)
    with monkeypatch.context() as patch:
        patch.setattr(StateArrays, "write", fails_after(0, StateArrays.write, KeyboardInterrupt()))
        with pytest.raises(KeyboardInterrupt):
            texts.cache.write_states([other], advanced(texts.cache.read_states([other]), [[5, 6]]))
    with refused(texts.cache, ValueError, f"sequence {other} has a state, got 6: it has one for 0$"):
        texts.cache.truncate(other, 6)
    raises = True
    with pytest.raises(AssertionError):
        texts.cache.append([other], tokens=[7, 8, 9], n=3)  # evicts a block
    raises = False
    assert texts.cache.seq_lens([seq, other]).tolist() == [8, 6]
    assert texts.cache.state_lens([seq, other]).tolist() == [8, -1]
    texts.cache.truncate(other, 0)
    texts.cache.check()


WRONG_VALUES = {
    "no mapping": (lambda v: [*v.values()], TypeError, "^values must be a mapping from the names .*, got list$"),
    "a name is missing": (lambda v: {"tokens": v["tokens"]}, ValueError, "must have the states tokens, count, got tok"),
    "shape": (lambda v: v | {"count": v["count"][:, 0]}, ValueError, r"shape \(num_seqs, ...\) = \(1, 1\), got \(1,\)"),
    "dtype": (lambda v: v | {"count": v["count"].astype(float)}, TypeError, "must have dtype float32, got float64"),
    "kind": (lambda v: v | {"count": [[1.0]]}, TypeError, r"^values\['count'\] must be a ndarray, got list$"),
}


@pytest.mark.parametrize(("change", "error", "message"), WRONG_VALUES.values(), ids=WRONG_VALUES)
def test_other_values_are_refused(change, error, message):
    cache = make_cache()
    seq = cache.add(3).seq
    values = change(cache.read_states([seq]))
    with refused(cache, error, message):
        cache.write_states([seq], values)


@pytest.mark.parametrize(
    ("lasting", "error", "message"),
    [
        (None, TypeError, "^lasting must be a bool, or a list or array with one for each sequence, got NoneType$"),
        ("no", TypeError, "got str$"),
        ([1], TypeError, "^lasting must be bools, got int64$"),
        ([True, False], ValueError, r"^lasting must have shape \(num_seqs,\) = \(1,\), got \(2,\)$"),
    ],
)
def test_what_snapshots_stay_is_said_in_bools(lasting, error, message):
    cache = make_cache()
    seq = cache.add(3).seq
    cache.write_states([seq], cache.read_states([seq]))
    with refused(cache, error, message):
        cache.commit([seq], lasting=lasting)


WRONG_STATES = {
    "no dict": (
        [("x", (1,), "float32")],
        TypeError,
        r"^states must be a dict from names to \(shape, dtype\), .* list$",
    ),
    "none": ({}, ValueError, "^states must be a dict .*, got none$"),
    "no dtype": ({"x": (1,)}, TypeError, r"^states must be a dict .*, got 'x': \(1,\)$"),
    "no shape": ({"x": (3, "float32")}, TypeError, r"got 'x': \(3, 'float32'\)$"),
    "dtype": ({"x": ((1,), "int32")}, TypeError, "^dtype must be float32, float16 or bfloat16, got 'int32'$"),
    "size": ({"x": ((0,), "float32")}, ValueError, r"^states\['x'\] must be at least 1, got 0$"),
}


@pytest.mark.parametrize(("states", "error", "message"), WRONG_STATES.values(), ids=WRONG_STATES)
def test_states_must_have_names_shapes_and_dtypes(states, error, message):
    with pytest.raises(error, match=message):
        PagedKVCache(**SIZE, states=states)


@pytest.mark.parametrize(
    ("options", "num_states", "max_seqs"),
    [
        ({}, 4, 2),
        ({"num_blocks": 2}, 2, 2),  # as much as K and V, but two at least
        ({"num_blocks": 12}, 3, 2),
        ({"max_seqs": 1}, 2, 1),
        ({"state_memory": "1KiB"}, 1, 1),
        ({"state_memory": 7 * 1024}, 7, 2),
    ],
)
def test_how_many_states_there_are(options, num_states, max_seqs):
    cache = PagedKVCache(**(SIZE | {"num_blocks": 99, "max_seqs": 2, "states": {"x": ((256,), "float32")}} | options))
    assert (cache.stats().num_states, cache.max_seqs) == (num_states, max_seqs)
    assert cache.stats().state_bytes == num_states * 1024


@pytest.mark.parametrize(("memory", "num_states", "num_blocks"), [("8KiB", 4, 16), ("3KiB", 2, 4), (2**16, 4, 240)])
def test_memory_is_for_states_too(memory, num_states, num_blocks):
    """Up to half of it, but two at least."""
    options = SIZE | {"num_blocks": None, "memory": memory, "max_seqs": 2, "states": {"x": ((256,), "float32")}}
    stats = PagedKVCache(**options).stats()
    assert (stats.num_states, stats.num_blocks) == (num_states, num_blocks)
    assert stats.num_bytes + stats.state_bytes <= bytes_of("memory", memory, Arrays("numpy", None))
    assert PagedKVCache(**options, state_memory="1KiB").stats().num_blocks == num_blocks + 4 * num_states
    with pytest.raises(ValueError, match=r"^memory must be at least 2304 bytes, .* beside the states, got 2303$"):
        PagedKVCache(**options | {"memory": 2303})


def test_memory_for_states_is_refused_where_it_is_for_none():
    with pytest.raises(ValueError, match=r"^state_memory is for states, which must say what they are then, got 7$"):
        PagedKVCache(**SIZE, state_memory=7)
    with pytest.raises(ValueError, match=r"^state_memory must be at least 8 bytes, one state in all layers, got 7$"):
        PagedKVCache(**SIZE, states={"x": ((2,), "float32")}, state_memory=7)
    with pytest.raises(ValueError, match=r"^this cache has no states: make one with states="):
        PagedKVCache(**SIZE).read_states([])


def test_more_states_than_memory_are_refused():
    with pytest.raises(
        MemoryError, match=r"^state_memory must fit into the .* bytes of memory that are free, got 1,024 "
    ):
        PagedKVCache(**SIZE, states={"x": ((2**40,), "float32")}, state_memory="4096TiB")


def test_stores_of_states_need_no_memory(monkeypatch):
    """They have the forms for which NumPy neither converts nor allocates: see `commit.Write`."""

    def checked(array, index, value):
        if isinstance(array, np.ndarray) and type(index) is not int:
            assert (index.dtype, value.dtype) == (np.int64, array.dtype)
            assert index.shape == value.shape == (len(index),)
            assert value.flags.c_contiguous
        elif isinstance(array, np.ndarray):
            assert (array.dtype, type(value)) == (np.int64, int)
        array[index] = value

    monkeypatch.setattr(commit, "setitem", checked)
    texts = Texts(make_cache(3))
    seq, _ = texts.prompt(range(1, 10))
    other = texts.fork(seq)
    texts.cache.reorder([seq, other], [1, 1])
    texts.truncate(seq, 2 * P)
    texts.free(seq)
    assert texts.prompt(range(1, 10))[1] == 8
    assert slots_held(texts.cache) == 3


def test_a_snapshot_that_a_prompt_has_found_stays():
    """One that none has found makes way for the next of the same text."""
    texts = Texts(make_cache())
    seq, _ = texts.start(range(1, 20))
    texts.compute((seq, range(1, 9)))
    assert texts.start(range(1, 10))[1] == 8
    texts.decode(seq, range(9, 18))
    assert snapshots(texts.cache) == [8, 16]


def test_a_write_that_cannot_begin_changes_nothing(monkeypatch):
    """As while a CUDA graph is being captured."""
    cache = make_cache()
    seq = cache.add(3).seq
    values = cache.read_states([seq])
    cache.write_states([seq], values)
    cache.append([seq])
    with monkeypatch.context() as patch, refused(cache, RuntimeError, "^captured$"):
        patch.setattr(cache._arrays, "asarray", fails_after(0, cache._arrays.asarray, RuntimeError("captured")))
        cache.write_states([seq], values)


def test_events_of_a_snapshot_are_those_of_a_group_of_its_own():
    events = []
    texts = Texts(make_cache(2, max_seqs=2, events=events.append))
    seq, _ = texts.start(range(1, 9), salt="tenant")
    texts.compute((seq, range(1, 5)))
    blocks, first = events
    texts.compute((seq, range(5, 9)))
    second, passed, last = events[2:]
    assert (blocks.group_idx, blocks.kv_cache_spec_kind) == (0, "full_attention")
    for event, block in ((first, blocks), (last, second)):
        assert event == replace(block, group_idx=1, kv_cache_spec_kind="mamba")
    assert first.extra_keys == [("tenant",)]
    assert (second.parent_block_hash, second.extra_keys) == (blocks.block_hashes[0], None)
    assert passed == BlockRemoved(first.block_hashes, "CPU", 1)
    texts.free(seq)
    others = [texts.start([20 + i])[0] for i in range(2)]
    texts.compute((others[0], [20]))
    assert events[5:] == []
    cache = texts.cache
    states = cache.read_states(others[1:])
    cache.append(others[1:], tokens=[21])
    cache.write_states(others[1:], advanced(states, [[21]]))
    assert events[5:] == [BlockRemoved(last.block_hashes, "CPU", 1)], "its slot is another's"
    cache.commit(others[1:])
    cache.pool.release(cache.pool.allocate(cache.num_free))
    assert events[6:] == [BlockRemoved([*second.block_hashes, *blocks.block_hashes], "CPU", 0)], "no snapshot is left"
    texts.free(*others)
    texts.compute((texts.start(range(1, 5))[0], range(1, 5)))
    texts.free(*texts.tokens)
    cache.pool.release(cache.pool.allocate(cache.num_free))
    assert [event.group_idx for event in events[7:]] == [0, 1, 1, 0], "a snapshot goes before its block"


@pytest.mark.parametrize("event_of", ["write_states", "commit"])
def test_a_listener_that_raises_costs_no_state(event_of):
    def listener(event):
        if raising and event.group_idx == 1:
            raise raising.pop()

    raising = []
    texts = Texts(make_cache(1, max_seqs=1, events=listener))
    cache, [seq] = texts.cache, texts.start(range(1, 9))[:1]
    if event_of == "write_states":  # the snapshot at 4 makes room
        texts.compute((seq, range(1, 5)))
    n = len(texts.tokens[seq])
    states = advanced(cache.read_states([seq]), [range(n + 1, n + 5)])
    cache.append([seq], 4, range(n + 1, n + 5))
    if event_of == "commit":
        cache.write_states([seq], states)
    raising.append(ArithmeticError())
    with pytest.raises(ArithmeticError):
        cache.commit([seq]) if event_of == "commit" else cache.write_states([seq], states)
    assert cache.state_lens([seq]).tolist() == [n + 4]
    cache.commit([seq])
    assert texts_of(cache.read_states([seq])) == [[*range(1, n + 5)]]
    assert snapshots(cache) == [n + 4]


def test_the_map_counts_states():
    texts = Texts(make_cache(6, max_seqs=6))
    seq, _ = texts.prompt(range(1, 10), 4)
    texts.prompt([50])
    texts.fork(seq)
    states = "states: 2 of sequences, 2 other snapshots, 2 free"
    assert texts.cache.plot().splitlines()[-1] == states
    assert f"; {states}</small>" in texts.cache._repr_html_()
    texts.truncate(seq, 8)  # its state is a snapshot then
    assert texts.cache.plot().endswith("states: 3 of sequences, 1 other snapshots, 2 free")
    assert "states" not in PagedKVCache(**SIZE).plot()

"""States of sequences in stores: each comes back with its blocks, or neither does."""

import threading

import numpy as np
import pytest

from pagedkv import OutOfBlocksError, PagedKVCache, Scheduler
from pagedkv.stores import HostStore, SavedSequences, StoredPrefixes, SwapSpace

from ..memory.texts import P, Texts, advanced, make_cache, texts_of
from .caches import evict, fill
from .test_prefixes import FaultyStore, fail

W = 2  # tokens of a wire block
TEXT = [*range(1, 23)]
BLOCK = 128 + 2 * W * 8 * 4  # bytes of a wire block: a state takes several
STATES = {"tokens": ((64,), "float32"), "count": ((1,), "float32")}  # of the caches of texts.py
IN_PARTS = {"block_tokens": W}  # in such wire blocks a state takes several
PREFIX_BLOCK = 128 + 2 * 2 * P * 8 * 4


def make_store(num_blocks=200):
    return HostStore(num_blocks * BLOCK, BLOCK)


def space_of(texts, store=None):
    return SwapSpace(texts.cache, store or make_store(), block_tokens=W, timeout=5.0)


def prefixes_of(texts, store, model="a model", **options):
    return StoredPrefixes(texts.cache, store, model, **{"block_tokens": 2 * P, "timeout": 5.0} | options)


def prefix_store(num_blocks=200):
    return HostStore(num_blocks * PREFIX_BLOCK, PREFIX_BLOCK)


def stored(store, *stops):
    """Store a text with snapshots at these stops, and where its last block ends."""
    texts, _ = computed(make_cache(), TEXT, *stops)
    fill(texts.cache)
    with prefixes_of(texts, store) as prefixes:
        prefixes.store(TEXT)


def kv(cache, seq):
    """K and V of a sequence."""
    blocks, offsets = np.divmod(cache.slots(seq, 0, int(cache.seq_lens(seq)[0])), P)
    return np.array([array[blocks, offsets] for array in (*cache.k_caches, *cache.v_caches)])


def computed(cache=None, tokens=TEXT, *stops, salt=None):
    texts = Texts(cache or make_cache())
    return texts, texts.prompt(tokens, *stops, salt=salt)[0]


@pytest.mark.parametrize("prefix_cache", [True, False])
def test_sequences_come_back_with_their_states(prefix_cache):
    texts, seq = computed(make_cache(prefix_cache=prefix_cache))
    fork = texts.fork(seq)
    texts.decode(fork, [7, 7])
    fill(texts.cache)
    space, before, of_fork = space_of(texts), {**texts.tokens}, kv(texts.cache, fork)
    assert space.swap_out([seq, fork])
    assert texts.cache.stats().used_states == texts.cache.stats().used == 0
    evict(texts.cache)
    other = texts.prompt([5] * 30)[0]
    assert space.swap_in([fork, seq]) == [24, 22]
    np.testing.assert_array_equal(kv(texts.cache, fork).view(np.uint32), of_fork.view(np.uint32))
    texts.tokens |= before
    texts.check()
    texts.decode(seq, [9])
    texts.decode(fork, [8])
    texts.check()
    if prefix_cache:
        assert texts.cache.find([*TEXT, 7, 7, 1]) == 24
    texts.free(seq, fork, other)


def test_forks_share_a_state_in_the_store():
    texts, seq = computed()
    forks, store = [seq, texts.fork(seq)], make_store()
    space = space_of(texts, store)
    num_parts = space._states.num_parts
    assert num_parts > 1
    assert space.swap_out(forks)
    assert len(store._slots) == 11 + num_parts
    texts.cache.free(forks[0])
    assert space.swap_in(forks[1]) == [22]
    del texts.tokens[forks[0]]
    texts.check()
    texts.free(forks[1])
    space._forget_freed()
    space._patient.flush()
    assert len(store._slots) == 0


@pytest.mark.parametrize("module", ["numpy", "torch"])
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_bits_of_states_come_back(module, dtype):
    pytest.importorskip(module)
    states = {"conv": ((5, 3), dtype), "count": ((), "float32"), "odd": ((1,), dtype)}
    cache = PagedKVCache(1, 8, P, 1, 8, states=states, array_module=module)
    seq, arrays = cache.add(3).seq, cache._state_arrays
    bits = [np.random.default_rng(7).integers(0, 256, array[0].nbytes, np.uint8) for array in cache.states.values()]
    cache.write_states([seq], arrays.from_bytes(bits))
    cache.commit([seq])
    space = SwapSpace(cache, "1MiB", block_tokens=W)
    assert space.swap_out(seq)
    assert space.swap_in(seq) == [3]
    assert all(map(np.array_equal, arrays.to_bytes(cache.read_states([seq])), bits))


def test_tokens_that_were_not_computed_do_not_come_back():
    texts, seq = computed()
    space = space_of(texts)
    texts.cache.append(seq, 3, tokens=[1, 2, 3])
    assert space.swap_out(seq)
    assert space.swap_in(seq) == [22]
    texts.check()


def test_what_was_not_committed_is_found_after_the_commit():
    texts, seq = computed(tokens=TEXT[:14])
    states = texts.cache.read_states([seq])
    texts.cache.append(seq, 6, tokens=TEXT[14:20])
    texts.cache.write_states([seq], advanced(states, [TEXT[14:20]]))
    space = space_of(texts)
    assert space.swap_out(seq)
    evict(texts.cache)
    assert space.swap_in(seq) == [20]
    assert texts.cache.find(TEXT) == 0
    texts.cache.commit(seq)
    assert texts.cache.find(TEXT) == 20
    texts.tokens[seq] = TEXT[:20]
    texts.check()


def damaged(block, place):
    whole = bytearray(block)
    whole[place] ^= 1
    return bytes(whole)


CHANGES = {
    "lost": lambda block: None,
    "first byte": lambda block: damaged(block, 0),
    "last byte": lambda block: damaged(block, -1),
    "of a state": lambda block: damaged(block, len(block) // 2),
    "cut": lambda block: bytes(block)[:-4],
    "empty": lambda block: b"",
    "not bytes": lambda block: 5,
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_each_lost_or_damaged_part_is_a_miss(change):
    num_parts = 11 + space_of(Texts(make_cache()))._states.num_parts
    for i in range(num_parts):
        texts, seq = computed()
        store, whole = make_store(), []
        space = space_of(texts, FaultyStore(store, lambda keys, found: found))
        assert space.swap_out(seq)
        whole = [*store._slots._used]
        assert len(whole) == num_parts

        def spoil(keys, found, key=whole[i]):
            return [change(block) if k == key else block for k, block in zip(keys, found, strict=True)]

        space._patient._store.fault = spoil
        assert space.swap_in(seq) == [0]
        texts.tokens[seq] = []
        texts.check()
        texts.compute((seq, TEXT))
        texts.check()


def test_a_store_that_fails_takes_nothing_out():
    texts, seq = computed()
    store = FaultyStore(make_store(), fail)
    space = space_of(texts, store)
    assert not space.swap_out(seq)
    texts.check()
    store.fault = lambda keys, found: found
    assert space.swap_out(seq)
    store.fault = fail
    assert space.swap_in(seq) == [0]


def test_a_copy_goes_behind_what_is_found():
    texts, seq = computed(make_cache(), TEXT, 8, 12)
    space = space_of(texts)
    copy = space.copy_out(seq)
    for num_here in (0, 8, 12, 20, 22):
        other = texts.fork(seq)
        texts.truncate(other, num_here)
        assert space.copy_in(other, copy) == 22
        texts.tokens[other] = TEXT
        texts.check()
        texts.free(other)
    texts.check()


@pytest.mark.parametrize("place", ["write", "store", "commit"])
@pytest.mark.parametrize("num_states", [3, 1])
def test_an_interrupt_leaves_no_length_without_a_state(monkeypatch, place, num_states):
    """With a single slot the state from which the sequence goes on is overwritten."""
    texts, seq = computed(make_cache(num_states, max_seqs=num_states))
    space = space_of(texts)
    copy = space.copy_out(seq)
    texts.free(seq)
    evict(texts.cache)
    seq = texts.prompt(TEXT[:8], 8)[0]
    cache = texts.cache
    target = {"write": (cache._state_arrays, "write"), "store": (space._blocks, "write"), "commit": (cache, "commit")}
    with monkeypatch.context() as patch:
        patch.setattr(*target[place], lambda *args: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            space.copy_in(seq, copy)
    length = int(cache.seq_lens(seq)[0])
    assert length == (0 if num_states == 1 and place != "store" else 8)
    texts.tokens[seq] = TEXT[:length]
    texts.check()
    assert space.copy_in(seq, copy) == 22
    texts.tokens[seq] = TEXT
    texts.check()


def test_too_few_blocks_change_nothing():
    texts, seq = computed(make_cache(num_blocks=8))
    space = space_of(texts)
    assert space.swap_out(seq)
    other = texts.prompt([5] * 20)[0]
    with pytest.raises(OutOfBlocksError):
        space.swap_in(seq)
    texts.tokens[seq] = []
    texts.check()
    texts.free(other)
    assert space.swap_in(seq) == [22]


def test_lost_states_are_not_stored(monkeypatch):
    texts, seq = computed()
    monkeypatch.setattr(texts.cache._state_arrays, "write", lambda *args: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        texts.cache.write_states([seq], texts.cache.read_states([seq]))
    with pytest.raises(ValueError, match=f"^the state of sequence {seq} is lost, since write_states was interrupted: "):
        space_of(texts).swap_out(seq)


def test_a_store_without_room_for_a_state_is_refused():
    texts = Texts(make_cache())
    with pytest.raises(ValueError, match="store must have a capacity of at least"):
        space_of(texts, make_store(1))
    with pytest.raises(ValueError, match=r"store must have room for \d+ bytes, 2 tokens of all KV heads and a state, "):
        space_of(texts, 2 * BLOCK - 1)


@pytest.mark.parametrize("num_slots", [200, 4])
def test_preempted_requests_come_back_with_their_states(num_slots, monkeypatch):
    """A store with too few slots loses some, which are computed."""
    cache = make_cache(4, max_seqs=4, num_blocks=12)
    space, back = space_of(Texts(cache), make_store(num_slots)), []
    copy_in = space.copy_in
    monkeypatch.setattr(space, "copy_in", lambda seq, copy: back.append(copy_in(seq, copy)) or back[-1])
    ticks = iter(range(10**6))
    scheduler = Scheduler(cache, max_num_batched_tokens=10, swap=space, clock=lambda: next(ticks))
    prompts = [[10 * i + j for j in range(1, 10 + i)] for i in range(4)]
    numbers = [scheduler.add(prompt, 12) for prompt in prompts]
    rows = {number: [*prompt] for number, prompt in zip(numbers, prompts, strict=True)}
    ended = []
    while (step := scheduler.schedule()) is not None:
        states, start, new = cache.read_states(step.seqs), 0, []
        for count in step._counts.tolist():
            new.append(step.tokens[start : start + count].tolist())
            start += count
        states = advanced(states, new)
        for number, text in zip(step.requests.tolist(), texts_of(states), strict=True):
            assert text == rows[number][: len(text)]
        cache.write_states(step.seqs, states)
        chosen = [len(rows[number]) for number in step.sampled.tolist()]
        for number, token in zip(step.sampled.tolist(), chosen, strict=True):
            rows[number].append(token)
        ended += scheduler.update(step, np.array(chosen))
        cache.check()
    assert len(ended) == 4
    assert scheduler.num_swapped > 0
    assert any(back) == (num_slots == 200)
    assert cache.stats().used_states == 0


# -- prefixes
@pytest.mark.parametrize("options", [{}, IN_PARTS], ids=["whole", "in parts"])
@pytest.mark.parametrize("num_tokens", [22, 17, 14, 8, 5])
def test_another_cache_goes_on_from_a_stored_state(num_tokens, options):
    """Where the snapshot is in the middle of a wire block, too."""
    (first, seq), store, expected = computed(make_cache(), TEXT[:num_tokens]), prefix_store(), num_tokens // P * P
    fill(first.cache)
    with prefixes_of(first, store, **options) as prefixes:
        assert prefixes.store(TEXT[:num_tokens]) == prefixes.store(TEXT[:num_tokens]) == expected
    texts = Texts(make_cache())
    with prefixes_of(texts, store, **options) as prefixes:
        assert prefixes.load(TEXT) == prefixes.load(TEXT) == prefixes.num_loaded == expected
        assert (prefixes.states.num_parts > 1) == bool(options)
    assert texts.cache.stats().used_states == 0
    same, hit = texts.prompt(TEXT)
    assert hit == expected
    before, after = (kv(cache, of)[:, :expected] for cache, of in ((first.cache, seq), (texts.cache, same)))
    np.testing.assert_array_equal(after.view(np.uint32), before.view(np.uint32))
    texts.check()


def test_a_cache_with_longer_blocks_goes_on_where_one_ends():
    stored(store := prefix_store(), 4, 16)
    texts = Texts(PagedKVCache(1, 100, 2 * P, 1, 8, states=STATES))
    with prefixes_of(texts, store) as prefixes:
        assert [prefixes.load(TEXT[:7]), prefixes.load(TEXT)] == [0, 16]
    seq, num_cached = texts.start(TEXT)
    assert num_cached == 16
    texts.compute((seq, TEXT[16:]))


def test_what_is_here_is_not_loaded():
    stored(store := prefix_store(), 8, 16)
    texts, _ = computed(make_cache(), TEXT[:9])
    with prefixes_of(texts, store) as prefixes:
        assert prefixes.load(TEXT[:9]) == 8
        assert prefixes.num_loaded == 0
        assert prefixes.load(TEXT) == 20
        assert prefixes.num_loaded == 12
    texts.check()
    assert texts.prompt(TEXT)[1] == 20


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_prefixes_need_all_blocks_and_the_state(change):
    """The store has two wire blocks, a part of one, and a state behind each."""
    stored(store := prefix_store(), 8, 16)
    keys, found = [*store._slots._used], []
    assert len(keys) == 6
    for spoiled in keys:
        texts, copy = Texts(make_cache()), prefix_store()
        blocks = {key: bytes(block) for key, block in zip(keys, store.get(keys), strict=True)}
        copy.put([*blocks], [*blocks.values()])
        get = copy.get
        copy.get = lambda keys, get=get, spoiled=spoiled: [
            change(block) if key == spoiled else block for key, block in zip(keys, get(keys), strict=True)
        ]
        with prefixes_of(texts, copy) as prefixes:
            found.append(prefixes.load(TEXT))
        assert texts.prompt(TEXT)[1] == found[-1]
        texts.check()
    assert sorted(found) == [0, 8, 16, 16, 20, 20]


@pytest.mark.parametrize("other", ["model", "names", "shapes", "dtypes"])
def test_other_states_are_not_found(other):
    stored(store := prefix_store(), 8, 16)
    states = STATES.copy()
    if other == "names":
        states = {"count": states["count"], "tokens": states["tokens"]}
    elif other == "shapes":
        states["tokens"] = (8, 8), "float32"
    elif other == "dtypes":
        states["tokens"] = (128,), "float16"
    cache = PagedKVCache(1, 100, P, 1, 8, states=states)
    with StoredPrefixes(cache, store, "b" if other == "model" else "a model", block_tokens=2 * P) as prefixes:
        assert prefixes.load(TEXT) == 0


def test_a_state_without_room_to_wait_is_stored_later():
    texts, _ = computed(make_cache(), TEXT, 8, 16)
    goes_on = threading.Event()
    store = FaultyStore(prefix_store(), lambda keys, found: goes_on.wait() and found)
    with prefixes_of(texts, store, max_pending_bytes=2 * PREFIX_BLOCK) as prefixes:
        assert prefixes.store(TEXT) == 0
        goes_on.set()
        for lens in ({16, 20}, {20}):  # a thread makes room meanwhile, or not
            prefixes.flush()
            assert prefixes.store(TEXT) in lens
    with prefixes_of(Texts(make_cache()), store) as prefixes:
        assert prefixes.load(TEXT) == 20


def test_salts_and_ranks_are_told_apart():
    texts, _ = computed(make_cache(), TEXT, 8, 16, salt="a")
    store = prefix_store()
    with prefixes_of(texts, store) as prefixes:
        assert prefixes.store(TEXT, "a") == 20
    with prefixes_of(Texts(make_cache()), store) as prefixes:
        assert [prefixes.load(TEXT, salt) for salt in (None, "b", "a")] == [0, 0, 20]
        keys = prefixes.states.keys(bytes(16), 16)
    with prefixes_of(Texts(make_cache()), store, first_head=1) as prefixes:
        assert prefixes.states.keys(bytes(16), 16) != keys


@pytest.mark.parametrize("place", ["write_states", "commit", "append"])
def test_an_interrupted_load_leaves_nothing(monkeypatch, place):
    stored(store := prefix_store(), 8, 16)
    texts = Texts(make_cache())
    with prefixes_of(texts, store) as prefixes:
        with monkeypatch.context() as patch:
            patch.setattr(texts.cache, place, lambda *args, **options: (_ for _ in ()).throw(KeyboardInterrupt))
            with pytest.raises(KeyboardInterrupt):
                prefixes.load(TEXT)
        assert (texts.cache.num_seqs, texts.cache.stats().used_states, texts.cache.find(TEXT)) == (0, 0, 0)
        assert prefixes.load(TEXT) == 20
    texts.check()


def test_windows_beside_states_are_refused():
    cache = make_cache(num_layers=2, windows=[4, None])
    with pytest.raises(ValueError, match="cache must have no windows beside states, got "):
        StoredPrefixes(cache, prefix_store(), "a model")


# -- saved sequences
@pytest.mark.parametrize("options", [{}, IN_PARTS], ids=["whole", "in parts"])
@pytest.mark.parametrize("num_tokens", [1, 8, 20, 22])
def test_saved_sequences_have_their_states(num_tokens, options):
    texts, seq = computed(make_cache(), TEXT[:num_tokens])
    fill(texts.cache)
    store, before = prefix_store(), kv(texts.cache, seq)
    assert SavedSequences(prefixes_of(texts, store, **options)).save(seq, "a chat")
    other = Texts(make_cache())
    restored = SavedSequences(prefixes_of(other, store, **options)).restore("a chat")
    assert restored.num_cached == num_tokens
    np.testing.assert_array_equal(kv(other.cache, restored.seq).view(np.uint32), before.view(np.uint32))
    other.tokens[restored.seq] = TEXT[:num_tokens]
    other.check()
    other.decode(restored.seq, [5, 6])
    other.check()


def test_a_saved_sequence_without_its_state_begins_at_an_earlier_one_or_is_computed():
    texts, seq = computed(make_cache(), TEXT, 8, 16)
    store = prefix_store()
    prefixes = prefixes_of(texts, store)
    assert SavedSequences(prefixes).save(seq, "a chat")
    digest = prefixes.blocks.wire.digests(np.array(TEXT, np.int32), texts.cache._rows.chains._roots[0].tobytes())[-1]
    store.remove(prefixes.states.keys(digest, 22))
    for expected in (0, 20):
        other = Texts(make_cache())
        restored = SavedSequences(prefixes_of(other, store)).restore("a chat")
        assert restored.num_cached == expected
        other.tokens[restored.seq] = TEXT[:expected]
        other.check()
        other.compute((restored.seq, TEXT[expected:]))
        prefixes.store(TEXT)
        prefixes.flush()


def test_a_state_comes_with_all_its_parts_or_not_at_all():
    texts, seq = computed(make_cache(), TEXT, 8)
    store = prefix_store()
    with prefixes_of(texts, store, **IN_PARTS) as prefixes:
        assert SavedSequences(prefixes).save(seq, "a chat")
        assert prefixes.store(TEXT) == 20
        root = texts.cache._rows.chains._roots[0].tobytes()
        digests = prefixes.blocks.wire.digests(np.array(TEXT, np.int32), root)
        of_states = [prefixes.states.keys(digests[n // W - 1], n) for n in (20, 22)]
    keys = [*store._slots._used]
    blocks = dict(zip(keys, map(bytes, store.get(keys)), strict=True))
    for lost in zip(*of_states, strict=True):
        copy = prefix_store()
        copy.put([*blocks], [*blocks.values()])
        copy.remove(lost)
        with prefixes_of(Texts(make_cache()), copy, **IN_PARTS) as prefixes:
            assert prefixes.load(TEXT) == 8
            assert SavedSequences(prefixes).restore("a chat").num_cached == 8


def test_a_sequence_whose_state_is_behind_is_not_saved():
    texts, seq = computed()
    texts.cache.append(seq, 1, tokens=[3])
    with pytest.raises(ValueError, match=r"stands for 22 of 23: call write_states after the pass, and then commit$"):
        SavedSequences(prefixes_of(texts, prefix_store())).save(seq, "a chat")

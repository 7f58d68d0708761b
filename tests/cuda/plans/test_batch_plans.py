"""Plans of the batches of a cache on a device: they outlive their step, and see what is in place now."""

import sys
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest

from pagedkv import PagedKVCache
from pagedkv.operations import plan as planning

from ...support.device_fakes import address_of
from .device_calls import launches

LAYERS, P, HKV, HQ, D = 3, 16, 2, 4, 64


class Array:
    """An array of CuPy, whose device is the host."""

    def __init__(self, x):
        self.x, self.shape, self.strides, self.dtype, self.device = x, x.shape, x.strides, x.dtype, cupy_device
        self.ndim, self.data = x.ndim, SimpleNamespace(ptr=address_of(x) if x.size else 0, device_id=0)

    def __getitem__(self, index):
        return Array(self.x[index])

    def __setitem__(self, index, value):
        self.x[index.x if isinstance(index, Array) else index] = value.x

    def reshape(self, *shape):
        return Array(self.x.reshape(*shape))


class Device:
    def __enter__(self):
        pass

    def __exit__(self, *error):
        pass


cupy_device = Device()


@pytest.fixture
def cache_of(monkeypatch, nothing_planned, devices):
    """Makes caches of a module like CuPy."""
    module = ModuleType("cupy")
    module.ndarray = Array
    module.empty = lambda shape, dtype=float: Array(np.empty(shape, dtype))
    module.zeros = lambda shape, dtype: Array(np.zeros(shape, dtype))
    module.asarray = lambda x: Array(np.array(x))
    stream = SimpleNamespace(ptr=0, is_capturing=lambda: False)
    module.cuda = SimpleNamespace(get_current_stream=lambda device=0: stream)
    monkeypatch.setitem(sys.modules, "cupy", module)
    sizes = {"num_layers": LAYERS, "num_blocks": 200, "block_size": P, "num_kv_heads": HKV, "head_dim": D}
    sizes |= {"dtype": "float16", "array_module": "cupy", "max_seqs": 4}
    return lambda **options: PagedKVCache(**sizes | options)


@pytest.fixture
def planned(monkeypatch):
    """The calls that have been planned."""
    calls, whole = [], planning.attention_call
    monkeypatch.setattr(planning, "attention_call", lambda arguments: [calls.append(arguments), whole(arguments)][1])
    return calls


def q_of(num_rows):
    return Array(np.zeros((num_rows, HQ, D), np.float16))


def where_of(batch):
    return [address_of(x.x) for x in batch.where[0].values()]


def test_layers_and_steps_share_a_plan(cache_of, planned, devices):
    cache = cache_of(max_seq_len=1000)
    seqs = [cache.add(n).seq for n in (30, 17)]
    for step in range(3):
        cache.append(seqs)
        batch = cache.batch(seqs)
        for layer in range(LAYERS):
            q = q_of(2)
            out = cache.attend(layer, q, batch)
            *_, args, _ = launches(devices)[-1]
            own = [x.data.ptr for x in (q, cache.k_caches[layer], cache.v_caches[layer], out)]
            assert set(own + where_of(batch)) <= set(args)
        assert batch.where[0]["seq_lens"].x.tolist() == [31 + step, 18 + step]
    assert len(planned) == 1
    for options in ({"window": 9}, {"window": 9, "return_lse": True}):
        for layer in range(LAYERS):
            cache.attend(layer, q_of(2), batch, **options)
    assert len(planned) == 3
    with pytest.raises(TypeError, match=r"^window must be an int, got float$"):
        cache.attend(0, q_of(2), batch, window=9.0)


def test_a_longer_bound_is_another_plan(cache_of, planned, devices):
    cache = cache_of(max_seq_len=1000)
    seq = cache.add(254).seq
    grids = []
    for _ in range(5):
        cache.append([seq])
        cache.attend(0, q_of(1), cache.batch([seq]))
        grids.append(launches(devices)[-1][1])
    assert len(planned) == 2
    assert grids[0] == grids[1] != grids[2] == grids[4], "of 255 and 256 tokens, and of more"


def test_tables_that_have_moved_are_found(cache_of, devices):
    cache = cache_of(num_blocks=1000, block_size=1, max_seqs=200)
    seq = cache.add(40).seq
    first = cache.batch([seq])
    cache.attend(0, q_of(1), first)
    cache.append([seq], 900)
    cache.batch([seq])
    cache.truncate([seq], 41)  # back in the bucket of the first plan
    batch = cache.batch([seq])
    cache.attend(0, q_of(1), batch)
    assert where_of(batch)[0] != where_of(first)[0]
    assert set(where_of(batch)) <= set(launches(devices)[-1][2])


def test_query_starts_of_each_batch_lie_in_place(cache_of, planned, devices):
    cache = cache_of(max_seq_len=1000)
    seqs = [cache.add(n).seq for n in (30, 17)]
    places, own = set(), []
    for query_lens in ([3, 5], [6, 2], [1, 7]):
        batch = cache.batch(seqs, query_lens)
        cache.attend(0, q_of(8), batch)
        starts = batch.where[0]["query_starts"]
        assert starts.x.tolist() == [0, query_lens[0], 8]
        places.add(starts.data.ptr)
        own.append(batch.query_starts)
        assert starts.data.ptr in launches(devices)[-1][2]
    assert len(planned) == len(places) == 1
    assert [x.x.tolist() for x in own] == [[0, 3, 8], [0, 6, 8], [0, 1, 8]], "for callers, they stay as they were"


def test_an_older_batch_is_refused(cache_of, devices):
    cache = cache_of(max_seq_len=1000)
    seq = cache.add(30).seq
    older = cache.batch([seq])
    newer = cache.batch([seq])
    with pytest.raises(RuntimeError, match=r"^batch must be made after the last reset of its cache, and on a device"):
        cache.attend(0, q_of(1), older)
    cache.attend(0, q_of(1), newer)
    assert len(launches(devices)) == 1


def test_a_cache_does_not_share_plans_with_another(cache_of, planned):
    ours, theirs = cache_of(max_seq_len=1000), cache_of(max_seq_len=1000)
    seq = ours.add(30).seq
    batch = ours.batch([seq])
    for cache in (ours, theirs, ours):
        cache.attend(0, q_of(1), batch)
    assert len(planned) == 2


def test_an_option_that_is_an_array_is_a_call_of_its_own(cache_of, planned, devices):
    cache = cache_of(max_seq_len=1000)
    batch = cache.batch([cache.add(30).seq])
    sinks = Array(np.zeros(HQ, np.float32))
    cache.attend(0, q_of(1), batch, sinks=sinks)
    assert sinks.data.ptr in launches(devices)[-1][2]
    assert not planned

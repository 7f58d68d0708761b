"""Mirrors of tables on a device: equal to the host's rows, with few copies, at fixed addresses."""

import sys

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import given

from pagedkv import PagedKVCache
from pagedkv.memory.device.arrays import Arrays
from pagedkv.memory.device.mirror import Mirror

from ..device_module import DeviceModule, TorchModule
from ..manager import fails_after

INT32 = np.dtype(np.int32)


@pytest.fixture
def cupy(monkeypatch):
    module = DeviceModule()
    monkeypatch.setitem(sys.modules, "cupy", module)
    return module


def table(num_rows, num_columns, start=0):
    return np.arange(start, start + num_rows * num_columns, dtype=np.int32).reshape(num_rows, num_columns)


def test_only_changed_rows_are_copied(cupy):
    mirror = Mirror(Arrays("cupy"), 8, 6)
    rows = table(8, 5)
    assert (mirror.update(rows) == rows).all()
    assert cupy.copied == rows.nbytes
    assert (mirror.update(rows) == rows).all()
    assert cupy.copied == rows.nbytes
    rows[[2, 5], 4] = -1
    cupy.copied = 0
    assert (mirror.update(rows) == rows).all()
    assert cupy.copied == 2 * (5 * 4 + 8), "two rows and their numbers"
    cupy.copied = 0
    assert (mirror.update(rows[:4]) == rows[:4]).all()
    assert (mirror.update(rows[:, :3]) == rows[:, :3]).all()
    assert (mirror.update(rows) == rows).all()
    assert cupy.copied == 0, "shorter and narrower ones are there already"


def test_one_column_is_sent_whole_where_that_is_less(cupy):
    mirror = Mirror(Arrays("cupy"), 8, 1)
    rows = table(8, 1)
    mirror.update(rows)
    cupy.copied = 0
    rows[:3] += 100
    assert (mirror.update(rows) == rows).all()
    assert cupy.copied == rows.nbytes
    cupy.copied = 0
    rows[0] += 1
    assert (mirror.update(rows) == rows).all()
    assert cupy.copied == 12


@given(st.data())
def test_a_mirror_always_equals_its_rows(data):
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "cupy", DeviceModule())
        mirror = Mirror(Arrays("cupy"), 4, 3)
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32)))
    for _ in range(data.draw(st.integers(1, 12))):
        num_rows, num_columns, min_width = data.draw(st.tuples(st.integers(0, 6), st.integers(1, 5), st.integers(0, 6)))
        rows = rng.integers(-1, 2, (num_rows, num_columns), np.int32)
        device = mirror.update(rows, min_width)
        assert device.shape == (num_rows, max(num_columns, min_width))
        assert (device[:, :num_columns] == rows).all()


def test_a_mirror_stays_at_its_address(cupy):
    mirror = Mirror(Arrays("cupy"), 8, 6)
    addresses = {mirror.update(table(n, w, start)).ctypes.data for n, w, start in ((3, 2, 0), (8, 6, 5), (1, 1, 9))}
    assert len(addresses) == 1
    wide = table(9, 7)
    assert (mirror.update(wide) == wide).all()
    assert (mirror.update(wide[:3, :2]) == wide[:3, :2]).all()


@pytest.mark.parametrize("calls", range(3))
def test_a_copy_that_fails_is_made_the_next_time(cupy, monkeypatch, calls):
    mirror = Mirror(Arrays("cupy"), 8, 6)
    rows = table(8, 6)
    mirror.update(rows)
    changed = rows.copy()
    changed[3] += 1
    names = ("asarray", "asarray", "__setitem__")
    target, name = (DeviceModule.Array, names[calls]) if calls == 2 else (cupy, names[calls])
    original = getattr(target, name)

    def fail_after_storing(self, index, value):
        original(self, index, value)
        raise MemoryError

    failing = fail_after_storing if calls == 2 else fails_after(calls, original, MemoryError())
    monkeypatch.setattr(target, name, failing)
    with pytest.raises(MemoryError):
        mirror.update(changed)
    monkeypatch.undo()
    monkeypatch.setitem(sys.modules, "cupy", cupy)
    assert (mirror.update(rows) == rows).all()
    assert (mirror.update(changed) == changed).all()


def test_the_batch_of_a_cache_is_mirrored(cupy):
    cache = PagedKVCache(1, 64, 4, 1, 8, array_module="cupy", max_seqs=8, max_seq_len=64)
    assert isinstance(cache.k_caches[0], DeviceModule.Array)
    seqs = [cache.add(n).seq for n in (5, 16, 30, 4, 1, 9, 2, 3)]
    first = cache.batch(seqs)
    assert isinstance(first.block_tables, DeviceModule.Array)
    cupy.copied = 0
    cache.append(seqs)
    slots_bytes = cupy.copied
    batch = cache.batch(seqs)
    assert slots_bytes == 8 * len(seqs)
    grown = 2  # the sequences of 16 and 4 tokens have begun another block
    expected = cache.block_tables(seqs)
    assert cupy.copied - slots_bytes == grown * (4 * expected.shape[1] + 8) + 4 * len(seqs)
    np.testing.assert_array_equal(batch.block_tables[:, : expected.shape[1]], expected)
    np.testing.assert_array_equal(batch.seq_lens, cache.seq_lens(seqs))
    assert (first.max_seq_len, batch.max_seq_len) == (30, 31)
    assert batch.seq_lens.shape == (8,)
    assert batch.seq_lens.flags.c_contiguous
    assert batch.block_tables.ctypes.data == first.block_tables.ctypes.data
    assert batch.seq_lens.ctypes.data == first.seq_lens.ctypes.data
    some = cache.batch(seqs[2:5])
    np.testing.assert_array_equal(some.block_tables[:, :8], cache.block_tables(seqs[2:5]))
    twice = cache.batch([seqs[2]] * 20)
    np.testing.assert_array_equal(twice.block_tables[:, :8], cache.block_tables([seqs[2]] * 20))


def test_the_tables_of_groups_are_mirrored(cupy):
    sizes = {"max_seqs": 8, "max_seq_len": 64, "windows": (6, None)}
    cache, twin = PagedKVCache(2, 64, 4, 1, 8, array_module="cupy", **sizes), PagedKVCache(2, 64, 4, 1, 8, **sizes)
    seqs = [(cache.add(n).seq, twin.add(n).seq) for n in (5, 16, 30)]
    for names in (seqs, seqs[1:], seqs, []):
        ours, theirs = ([pair[i] for pair in names] for i in range(2))
        cache.append(ours)
        twin.append(theirs)
        tables, expected = cache.batch(ours).block_tables, twin.batch(theirs).block_tables
        assert tables.shape == (2, len(names), 16)
        np.testing.assert_array_equal(tables[:, :, : expected.shape[2]], expected)


def test_tables_on_a_device_change_their_shape_once_for_each_doubling(cupy):
    """Otherwise every new block would need a new plan, and captured CUDA graphs would read too narrow tables."""
    cache = PagedKVCache(1, 1024, 4, 1, 8, array_module="cupy", max_seqs=2, max_seq_len=3000)
    seq = cache.add(1).seq
    widths = []
    for _ in range(2900):
        batch = cache.batch(seq)
        widths.append(batch.block_tables.shape[1])
        assert widths[-1] * 4 >= batch.max_seq_len
        cache.append(seq)
    assert sorted(set(widths)) == [64, 128, 256, 512, 750]
    assert widths == sorted(widths)
    assert cache.batch([]).max_seq_len == 0


def test_copies_of_shared_blocks_on_a_device(cupy):
    cache = PagedKVCache(2, 8, 4, 1, 8, array_module="cupy", max_seqs=4)
    seq = cache.add(6).seq
    cache.k_caches[1].view(np.ndarray)[1] = 7
    cache.fork(seq)
    cache.append(seq)
    assert (cache.k_caches[1].view(np.ndarray)[2] == 7).all()


@pytest.fixture
def cuda_torch(monkeypatch):
    module = TorchModule()
    monkeypatch.setitem(sys.modules, "torch", module)
    return module


def test_no_step_waits_for_the_device_of_torch(cuda_torch):
    """The device gets the rows as they were at the call, in the order of the calls."""
    cache = PagedKVCache(2, 64, 4, 1, 8, array_module="torch", device="cuda", max_seqs=8, max_seq_len=64)
    seqs = [cache.add(n).seq for n in (5, 16, 30, 4, 1)]
    arrived, expected = [], []
    for step in range(12):
        if step == 5:
            seqs += cache.fork(seqs[0])  # of 10 tokens: the next append copies a block
        slots = cache.append(seqs)
        batch = cache.batch(seqs)
        tables, lens = cache.block_tables(seqs), cache.seq_lens(seqs)
        arrived += [slots, batch.block_tables[:, : tables.shape[1]].clone(), batch.seq_lens.clone()]
        last = lens - 1
        expected += [tables[np.arange(len(seqs)), last // 4] * 4 + last % 4, tables, lens]
    assert cuda_torch.num_waits == 0
    cuda_torch.synchronize()
    for got, wanted in zip(arrived, expected, strict=True):
        np.testing.assert_array_equal(got.x, wanted)


def test_rows_may_change_right_after_an_update(cuda_torch):
    x = np.arange(3)
    sent = Arrays("torch").asarray(x)
    x[:] = 7
    cuda_torch.synchronize()
    assert sent.x.tolist() == [0, 1, 2]


@pytest.mark.parametrize("name", ["torch", "cupy"])
def test_nothing_is_sent_in_a_capture(cupy, cuda_torch, name):
    """Replays would copy whatever the pinned memory holds by then."""
    cache = PagedKVCache(1, 8, 4, 1, 8, array_module=name, max_seqs=4)
    seq = cache.add(6).seq
    twin = cache.fork(seq)[0]
    module = cuda_torch if name == "torch" else cupy
    module.is_capturing = True
    for call in (lambda: cache.append(twin), lambda: cache.slots(seq, 0, 3), lambda: cache.batch(seq)):
        with pytest.raises(RuntimeError, match=r"captured by a CUDA graph, .* ask for them before the capture"):
            call()
    assert cache.seq_lens([seq, twin]).tolist() == [6, 6]
    module.is_capturing = False
    cache.batch(seq)
    module.is_capturing = True
    cache.batch(seq)  # nothing has changed, so there is nothing to send


def test_a_batch_in_the_middle_of_another_one_is_refused(cupy, monkeypatch):
    """As from a signal handler: both would write to the same buffers."""
    cache = PagedKVCache(1, 8, 4, 1, 8, array_module="cupy")
    seq = cache.add(3).seq
    update = Mirror.update

    def handler(mirror, rows, *width):
        with pytest.raises(RuntimeError, match="in the middle of another call of the same pool"):
            cache.batch(seq)
        return update(mirror, rows, *width)

    monkeypatch.setattr(Mirror, "update", handler)
    assert cache.batch(seq).seq_lens == [3]


def test_arrays_on_the_host_are_new_ones():
    for module in ("numpy", "torch"):
        cache = PagedKVCache(1, 8, 4, 1, 8, array_module=module)
        seq = cache.add(3).seq
        first = cache.batch(seq)
        cache.append(seq)
        assert (first.seq_lens.tolist(), cache.batch(seq).seq_lens.tolist()) == ([3], [4])


def test_the_device_of_torch():
    assert PagedKVCache(1, 8, 4, 1, 8, array_module=torch, device="cpu").k_caches[0].device.type == "cpu"
    with torch.device("meta"):
        cache = PagedKVCache(1, 8, 4, 1, 8, array_module="torch")
    assert cache.slots(cache.add(3).seq, 0, 3).device.type == "meta", "later arrays are where the first were"
    for module in ("numpy", "cupy"):
        with pytest.raises(ValueError, match=f"^device is for array_module torch, got 'cuda' for {module}$"):
            PagedKVCache(1, 8, 4, 1, 8, array_module=module, device="cuda")


def test_buffers_without_a_longest_length_begin_small(cupy):
    """They move where a sequence is longer than they were made for, and what they hold is right all the same."""
    cache = PagedKVCache(1, 20_000, 1, 1, 8, array_module="cupy", max_seqs=200)
    tables, _ = cache._batches._mirrors
    assert tables._device.shape == (200, 400)
    seqs = [cache.add(n).seq for n in (5, 300)]
    cache.batch(seqs)
    cache.append(seqs, [1, 900])
    batch = cache.batch(seqs)
    np.testing.assert_array_equal(batch.block_tables[:, :1200], cache.block_tables(seqs))
    assert tables._device.shape == (200, 2048)

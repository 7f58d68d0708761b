"""Plans of a batch: the first layer validates and plans for all layers, and different calls are validated again."""

import dataclasses

import numpy as np
import pytest
import torch

import pagedkv
from pagedkv import PagedKVCache
from pagedkv.operations import plan as planning

from ..memory.manager import refused

LAYERS, P, HEADS, DIM = 3, 8, 2, 16
LENS = (P + 1, 3, 600)  # one of several splits


def numbers(x):
    return x.float().numpy() if isinstance(x, torch.Tensor) else x


class Steps:
    """Decode steps over a cache, each layer with q, k and v of its own."""

    def __init__(self, dtype="float32", array_module="numpy", **options):
        self.rng = np.random.default_rng(0)
        self.cache = PagedKVCache(LAYERS, 100, P, HEADS, DIM, dtype, array_module=array_module, **options)
        self.options = {name: options[name] for name in ("layout", "kv_dtype") if name in options}
        self.k_scale = options.get("k_scale")
        self.seqs = [self.cache.add(0).seq for _ in LENS]
        slots = self.cache.append(self.seqs, list(LENS))
        for layer in range(LAYERS):
            self.cache.write(layer, self.new(sum(LENS), HEADS), self.new(sum(LENS), HEADS), slots)

    def new(self, *shape):
        x = torch.from_numpy(self.rng.standard_normal((*shape, DIM), np.float32))
        dtype = self.cache.k_caches[0].dtype if self.cache.k_caches[0].dtype != torch.uint8 else torch.float32
        return x.to(dtype) if isinstance(self.cache.k_caches[0], torch.Tensor) else x.numpy()

    def step(self, layers=range(LAYERS), **options):
        """One step in some layers; every result is that of decode_attention, and what was written is there."""
        slots, batch = self.cache.append(self.seqs), self.cache.batch(self.seqs)
        for layer in layers:
            k, v = self.new(len(LENS), HEADS), self.new(len(LENS), HEADS)
            self.cache.write(layer, k, v, slots)
            self.attend(layer, batch, **options)
            caches = self.cache.k_caches[layer], self.cache.v_caches[layer]
            lens = self.cache.seq_lens(self.seqs).tolist()
            for i, length in enumerate(lens):
                scales = {"k_scale": self.k_scale[layer]} if self.k_scale else {}
                stored = pagedkv.gather_kv(*caches, batch.block_tables[i], length, **self.options, **scales)
                for x, y in zip(stored, (k, v), strict=True):
                    np.testing.assert_allclose(numbers(x[-1]), numbers(y[i]), rtol=0.1, atol=0.1)
        return batch

    def attend(self, layer, batch, q=None, **options):
        q = self.new(len(LENS), 4) if q is None else q
        caches = self.cache.k_caches[layer], self.cache.v_caches[layer]
        scales = {"k_scale": self.k_scale[layer]} if self.k_scale else {}
        operation, where = pagedkv.decode_attention, [batch.block_tables, batch.seq_lens]
        if not batch.is_decode:
            operation, where = pagedkv.prefill_attention, [*where, batch.query_starts]
        expected = operation(q, *caches, *where, **self.options, **scales, **options)
        got = self.cache.attend(layer, q, batch, **options)
        assert type(got) is type(expected)
        assert (got == expected).all()


@pytest.fixture
def validated(monkeypatch):
    """The calls that have been validated and planned for others."""
    calls, whole = [], planning.attention_call
    monkeypatch.setattr(planning, "attention_call", lambda arguments: [calls.append(arguments), whole(arguments)][1])
    return calls


@pytest.mark.parametrize(
    ("options", "per_step"),
    [
        ({}, 1),
        ({"array_module": "torch", "layout": "HND"}, 1),
        ({"array_module": "torch", "dtype": "float16", "layout": "vllm"}, 1),
        ({"kv_dtype": "fp8_e4m3"}, 1),
        ({"kv_dtype": "fp8_e4m3", "k_scale": [0.5, 1.0, 2.0]}, LAYERS),
    ],
)
def test_one_layer_of_a_step_is_validated_for_all(validated, options, per_step):
    steps = Steps(**options)
    for count in (1, 2):
        batch = steps.step()
        assert len(validated) == count * per_step
    for layer in range(LAYERS):
        steps.attend(layer, batch)
    assert len(validated) == 2 * per_step


def test_chunks_of_prompts_are_validated_once_too(validated):
    steps = Steps()
    query_lens = [P, 2, 70]
    batch = steps.cache.batch(steps.seqs, query_lens)
    for layer in range(LAYERS):
        steps.attend(layer, batch, steps.new(sum(query_lens), 4))
    assert len(validated) == 1
    batch.query_starts[1:3] -= 1
    steps.attend(0, batch, steps.new(sum(query_lens), 4))
    assert len(validated) == 2


def test_options_that_alternate(validated):
    steps = Steps()
    steps.step([0], window=20, scale=0.5)
    batch = steps.step([1], scale=1)
    steps.attend(2, batch, scale=1.0)
    steps.attend(0, batch, scale=1)
    assert len(validated) == 3
    steps.step(sinks=np.ones(4, np.float32), softcap=2.0)  # arrays may hold anything else in the next call
    assert len(validated) == 3


def test_a_batch_of_another_cache_is_validated_again(validated):
    steps, few = Steps(), PagedKVCache(1, 2, P, HEADS, DIM)
    batch = steps.step()
    with refused(few, IndexError, r"^block_tables must hold block ids in 0\.\.num_blocks-1 = 0\.\.1"):
        few.attend(0, steps.new(3, 4), batch)


def test_the_number_of_threads_counts(validated):
    steps, threads = Steps(), pagedkv.get_num_threads()
    batch = steps.cache.batch(steps.seqs)
    try:
        for number in (1, 2, 1):
            pagedkv.set_num_threads(number)
            steps.attend(0, batch)
    finally:
        pagedkv.set_num_threads(threads)
    assert len(validated) == 2


def test_tables_and_lengths_of_the_call_count():
    """Changed tables and lengths of a batch take effect."""
    steps = Steps()
    batch = steps.cache.batch(steps.seqs)
    batch.seq_lens[1] = 0  # it is a decode all the same
    steps.attend(0, batch)
    assert batch.query_starts.tolist() == [0, 1, 2, 3]
    batch = steps.step()
    batch.block_tables[0] = batch.block_tables[2, : len(batch.block_tables[0])]
    steps.attend(1, batch)
    batch.seq_lens[1] = 0
    steps.attend(2, batch)
    batch.seq_lens[:] = 0, 5, 17
    steps.attend(0, batch)
    batch.seq_lens[2] = steps.cache.seq_lens(steps.seqs)[2] + 1
    with refused(steps.cache, ValueError, r"^seq_lens must be in 0\.\.max_seq_len = 0\.\.601, got 602 for sequence 2$"):
        steps.cache.attend(0, steps.new(3, 4), batch)
    for name in ("block_tables", "seq_lens"):
        wider = dataclasses.replace(batch, **{name: getattr(batch, name).astype(np.int64)})
        with refused(steps.cache, TypeError, rf"^{name} must have dtype int32, got int64$"):
            steps.cache.attend(0, steps.new(3, 4), wider)
    for longest, error in ((-1, ValueError), (True, TypeError)):
        with refused(steps.cache, error, r"^max_seq_len must be"):
            steps.cache.attend(0, steps.new(3, 4), dataclasses.replace(batch, max_seq_len=longest))
    batch.seq_lens[2], batch.block_tables[2, 1] = 9, 100
    with refused(steps.cache, IndexError, r"got 100 for sequence 2, column 1$"):
        steps.cache.attend(0, steps.new(3, 4), batch)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (lambda q: q.astype(np.float64), TypeError, r"^q must have dtype float32, float16 or bfloat16, got float64$"),
        (lambda q: q[:2], ValueError, r"^q must have num_tokens = 3 rows, those of the batch, got 2"),
        (lambda q: q[0], ValueError, r"^q must have shape \(num_seqs, num_heads, head_dim\), got"),
        (lambda q: q[:, :3], ValueError, r"^num_heads must be a positive multiple"),
        (lambda q: np.repeat(q, 2, 2)[..., ::2], ValueError, r"^q must be contiguous along its last axis"),
        (lambda q: q.tolist(), TypeError, r"^q must be an array"),
    ],
)
def test_a_query_that_differs(change, error, message):
    steps = Steps()
    batch = steps.step()
    with refused(steps.cache, error, message):
        steps.cache.attend(1, change(steps.new(3, 4)), batch)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"window": 0}, ValueError, r"^window must be at least 1, got 0$"),
        ({"scale": True}, TypeError, r"^scale must be a number, got bool$"),
        ({"cap": 1.0}, TypeError, r"unexpected keyword argument 'cap'$"),
        *(
            ({name: 1}, TypeError, rf"^attend\(\) takes no {name}: the cache passes its own$")
            for name in ("max_seq_len", "k_scale", "k_scales", "kv_dtype", "v_cache", "query_starts")
        ),
        ({"tables": 1}, TypeError, r"decode_attention\(\) got an unexpected keyword argument 'tables'$"),
    ],
)
def test_options_that_cannot_be(options, error, message):
    steps = Steps()
    batch = steps.step(scale=1.0, window=3)
    with refused(steps.cache, error, message):
        steps.cache.attend(1, steps.new(3, 4), batch, **options)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (lambda k, v, slots: (k.astype(np.float16), v, slots), TypeError, r"^k must have dtype float32"),
        (lambda k, v, slots: (k, v[:2], slots), ValueError, r"^v must have shape"),
        (lambda k, v, slots: (k, v, slots - 10**6), None, None),  # negative ones are skipped
        (lambda k, v, slots: (k, v, slots + 10**6), IndexError, r"^slots must be below"),
        (lambda k, v, slots: (k, v, slots * 0), ValueError, r"^slots must name a slot once"),
        (lambda k, v, slots: (k, v, slots.astype(np.int32)), TypeError, r"^slots must have dtype int64"),
    ],
)
def test_a_write_that_differs(change, error, message):
    steps = Steps()
    steps.step()
    slots = steps.cache.append(steps.seqs)
    given = change(steps.new(3, HEADS), steps.new(3, HEADS), slots)
    if error is None:
        before = steps.cache.k_caches[1].copy()
        steps.cache.write(1, *given)
        assert (steps.cache.k_caches[1] == before).all()
        return
    with refused(steps.cache, error, message):
        steps.cache.write(1, *given)


def test_caches_that_are_read_only_or_overlap():
    steps = Steps()
    steps.step()
    slots, k = steps.cache.append(steps.seqs), steps.new(3, HEADS)
    steps.cache.v_caches[1].flags.writeable = False
    with refused(steps.cache, ValueError, r"^v_cache must be writable, got a read-only array$"):
        steps.cache.write(1, k, k, slots)
    inside = steps.cache.k_caches[2][50, :3]
    with refused(steps.cache, ValueError, r"^k_cache must not overlap v$"):
        steps.cache.write(2, k, inside, slots)


def test_a_call_is_planned_by_the_tables_that_it_is_known_by():
    """Another thread writes to the lengths right after the call has looked for an earlier one like it."""
    steps = Steps()
    batch, q = steps.cache.batch(steps.seqs), steps.new(len(LENS), 4)
    expected, lens = steps.cache.attend(0, q, batch), batch.seq_lens.copy()

    class Rewritten(dict):
        def get(self, key):
            batch.seq_lens[...] = 1
            return super().get(key)

    again = dataclasses.replace(batch, plans=Rewritten())
    for _ in range(2):
        batch.seq_lens[...] = lens
        np.testing.assert_array_equal(steps.cache.attend(0, q, again), expected)


def test_a_batch_of_before_a_reset_is_refused():
    steps = Steps()
    batch = steps.step()
    steps.cache.reset()
    with refused(steps.cache, RuntimeError, r"^batch must be made after the last reset of its cache"):
        steps.cache.attend(0, steps.new(3, 4), batch)
    steps.attend(0, steps.cache.batch(steps.seqs))


def test_a_layer_has_its_own_output_and_lse():
    steps = Steps()
    batch, q = steps.step(), steps.new(len(LENS), 4)
    out, expected = np.zeros_like(q), steps.cache.attend(0, q, batch)
    got, lse = steps.cache.attend(0, q, batch, out=out, return_lse=True)
    assert got is out
    assert (out == expected).all()
    assert lse.shape == (len(LENS), 4)
    with refused(steps.cache, ValueError, r"^out must not overlap q$"):
        steps.cache.attend(0, q, batch, out=q)

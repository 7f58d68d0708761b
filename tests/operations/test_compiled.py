"""Calls inside torch.compile: one graph break each, no warning, and the same results."""

import warnings

import pytest
import torch

import pagedkv

CACHES = torch.arange(2 * 4 * 16 * 2 * 64, dtype=torch.float32).remainder(7).view(2, 4, 16, 2, 64)
TABLES, LENS, STARTS = (torch.tensor(x, dtype=torch.int32) for x in ([[2]], [3], [0, 1]))
COS = torch.ones(8, 32)
PAIRS = torch.tensor([[0, 1]])


class Arrays:
    """What a layer reads and writes."""

    def __init__(self):
        self.k_cache, self.v_cache = CACHES.clone()
        self.cache = pagedkv.PagedKVCache(1, 8, 16, 2, 64, array_module="torch")
        self.seq = self.cache.add(3).seq
        self.plan = pagedkv.plan_decode(torch.ones(1, 4, 64), self.k_cache, self.v_cache, TABLES, LENS)
        self.slots, self.batch = self.cache.slots(self.seq, 0, 3), self.cache.batch(self.seq)

    def stored(self):
        return torch.stack([self.k_cache, self.v_cache, self.cache.k_caches[0][:4], self.cache.v_caches[0][:4]])


# Of a query (1, 4, 64): with a graph before the call, and one behind it.
LAYERS = {
    "decode_attention": lambda x, q: pagedkv.decode_attention(q * 2, x.k_cache, x.v_cache, TABLES, LENS) + 1,
    "prefill_attention": lambda x, q: (
        pagedkv.prefill_attention(q * 2, x.k_cache, x.v_cache, TABLES, LENS, STARTS, return_lse=True)[1] + 1
    ),
    "plan_decode": lambda x, q: (pagedkv.plan_decode(q * 2, x.k_cache, x.v_cache, TABLES, LENS), q + 1)[1],
    "plan_prefill": lambda x, q: (pagedkv.plan_prefill(q * 2, x.k_cache, x.v_cache, TABLES, LENS, STARTS), q + 1)[1],
    "run": lambda x, q: x.plan.run(q * 2, x.k_cache, x.v_cache) + 1,
    "refresh": lambda x, q: (x.plan.refresh(), q + 1)[1],
    "merge_states": lambda x, q: pagedkv.merge_states([q * 2, q], [q.sum(2), q.mean(2)])[0] + 1,
    "write_kv": lambda x, q: (pagedkv.write_kv(q[:, :2] * 2, q[:, 2:], x.k_cache, x.v_cache, x.slots[:1]), q + 1)[1],
    "gather_kv": lambda x, q: pagedkv.gather_kv(x.k_cache, x.v_cache, TABLES[0], 3)[0] + q.sum(),
    "copy_blocks": lambda x, q: (pagedkv.copy_blocks(x.k_cache, x.v_cache, PAIRS), q + 1)[1],
    "swap_blocks": lambda x, q: (pagedkv.swap_blocks(x.k_cache, x.v_cache, PAIRS), q + 1)[1],
    "apply_rotary": lambda x, q: pagedkv.apply_rotary(q * 2, None, COS, COS, x.slots[:1])[0] + 1,
    "raise_if_failed": lambda x, q: (pagedkv.raise_if_failed(), q + 1)[1],
    "write": lambda x, q: (x.cache.write(0, q[:, :2] * 2, q[:, 2:], x.slots[1:2]), q + 1)[1],
    "attend": lambda x, q: x.cache.attend(0, q * 2, x.batch) + 1,
    "append": lambda x, q: x.cache.append(x.seq) + q.sum(),
    "commit": lambda x, q: (x.cache.commit(x.seq), q + 1)[1],
    "slots": lambda x, q: x.cache.slots(x.seq, 0, 2) + q.sum(),
    "batch": lambda x, q: x.cache.batch(x.seq).seq_lens + q.sum(),
}


@pytest.fixture(scope="module", autouse=True)
def _compiler():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # those of torch's own modules
        import torch._dynamo
    yield
    torch._dynamo.reset()


@pytest.mark.parametrize("name", LAYERS)
def test_one_graph_break_and_the_same_result(name):
    layer, ours, theirs = LAYERS[name], Arrays(), Arrays()
    torch._dynamo.utils.counters.clear()
    compiled = torch.compile(layer, backend="eager")
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        for value in (0.25, 3.0):  # traced, a call is right for values that torch has seen
            q = torch.full((1, 4, 64), value)
            assert torch.equal(compiled(ours, q), layer(theirs, q))
    assert torch.equal(ours.stored(), theirs.stored())
    assert [str(warning.message) for warning in seen] == []
    assert sum(torch._dynamo.utils.counters["graph_break"].values()) == 1

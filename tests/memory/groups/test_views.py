"""What `stats`, `plot` and the picture of a notebook say of groups."""

import json

import numpy as np
import pytest

from pagedkv import PagedKVCache
from pagedkv.trace import model

from .tables import P, make, tables


def test_stats_count_blocks_of_each_group_and_slots_without_a_token():
    cache = make(6, None, 6, 3, group_size=1, max_seq_len=60)
    seq = cache.add(40).seq
    assert cache.stats().used_by_group == (10,) * 4
    cache.append(seq)
    cache.commit(seq)
    assert cache.stats().used_by_group == (3, 11, 3, 2)
    others = [*cache.fork(seq, 2), cache.add(5).seq]
    for n in (1, 2, 7):
        cache.append(others[:2], [n, 1])
        held = tables(cache, [seq, *others])
        blocks = [np.unique(table[table >= 0]) for table in held]
        stats = cache.stats()
        assert stats.used_by_group == tuple(map(len, blocks))
        assert stats.wasted_slots == (P - cache.block_fills()[np.concatenate(blocks)]).sum()
    assert stats.contiguous_blocks == 4 * 4 * 60 // P, "contiguous memory keeps what windows have passed"
    assert "<th>used_by_group</th><td>9 + 17 + 9 + 8</td>" in stats.to_html()


@pytest.mark.parametrize("num_tokens", [5, 64, 149])
def test_used_bytes_are_those_of_kv_bytes(tmp_path, num_tokens):
    """At any length within a block for each group and sequence, which a whole prompt or the next step may take."""
    kinds = ["sliding_attention"] * 5 + ["full_attention"]
    shape = {"num_hidden_layers": 12, "num_attention_heads": 2, "hidden_size": 16, "dtype": "float32"}
    (tmp_path / "config.json").write_text(json.dumps(shape | {"layer_types": kinds * 2, "sliding_window": 24}))
    options = dict.fromkeys(("num_layers", "num_kv_heads", "head_dim", "dtype", "kv_dtype", "memory", "group_size"))
    rows = model.run(
        config=str(tmp_path), num_tokens=[num_tokens], block_size=P, weights=False, progress=None, **options
    )
    cache = PagedKVCache(12, 600, P, 2, 8, windows=([24] * 5 + [None]) * 2)
    seqs = [cache.add(n).seq for n in (3, num_tokens - 2)]
    cache.append(seqs[0], num_tokens - 3)
    for _ in range(2):
        cache.commit(seqs)
        cache.append(seqs[1])
    cache.commit(seqs)
    block_bytes = cache.stats().num_bytes // 600
    least = 2 * (rows[1]["bytes"] - len(cache.groups) * block_bytes)
    assert least <= cache.stats().used_bytes <= 2 * rows[1]["bytes"]


def test_a_map_says_which_group_has_which_block():
    cache = make(2, None, 2, num_blocks=15, group_size=1)
    seqs = [cache.add(6).seq, cache.add(3).seq]
    assert cache.plot(5).splitlines() == [
        "AaAaA",
        "abbb.",
        ".....",
        "A-Z sequences, a-z with empty slots  + shared  . free; 1 block a character",
        "00112",
        "2012.",
        ".....",
        "groups of layers: 02 window 2  1 all tokens",
    ]
    html = cache._repr_html_()
    assert html.count("h5v5h-5z") == 2 * html.count("h9v9h-9z", html.index("<title>")) == 6
    assert html.endswith("; small: of layers with a window</small></div>")
    cache.free(seqs)
    assert "small:" not in cache._repr_html_()


# -- refusals
@pytest.fixture
def two_groups():
    cache = PagedKVCache(2, 8, P, num_kv_heads=1, head_dim=8, windows=[6, None])
    seq, _ = cache.add(3)
    return cache, seq


@pytest.mark.parametrize("num_groups", [1, 3])
def test_slots_of_another_number_of_groups_are_refused(two_groups, num_groups):
    cache, _ = two_groups
    k = np.ones((1, 1, 8), np.float32)
    with pytest.raises(ValueError, match=rf"^slots must have shape .* num_groups = 2, .* got \({num_groups}, 1\)$"):
        cache.write(1, k, k, np.zeros((num_groups, 1), np.int64))
    assert not cache.k_caches[1].any()


def test_a_batch_of_a_cache_with_other_groups_is_refused(two_groups):
    q = np.ones((1, 1, 8), np.float32)
    one_group = PagedKVCache(2, 8, P, num_kv_heads=1, head_dim=8)
    seq, _ = one_group.add(3)
    for cache, batch in ((two_groups[0], one_group.batch([seq])), (one_group, two_groups[0].batch([two_groups[1]]))):
        with pytest.raises(ValueError, match=r"^batch must be made by this cache, with block tables of \d groups"):
            cache.attend(1, q, batch)


@pytest.mark.parametrize("window", ["3", [3], 30.0])
def test_a_window_that_is_no_int_is_refused(two_groups, window):
    cache, seq = two_groups
    with pytest.raises(TypeError, match=r"^window must be an int, got (str|list|float)$"):
        cache.attend(0, np.ones((1, 1, 8), np.float32), cache.batch([seq]), window=window)


def test_each_group_needs_a_block():
    with pytest.raises(ValueError, match=r"^num_blocks must be at least 2, got 1$"):
        PagedKVCache(2, 1, P, num_kv_heads=1, head_dim=8, windows=[6, None])
    PagedKVCache(2, 2, P, num_kv_heads=1, head_dim=8, windows=[6, None]).add(P)

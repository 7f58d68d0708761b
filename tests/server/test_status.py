"""Metrics of a server whose layers have windows or states."""

from collections import Counter
from unittest import mock

from pagedkv import PagedKVCache
from pagedkv.server import status


def test_metrics_count_the_used_blocks_of_each_group_of_layers():
    cache = PagedKVCache(2, 16, 4, 1, 8, windows=[4, None])
    cache.append(cache.add(8).seq)
    scheduler = mock.Mock(num_preempted=0, num_running=0, num_waiting=0)
    text = status.metrics(mock.Mock(cache=cache, scheduler=scheduler), Counter())
    assert 'pagedkv_group_blocks{group="0",window="4"} 2\n' in text
    assert 'pagedkv_group_blocks{group="1",window="none"} 3\n' in text
    assert "states" not in text


def test_metrics_count_states():
    cache = PagedKVCache(1, 16, 4, 1, 8, states={"x": ((1,), "float32")}, state_memory=20)
    for tokens, is_over in ([[1, 2, 3, 4], True], [[1, 2, 3, 4, 5], False], [[6, 7, 8, 9], True]):
        seq, num_cached = cache.add(tokens)
        if num_cached < len(tokens):
            cache.write_states([seq], cache.read_states([seq]))
        cache.commit([seq])
        if is_over:
            cache.free([seq])
    scheduler = mock.Mock(num_preempted=0, num_running=0, num_waiting=0)
    text = status.metrics(mock.Mock(cache=cache, scheduler=scheduler), Counter())
    assert [f'pagedkv_states{{state="{x}"}} {n}\n' in text for x, n in [("used", 1), ("cached", 2), ("free", 2)]] == [
        True
    ] * 3
    assert "pagedkv_prefix_tokens_without_state_total 0\n" in text

"""The walkthrough's CacheManager: what its methods return after any steps, and where it differs on purpose."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pagedkv import OutOfBlocksError
from pagedkv.compat.paged_minimal import CacheManager

SIZES = {"n_kv_heads": 2, "head_dim": 8}
BYTES_OF_A_TOKEN = 2 * 2 * 8 * 2  # K and V of bfloat16


def prompts(lens, max_seq_len=16):
    tokens = torch.full((len(lens), max_seq_len), -1)
    for row, length in zip(tokens, lens, strict=True):
        row[:length] = 7
    return tokens


def manager_of(lens, block_size=4, **options):
    return CacheManager(prompts(lens), block_size, **SIZES | options)


def state(manager):
    return manager.get_block_table().tolist(), manager.get_last_pos().tolist(), manager.cache.num_free


@given(
    st.lists(st.integers(1, 9), min_size=1, max_size=3),
    st.integers(1, 5),
    st.lists(st.tuples(*[st.sampled_from(["prompt", "end", "grow"])] * 3), max_size=6),
)
@settings(max_examples=30, deadline=None)
def test_after_any_steps(lens, block_size, steps):
    manager, lens = manager_of(lens, block_size, num_blocks=60), np.array(lens)
    for step in steps:
        step = np.array(step[: len(lens)])
        first = manager.get_block_table()[:, 0]
        manager.update(step == "end", step == "prompt")
        lens = np.where(step == "grow", lens + 1, np.where(step == "end", np.minimum(lens, block_size), lens))
        assert torch.equal(manager.get_block_table()[:, 0], first)
        num_blocks = -(-lens // block_size)
        tables = manager.get_block_table().numpy()
        assert tables.dtype == np.int32
        np.testing.assert_array_equal(tables >= 0, np.arange(num_blocks.max()) < num_blocks[:, None])
        used = tables[tables >= 0]
        assert len({*used}) == len(used) == 60 - manager.cache.num_free
        np.testing.assert_array_equal(manager.get_last_pos(), lens - 1)
        unused = (num_blocks * block_size - lens).sum()
        assert manager.get_fragmented_memory_size() == unused * BYTES_OF_A_TOKEN


def test_a_prompt_that_fills_its_blocks_fills_the_last_one_too():
    manager = manager_of([8])
    assert manager.get_last_pos().tolist() == [7]
    assert manager.get_fragmented_memory_size() == 0


def test_one_manager_has_the_blocks_of_all_layers():
    manager = manager_of([5, 3], n_layers=3)
    assert len({manager.get_kv_cache(layer)[which].data_ptr() for layer in range(3) for which in (0, 1)}) == 6
    assert manager.get_kv_cache()[0].data_ptr() == manager.get_kv_cache(0)[0].data_ptr()
    assert manager.get_kv_cache(2)[1].shape == (20, 4, 2, 8)  # five sequences of 16 tokens
    assert manager.get_kv_cache(2)[1].dtype == torch.bfloat16
    assert manager.get_fragmented_memory_size() == 3 * manager_of([5, 3]).get_fragmented_memory_size()


def test_caches_begin_with_zeros():
    assert not any(x.any() for x in manager_of([5]).get_kv_cache())


def test_without_room_nothing_changes():
    manager = manager_of([4, 4, 6], num_blocks=4)
    before = state(manager)
    with pytest.raises(OutOfBlocksError, match="2 blocks are needed, 1 of 4 are free: raise num_blocks"):
        manager.update([False, False, True], [False, False, False])
    assert state(manager) == before
    manager.update([False, False, True], [True, False, False])
    assert manager.get_last_pos().tolist() == [3, 4, 3]


def test_prompts_without_room_are_refused():
    with pytest.raises(OutOfBlocksError):
        manager_of([5, 5], num_blocks=3)


def test_free_memory_keeps_the_first_block():
    manager = manager_of([9, 3])
    (first, *_), _ = manager.get_block_table().tolist()
    manager.free_memory(0)
    manager.free_memory(1)
    assert manager.get_block_table().tolist() == [[first], [manager.get_block_table()[1, 0]]]
    assert manager.get_last_pos().tolist() == [3, 2]


def test_a_free_block_is_handed_out_once():
    manager = manager_of([3], num_blocks=3)
    block = manager.get_free_block()
    assert block != manager.get_free_block()
    assert block not in manager.get_block_table()
    with pytest.raises(OutOfBlocksError):
        manager.get_free_block()
    manager.cache.pool.release([block])
    assert manager.get_free_block() == block


@pytest.mark.parametrize(
    ("wrong", "error", "message"),
    [
        ({"tokens": [[3]]}, TypeError, "tokens must be a torch.Tensor, got list"),
        ({"tokens": torch.zeros(3)}, ValueError, r"tokens must have shape \(batch_size, max_seq_len\), got \(3,\)"),
        ({"batch_size": 3}, ValueError, "batch_size must be the 1 rows of tokens, or left out, got 3"),
        ({"block_size": 0}, ValueError, "block_size must be at least 1, got 0"),
        ({"num_blocks": 0}, ValueError, "num_blocks must be at least 1, got 0"),
        ({"n_layers": 0}, ValueError, "^n_layers must be at least 1, got 0"),
    ],
)
def test_wrong_arguments_are_named(wrong, error, message):
    with pytest.raises(error, match=message):
        CacheManager(**{"tokens": prompts([3]), "block_size": 4} | SIZES | wrong)


def test_sizes_of_a_key_are_keywords():
    with pytest.raises(TypeError, match="positional"):
        CacheManager(prompts([3]), 4, 1, 2, 8)
    with pytest.raises(TypeError, match="n_kv_heads"):
        CacheManager(prompts([3]), head_dim=8)


def test_bools_for_each_sequence():
    with pytest.raises(
        ValueError, match="eos_reached and input_text_mask must have batch_size = 2 bools each, got 2 and 1"
    ):
        manager_of([3, 3]).update([False, False], [False])


def test_a_layer_that_is_not_there():
    with pytest.raises(ValueError, match="layer must be at most 0, got 1"):
        manager_of([3]).get_kv_cache(1)

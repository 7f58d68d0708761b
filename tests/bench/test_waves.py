"""The model of how split fills a GPU, and what it is to say of the rule for splits."""

from dataclasses import replace

import pytest

from pagedkv.bench import waves
from pagedkv.bench.waves import BANDWIDTH, L2_LATENCY, LATENCY, NUM_SMS, SM_BANDWIDTH, Model, models
from pagedkv.kernels.split.config import MANY_SPLITS, MERGE_LOADS, SplitConfig

CONFIG = SplitConfig(128, 8, 16, "float16", "float16")


def test_no_cell_with_work_for_half_of_the_multiprocessors_leaves_more_than_half_idle():
    assert [model for model in models() if model.has_work and model.is_idle] == []
    assert waves.rows(quick=True)[-1]["cells"] == 0


def test_the_grid_has_calls_of_every_size():
    some = list(models())
    assert min(model.thread_blocks for model in some) == 2
    assert {model.seq_len for model in some} >= {512, 2047, 2048, 2049, 4097, 2**17}
    assert sum(model.has_work for model in some) > len(some) / 2
    assert any(model.is_idle for model in some)


@pytest.mark.parametrize("num_seqs", [1, 2, 64, 1000])
def test_the_bits_of_a_sequence_cannot_depend_on_the_batch(num_seqs):
    model = Model(CONFIG, 8, num_seqs, 5000)
    assert (model.split, model.num_splits) == (256, 20)
    assert model.thread_blocks == num_seqs * 8 * 20


def test_one_short_sequence_by_hand():
    """Eight KV heads of one split: eight thread blocks with 32 KiB each in flight."""
    model = Model(CONFIG, 8, 1, 256)
    nbytes = 8 * 256 * 2 * 256
    assert (model.thread_blocks, model.kv_bytes, model.partial_bytes) == (8, nbytes, 0)
    assert model.seconds == pytest.approx(3 * LATENCY + nbytes / (8 * 32 * 1024 / LATENCY))


def test_the_last_wave_and_the_merge_by_hand():
    """1024 thread blocks, 396 at once: two full waves, and 232 more, which fill memory as well."""
    model = Model(CONFIG, 8, 8, 4096)
    assert (model.thread_blocks, model.wave_size, model.num_splits) == (1024, 3 * NUM_SMS, 16)
    sums = 16 * 8 * 128 * 4  # bytes of one KV head
    rate = min(128 * MERGE_LOADS * 16 / L2_LATENCY, SM_BANDWIDTH)
    partials = 8 * 8 * 16 * 8 * 130 * 4 / BANDWIDTH
    expected = 3 * LATENCY + model.kv_bytes / BANDWIDTH + partials + 3 * L2_LATENCY + sums / rate
    assert model.seconds == pytest.approx(expected)


def test_the_merge_of_64_splits_takes_less_than_4_microseconds():
    """On one multiprocessor, with nothing else left to do: 9 with 4 reads of a thread in flight, 5 with 8."""
    model = Model(CONFIG, 8, 1, 2**17)
    assert model.num_splits == MANY_SPLITS
    assert model.merge_seconds < 4e-6


def test_more_work_never_takes_less_time_nor_more_than_the_bandwidth():
    for model in models(quick=True):
        assert 0 < model.share < 1
        assert replace(model, num_seqs=2 * model.num_seqs).seconds >= model.seconds
        assert replace(model, num_seqs=2 * model.num_seqs).share >= 0.99 * model.share

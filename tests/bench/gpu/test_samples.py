"""Samples on a GPU: what lies between the events, and turns."""

import pytest

from pagedkv.bench.gpu.samples import interleaved, launches_for, sample

from .fake_gpu import FakeGpu


def test_a_launch_is_timed_alone_behind_a_flush():
    gpu = FakeGpu()
    result = sample(gpu, gpu.subject("a", 3.0), 2)
    assert gpu.trace == ["flush", "event", "a", "event"] * 2 + ["wait"]
    assert result.milliseconds == pytest.approx(3.0)
    assert result.late == 0
    assert sample(FakeGpu(host_is_slow=True), lambda: None, 2).late == 1


def test_subjects_take_turns():
    gpu = FakeGpu()
    samples = interleaved(gpu, {"a": gpu.subject("a", 3.0), "b": gpu.subject("b", 0.5)}, 2)
    turns = [name for name in gpu.trace if name in "ab"]
    # One launch to warm up and two to see how long it takes; then one of a and two of b in each turn.
    assert turns == [*"aaabbb", *"abb" * 2]
    assert [each.milliseconds for each in samples["b"]] == pytest.approx([0.5, 0.5])
    assert {name: len(values) for name, values in samples.items()} == {"a": 2, "b": 2}


@pytest.mark.parametrize(("milliseconds", "launches"), [(0.0, 50), (0.001, 50), (0.1, 10), (0.9, 1), (5.0, 1)])
def test_short_calls_are_launched_more_often(milliseconds, launches):
    gpu = FakeGpu()
    assert launches_for(gpu, gpu.subject("a", milliseconds)) == launches

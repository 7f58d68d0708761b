"""Samples on a GPU: what lies between the events, turns, and what is said where there is no GPU."""

import sys

import pytest

from pagedkv.bench import gpu as bench_gpu
from pagedkv.bench.gpu import driver_version, interleaved, launches_for, open_gpu, sample
from pagedkv.cuda import driver
from pagedkv.errors import BackendUnavailableError

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


@pytest.mark.parametrize(
    ("text", "version"),
    [
        ("NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.104.05  Sat Aug 19 01:15:15 UTC 2023", "535.104.05"),
        ("NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.82.07  Release Build", "580.82.07"),
        ("", "unknown"),
    ],
)
def test_the_driver_says_its_version(text, version):
    assert driver_version(text) == version


def test_no_gpu_is_said_with_what_works_without_one(monkeypatch):
    def capabilities():
        raise BackendUnavailableError("no CUDA driver was found: install it")

    monkeypatch.setattr(driver, "capabilities", capabilities)
    with pytest.raises(BackendUnavailableError, match=r"was found: install it; .*bench static"):
        open_gpu()


def test_a_framework_that_makes_arrays_is_needed(monkeypatch):
    monkeypatch.setattr(driver, "capabilities", lambda: [(9, 0)])
    monkeypatch.setitem(sys.modules, "torch", None)
    monkeypatch.setitem(sys.modules, "cupy", None)
    with pytest.raises(BackendUnavailableError, match=r"CuPy.*torch with CUDA.*bench static"):
        open_gpu()


def test_torch_without_cuda_leaves_it_to_cupy(monkeypatch):
    monkeypatch.setattr(driver, "capabilities", lambda: [(9, 0)])
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.setitem(sys.modules, "cupy", "the module")
    monkeypatch.setattr(bench_gpu, "CupyGpu", lambda cupy, copy_bytes: (cupy, copy_bytes))
    assert open_gpu(5) == ("the module", 5)

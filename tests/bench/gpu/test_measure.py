"""Samples of calls on a GPU, and the rows made of them."""

import pytest

from pagedkv.bench.contest import Sample, interleaved
from pagedkv.bench.gpu import measure
from pagedkv.bench.gpu.measure import host_columns, on_gpu, sample
from pagedkv.bench.problem import Cell

from .fake_gpu import EMPTY_MS, READ_MS, FakeGpu, taking

DECODE = Cell("x", (40, 3, 32), 4, 2, 64, dtype="bfloat16")
PROMPT = Cell("x", (40,), 4, 2, 64, query_lens=(40,))
VERIFY = Cell("x", (40, 40), 4, 2, 64, query_lens=(8, 8))


def rows_of(gpu, subjects, cell=DECODE, operation="decode", repeats=2):
    rows = measure.measure(gpu, operation, cell, subjects, "first", repeats, lambda text: None)
    return {row["subject"]: row for row in rows}


def test_a_launch_is_timed_alone_behind_a_flush():
    gpu = FakeGpu()
    result = sample(gpu, gpu.subject("a", 3.0), 2)
    assert gpu.trace == ["flush", "event", "a", "event"] * 2 + ["wait"]
    assert (result.seconds, result.late) == (pytest.approx(3e-3), 0)
    assert sample(FakeGpu(host_is_slow=True), lambda: None, 2).late == 1


def test_host_times_are_of_single_calls_and_a_slow_one_shows_in_the_last_percentile_alone(monkeypatch):
    """The thread waits in a slow call: it runs for as long as in the others."""
    clocks = {"perf_counter": 0.0, "thread_time": 0.0}
    calls = iter([0.0] * 99 + [700e-6])

    def call():
        clocks["thread_time"] += 20e-6
        clocks["perf_counter"] += 20e-6 + next(calls)

    for name in clocks:
        monkeypatch.setattr(measure, name, lambda name=name: clocks[name])
    result = host_columns([sample(FakeGpu(), call, 50), sample(FakeGpu(), call, 50)])
    assert [result[name] for name in ("host us", "host p10 us", "host p90 us", "thread us")] == pytest.approx([20] * 4)
    assert 20 < result["host p99 us"] < 30
    assert set(host_columns([]).values()) == {None}
    assert host_columns([Sample(1.0, (3e-6,), (2e-6,))])["host p99 us"] == pytest.approx(3)


@pytest.mark.parametrize(("milliseconds", "launches"), [(0.0, 50), (0.001, 50), (0.1, 10), (0.9, 1), (5.0, 1)])
def test_short_calls_are_launched_more_often(milliseconds, launches):
    gpu = FakeGpu()
    samples = interleaved({"a": gpu.subject("a", milliseconds)}, 2, on_gpu(gpu))
    assert [each.seconds for each in samples["a"]] == pytest.approx([milliseconds / 1e3] * 2)
    # One launch to warm up and two to see how long it takes.
    assert gpu.trace.count("a") == 3 + 2 * launches


@pytest.mark.usefixtures("one_launch")
def test_subjects_an_empty_launch_and_the_read_take_turns():
    gpu = FakeGpu()
    rows_of(gpu, {"a": taking(2.0, "a"), "b": taking(2.0, "b")}, repeats=3)
    turns = [name for name in gpu.trace if name in ("read", "empty launch", "a", "b")]
    assert turns[-14:-2] == ["empty launch", "read", "a", "b"] * 3
    assert turns[-2:] == ["a", "b"]  # looked at once more
    assert gpu.released == 1


@pytest.mark.usefixtures("one_launch")
@pytest.mark.parametrize("cell", [DECODE, PROMPT, VERIFY], ids=["decode", "prompt", "verify"])
def test_time_becomes_bandwidth_and_of_prefill_a_rate(cell):
    gpu, operation = FakeGpu(), "decode" if cell is DECODE else "prefill"
    rows = rows_of(gpu, {"first": taking(0.25), "slower": taking(0.5)}, cell, operation)
    for name, milliseconds in (("first", 0.25), ("slower", 0.5)):
        row = rows[name]
        assert row["us"] == pytest.approx(milliseconds * 1e3)
        assert row["empty launch us"] == pytest.approx(EMPTY_MS * 1e3)
        assert row["x first"] == pytest.approx(milliseconds / 0.25)
        assert (row["note"], row["error"], row["spread"], row["late"]) == (None, 0, 0, 0)
        if cell is PROMPT:  # whose keys and values are not what takes long
            assert row["GB/s"] is row["share"] is row["read us"] is None
        else:
            assert row["GB/s"] == pytest.approx(cell.num_bytes / milliseconds / 1e6)
            assert row["read us"] == pytest.approx((EMPTY_MS + READ_MS * cell.num_bytes / gpu.copy_bytes) * 1e3)
            assert row["share"] == pytest.approx(row["read us"] / row["us"])
        if operation == "prefill":
            assert row["TFLOP/s"] == pytest.approx(cell.num_flops / milliseconds / 1e9)


@pytest.mark.usefixtures("one_launch")
def test_a_read_of_more_than_the_buffer_takes_as_much_longer():
    gpu = FakeGpu(copy_bytes=DECODE.num_bytes // 4)
    row = rows_of(gpu, {"first": taking(0.25)})["first"]
    assert row["read us"] == pytest.approx(4 * (EMPTY_MS + READ_MS) * 1e3)


@pytest.mark.usefixtures("one_launch")
def test_a_wrong_result_has_its_error_and_no_time():
    def wrong(problem):
        result = problem.host.expected.copy()
        result[1, 2, 3] += 0.1 * abs(result).max()
        return problem.gpu.subject("wrong", 1.0, result)

    rows = rows_of(FakeGpu(), {"wrong": wrong, "first": taking(1.0)})
    assert rows["wrong"]["us"] is rows["wrong"]["GB/s"] is rows["wrong"]["x first"] is None
    assert rows["wrong"]["error"] == pytest.approx(0.1, rel=0.1)
    assert rows["wrong"]["note"] == "wrong: error 0.1, allowed 0.02"
    assert rows["first"]["us"] == pytest.approx(1000)

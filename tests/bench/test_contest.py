"""Contests: which contestants are timed, in which order, and how often."""

import pytest

import pagedkv
from pagedkv.bench import contest as contests
from pagedkv.bench.contest import Contest, Refused, Sample, contest, interleaved, reason, spread


@pytest.fixture(autouse=True)
def _without_pauses(monkeypatch):
    monkeypatch.setattr(contests.time, "sleep", lambda seconds: None)


def held(contestants, repeats=2, **options):
    return contest(contestants, {}, lambda out: out, 0.5, repeats, **options)


def right():
    return lambda: 0.0


def test_a_wrong_contestant_is_not_timed():
    done = []

    def returning(error):
        return lambda: lambda: done.append(error) or error

    result = held({"right": returning(0.1), "wrong": returning(0.9), "NaN": returning(float("nan"))})
    assert set(result.samples) == {"right"}
    assert (result.errors["right"], result.errors["wrong"]) == (0.1, 0.9)
    assert result.notes == {"wrong": "wrong: error 0.9, allowed 0.5", "NaN": "wrong: error nan, allowed 0.5"}
    assert done.count(0.9) == 1


def test_a_contestant_that_becomes_wrong_has_no_time():
    errors = [0.0, 0.0, 0.0, 0.0, 0.9]
    result = held({"wrong later": lambda: lambda: errors.pop(0), "right": right})
    assert set(result.samples) == {"right"}
    assert result.notes == {"wrong later": "wrong: error 0.9, allowed 0.5"}
    assert result.errors == {"wrong later": 0.9, "right": 0.0}


def test_one_failure_does_not_stop_the_others():
    def refusing():
        raise Refused("no such shape")

    def missing():
        import a_package_that_nobody_has  # noqa: F401

    result = held({"refusing": refusing, "failing": lambda: lambda: 1 / 0, "missing": missing, "right": right})
    assert result.notes == {
        "refusing": "no such shape",
        "failing": "ZeroDivisionError: division by zero",
        "missing": "a_package_that_nobody_has is not installed",
    }
    assert set(result.samples) == {"right"}


def test_a_device_that_fails_in_the_turns_leaves_reasons():
    results = [0.0]
    result = held({"failing": lambda: results.pop, "right": right})
    assert result.notes == dict.fromkeys(("failing", "right"), "IndexError: pop from empty list")
    assert not result.samples


def test_contestants_take_turns():
    calls = []
    samples = interleaved({name: lambda name=name: calls.append(name) for name in "ab"}, 2)
    assert calls == list("ababab")
    assert {name: len(of) for name, of in samples.items()} == {"a": 2, "b": 2}


@pytest.mark.parametrize(
    ("spreads", "runs", "kept"),
    [([0.1], 1, 0.1), ([0.5, 0.15], 2, 0.15), ([0.5, 0.3, 0.4], 3, 0.3)],
)
def test_a_cell_whose_spread_is_too_large_is_measured_again(monkeypatch, spreads, runs, kept):
    left = list(spreads)
    monkeypatch.setattr(contests, "interleaved", lambda calls, *_: {name: [Sample(left.pop(0))] for name in calls})
    monkeypatch.setattr(contests, "spread", lambda values: values[0])
    result = held({"right": right}, most_runs=3)
    assert (result.runs, result.spread("right")) == (runs, kept)
    assert not left


def test_times_are_medians_and_compared_by_them():
    result = Contest({name: [Sample(x) for x in times] for name, times in (("a", (1.0, 9.0, 2.0)), ("b", (4.0,)))})
    assert (result.times("a"), result.seconds("a"), result.spread("b")) == ([1.0, 9.0, 2.0], 2.0, 0.0)
    assert result.over("b", "a") == 2
    assert result.seconds("c") is result.spread("c") is result.over("c", "a") is result.over("a", "c") is None


def test_spread_is_relative_to_the_median():
    assert spread([2.0, 2.0, 2.0]) == 0
    assert spread([1.0, 2.0, 3.0]) == pytest.approx(1.0)


def test_reasons_are_short():
    assert reason(pagedkv.BackendUnavailableError("not here")) == "not here"
    assert reason(RuntimeError("no kernel\nand a long trace")) == "RuntimeError: no kernel"
    assert reason(ValueError("x" * 1000)) == f"ValueError: {'x' * 145}..."
    assert reason(KeyError()) == "KeyError: "

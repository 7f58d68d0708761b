"""Who is timed, in which order, and how often."""

import pytest

from pagedkv.bench.cpu import timing
from pagedkv.bench.reasons import Refused


@pytest.fixture(autouse=True)
def _without_pauses(monkeypatch):
    monkeypatch.setattr(timing.time, "sleep", lambda seconds: None)


def held(contestants, others=(), repeats=2):
    return timing.contest(contestants, dict(others), lambda out: out, 0.5, repeats)


def test_outputs_are_compared_before_anything_is_timed():
    done = []

    def returning(error):
        return lambda: lambda: done.append(error) or error

    result = held({"right": returning(0.1), "wrong": returning(0.9), "NaN": returning(float("nan"))})
    assert set(result.seconds) == {"right"}
    assert (result.errors["right"], result.errors["wrong"]) == (0.1, 0.9)
    assert result.notes == {"wrong": "wrong: error 0.9, allowed 0.5", "NaN": "wrong: error nan, allowed 0.5"}
    assert done.count(0.9) == 1


def test_one_failure_does_not_stop_the_others():
    def refusing():
        raise Refused("no such shape")

    def failing():
        return lambda: 1 / 0

    result = held({"refusing": refusing, "failing": failing, "right": lambda: lambda: 0.0})
    assert result.notes == {"refusing": "no such shape", "failing": "ZeroDivisionError: division by zero"}
    assert set(result.seconds) == {"right"}


def test_all_take_turns():
    calls = []
    timing.interleaved({name: lambda name=name: calls.append(name) for name in "ab"}, 2)
    assert calls == list("ababab")


@pytest.mark.parametrize(
    ("spreads", "runs", "kept"),
    [([0.1], 1, 0.1), ([0.5, 0.15], 2, 0.15), ([0.5, 0.3, 0.4], 3, 0.3)],
)
def test_a_cell_whose_spread_is_too_large_is_measured_again(monkeypatch, spreads, runs, kept):
    left = list(spreads)
    monkeypatch.setattr(timing, "interleaved", lambda calls, repeats: {name: [left[0], left.pop(0)] for name in calls})
    monkeypatch.setattr(timing, "spread", lambda values: values[0])
    result = held({"right": lambda: lambda: 0.0})
    assert (result.runs, result.spread) == (runs, kept)
    assert not left

"""Workers are kept off the processor of a caller who works too."""

import os
import threading

import pytest

import pagedkv
from pagedkv.cpu import processors, threads

if processors._current is None:
    pytest.skip("the system tells no thread where it runs", allow_module_level=True)


@pytest.fixture
def affinities(monkeypatch):
    """The (worker, processors) that the system is asked for, with three processors and callers on 1."""
    calls = []
    monkeypatch.setattr(processors, "_current", lambda: 1)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1, 2})
    monkeypatch.setattr(os, "sched_setaffinity", lambda worker, allowed: calls.append((worker, allowed)))
    return calls


def workers_of(count):
    workers = processors.Workers()
    for _ in range(count):
        workers.add()
    return workers


def test_affinities_change_when_a_caller_joins_moves_or_waits(affinities, monkeypatch):
    workers, mine = workers_of(2), threading.get_native_id()
    for joins, current, expected in [
        (True, 1, {0, 2}),
        (True, 1, None),  # it stayed there
        (True, 2, {0, 1}),
        (False, 2, {0, 1, 2}),
        (False, 0, None),
        (True, 0, {1, 2}),
    ]:
        monkeypatch.setattr(processors, "_current", lambda current=current: current)
        workers.avoid_caller(joins)
        assert affinities == ([] if expected is None else [(mine, expected)] * 2)
        affinities.clear()
    workers.add()  # one that has started meanwhile
    workers.avoid_caller(True)
    assert affinities == [(mine, {1, 2})] * 3


def test_many_workers_are_left_alone(affinities):
    workers_of(processors.MOST_WORKERS + 1).avoid_caller(True)
    assert affinities == []


def test_the_only_processor_is_not_taken_away_and_a_refusal_is_no_error(affinities, monkeypatch):
    def refuse(worker, allowed):
        affinities.append(allowed)
        raise ProcessLookupError

    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {1})
    monkeypatch.setattr(os, "sched_setaffinity", refuse)
    workers_of(2).avoid_caller(True)
    assert affinities == [{1}] * 2


@pytest.mark.usefixtures("restore_threads")
def test_a_shared_call_leaves_its_callers_processor_and_a_long_one_gives_it_back():
    if len(os.sched_getaffinity(0)) < 2:
        pytest.skip("only one processor")
    together, seen = threading.Barrier(2), {}

    def kernel(counter, num_items):
        together.wait(30)
        seen[threading.get_ident()] = os.sched_getaffinity(0), processors._current()

    pagedkv.set_num_threads(2)
    for _ in range(2):  # the first one starts the worker, which adds itself
        seen.clear()
        threads.run_items(kernel, 2, (), estimate=threads.ALONE_NS)
    allowed, ((of_worker, processor),) = seen.pop(threading.get_ident())[0], seen.values()
    assert processor in of_worker < allowed
    assert len(of_worker) == len(allowed) - 1
    seen.clear()
    threads.run_items(kernel, 2, (), estimate=threads.PATIENCE_NS)
    assert [of_worker for of_worker, _ in seen.values()] == [allowed] * 2

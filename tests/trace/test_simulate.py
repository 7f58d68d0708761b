"""Simulated runs: small ones by hand, invariants of all runs, and figures of the real block pool."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pagedkv.memory import Stats
from pagedkv.trace import Buddy, Contiguous, Paged, Requests, log_normal, simulate


def series(run):
    return {kind: getattr(run, kind).tolist() for kind in ("tokens", "reserved", "internal", "external", "running")}


def test_contiguous_by_hand():
    """Two regions of 5 slots in 11; the third request waits until the first has ended."""
    run = simulate(Requests([2, 1, 3], [1, 3, 2]), Contiguous(11, max_len=5))
    assert series(run) == {
        "tokens": [3 + 2, 3 + 4, 4 + 5, 0][:3],
        "reserved": [0 + 2, 1 + 1, 0 + 0],
        "internal": [2 + 1, 1 + 0, 1 + 0],
        "external": [1, 0, 0],
        "running": [2, 2, 2],
    }
    assert run.waiting.tolist() == [1, 0, 0]
    assert (run.preempted, run.recomputed, run.num_steps, run.at_once) == (0, 0, 3, 2.0)


def test_buddy_by_hand():
    """A run of 4 and one of 8; the request for 5 waits although 4 slots are free."""
    run = simulate(Requests([2, 4, 4], [1, 2, 1]), Buddy(16))
    assert series(run) == {
        "tokens": [3 + 5, 6 + 5],
        "reserved": [0 + 1, 0],
        "internal": [1 + 2, 2 + 3],
        "external": [4, 0],
        "running": [2, 2],
    }


def test_paging_by_hand():
    """Three blocks of 4: the request admitted last gives its block up for the first one, and comes back."""
    run = simulate(Requests([3, 3], [5, 2]), Paged(13, block_size=4, watermark=0))
    assert series(run) == {
        "tokens": [4 + 4, 5, 6, 7, 8, 5],
        "reserved": [0 + 0, 3, 2, 1, 0, 0],
        "internal": [0 + 0, 0, 0, 0, 0, 3],
        "external": [0, 5, 5, 5, 5, 0],
        "running": [2, 1, 1, 1, 1, 1],
    }
    assert run.waiting.tolist() == [0, 1, 1, 1, 1, 0]
    assert (run.preempted, run.recomputed) == (1, 4)
    assert run.shares == pytest.approx({"tokens": 39 / 68, "reserved": 6 / 68, "internal": 3 / 68, "external": 20 / 68})
    assert run.waste == pytest.approx(29 / 68)
    assert run.at_once == 1


def test_a_preempted_request_resumes_before_new_ones_start():
    order = []
    requests = Requests([3, 3, 7], [5, 2, 1])
    simulate(requests, Paged(12, 4, watermark=0), lambda running, seqs, lens: order.append(running.tolist()))
    assert order == [[0, 1], [0], [0], [0], [0], [1], [2]]


def test_idle_slots_are_no_waste():
    run = simulate(Requests([4], [4]), Paged(10**6, block_size=1, max_len=8))
    assert run.waste == 0
    assert run.at_once == 1


def test_the_watermark_keeps_room_to_grow():
    requests = Requests([3, 3], [5, 5])
    assert simulate(requests, Paged(16, 4, watermark=0.5)).running.tolist() == [2] * 5
    run = simulate(requests, Paged(16, 4, watermark=0.51))
    assert (run.running.tolist(), run.preempted) == ([1] * 10, 0)


def test_no_more_sequences_run_than_there_are_rows_for():
    run = simulate(Requests([4] * 3, [4] * 3), Paged(1000, 4, max_seqs=2))
    assert run.running.tolist() == [2] * 4 + [1] * 4


def managers(memory):
    windows = {"windows": (5, None, 5)}
    contiguous = [Contiguous(memory, 40), Contiguous(memory), Buddy(memory), Contiguous(memory, 40, **windows)]
    return [*contiguous, *(Paged(memory, P) for P in (1, 3, 16)), Paged(memory, 3, **windows)]


@given(st.lists(st.tuples(st.integers(1, 20), st.integers(1, 20)), min_size=1, max_size=12), st.integers(64, 130))
@settings(max_examples=50)
def test_every_slot_is_of_one_kind_and_every_request_ends(lens, memory):
    requests = Requests(*map(list, zip(*lens, strict=True)))
    for manager in managers(memory):
        ended = []

        def watch(running, seqs, now, ended=ended):
            assert len(set(seqs.tolist())) == len(running) == len(now)
            ended.extend(running[now == requests.seq_lens[running]].tolist())

        run = simulate(requests, manager, watch)
        assert sorted(ended) == list(range(len(lens)))
        kinds = np.stack([run.tokens, run.reserved, run.internal, run.external])
        assert (kinds >= 0).all()
        total = kinds.sum(axis=0)
        assert (total <= run.memory).all()
        assert (total[run.waiting > 0] == run.memory).all()
        assert run.memory == memory * len(manager.windows)
        if not isinstance(manager, Paged):
            assert run.preempted == 0
            assert manager.allocator.sizes == {}
        else:
            assert manager.table.num_seqs == 0
            manager.table.check()


def test_figures_of_paging_are_those_of_the_real_manager():
    """Blocks, tokens and wasted slots by `stats` in every step, with sequences preempted."""
    requests = log_normal(40, prompt_mean=20, output_mean=40, max_len=120, seed=5)
    manager = Paged(403, block_size=8, watermark=0)
    stats = []
    run = simulate(requests, manager, lambda *_: stats.append(Stats.of(manager.table, 0)))
    assert run.preempted
    assert [s.num_tokens for s in stats] == run.tokens.tolist()
    assert [s.wasted_slots for s in stats] == (run.reserved + run.internal).tolist()
    waited = run.waiting > 0
    assert [s.free * 8 + 3 for s, waits in zip(stats, waited, strict=True) if waits] == run.external[waited].tolist()


def test_windows_by_hand():
    """A layer with a window of 2 beside one without: contiguous slots keep all, blocks of 2 come back."""
    requests = Requests([3], [4])
    kept = simulate(requests, Contiguous(8, max_len=7, windows=(2, None)))
    assert kept.tokens.tolist() == [2 + 4, 2 + 5, 2 + 6, 2 + 7]
    assert kept.reserved.tolist() == [6, 4, 2, 0]
    assert kept.internal.tolist() == [2, 3, 4, 5]
    paged = simulate(requests, Paged(8, block_size=2, windows=(2, None)))
    assert paged.tokens.tolist() == kept.tokens.tolist()
    assert paged.reserved.tolist() == [0, 2, 0, 0]
    assert paged.internal.tolist() == [4 + 4 - 6, 4 + 6 - 7 - 2, 4 + 6 - 8, 4 + 8 - 9]


def test_slots_that_windows_leave_are_those_of_the_real_manager():
    requests = log_normal(40, prompt_mean=20, output_mean=40, max_len=120, seed=5)
    manager = Paged(300, block_size=8, watermark=0, windows=(20, 20, None))
    used = []
    run = simulate(requests, manager, lambda *_: used.append(Stats.of(manager.table, 0).used))
    assert run.preempted
    slots = 8 * manager.groups.group_size
    assert [blocks * slots for blocks in used] == (run.tokens + run.reserved + run.internal).tolist()
    assert run.at_once > 1.3 * simulate(requests, Paged(300, 8, watermark=0)).at_once


@pytest.mark.parametrize("manager", [Contiguous(64, 40), Contiguous(40), Buddy(63), Paged(47, 8)])
def test_a_request_that_can_never_fit_is_refused_before_anything_runs(manager):
    room = manager.max_len
    simulate(Requests([room - 1], [1]), manager)
    with pytest.raises(ValueError, match=rf"^request 1 has {room + 1} tokens in the end, .* room for {room}: make"):
        simulate(Requests([1, room], [1, 1]), manager, lambda *_: pytest.fail("it runs"))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Contiguous(0), "memory must be at least 1, got 0"),
        (lambda: Contiguous(8, 9), "max_len must be at most 8, got 9"),
        (lambda: Buddy(-1), "memory must be at least 1, got -1"),
        (lambda: Paged(8, 9), "block_size must be at most 8, got 9"),
        (lambda: Paged(2**31, 1), "memory must be at most 2147483647, got 2147483648"),
        (lambda: Paged(8, 1, max_len=0), "max_len must be at least 1, got 0"),
        (lambda: Paged(8, 1, max_seqs=0), "max_seqs must be at least 1, got 0"),
        (lambda: Paged(8, 1, watermark=float("nan")), "watermark must be from 0 to 1, got nan"),
    ],
)
def test_wrong_managers_are_refused(make, message):
    with pytest.raises(ValueError, match=f"^{message}$"):
        make()

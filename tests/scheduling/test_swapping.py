"""Preempted requests come back from a store where that is cheaper, and a store costs no token and no block."""

import random
import threading
from types import SimpleNamespace

import numpy as np
import pytest

import pagedkv
from pagedkv.scheduling.swapping import Swapping

from ..stores.test_prefixes import FAULTS
from ..support.interrupts import Interrupt
from .toy import alone, forward, make_cache, serve, swap_of

PROMPTS = [[i, *range(1, 9)] for i in range(6)]
NUM_NEW = 30
TEXTS = {i: alone(tuple(prompt), NUM_NEW) for i, prompt in enumerate(PROMPTS)}
SWAPS_OUT, SWAPS_IN = 4, 30  # steps before the one that takes a request out, and before the one that has it back
ONCE = sum(len(prompt) + NUM_NEW - 1 for prompt in PROMPTS)  # tokens to compute, if none is computed again


class Crowd:
    """Requests in a pool that is too small for them, and a clock that goes on with what they do.

    Parameters
    ----------
    token, call : float
        Seconds of each token of a chunk, and of each call to the store.
    """

    def __init__(self, *, token=1.0, call=0.0, fault=lambda keys, blocks: blocks, timeout=60.0, **options):
        self.token, self.call, self.fault, self.now, self.num_computed = token, call, fault, 0.0, 0
        self.cache = make_cache(20, **options)
        self.swap, self.store = swap_of(self.cache, self.take_time, timeout)
        self.scheduler = pagedkv.Scheduler(self.cache, swap=self.swap, clock=lambda: self.now)
        for prompt in PROMPTS:
            self.scheduler.add(prompt, NUM_NEW)

    def take_time(self, keys, blocks):
        self.now += self.call
        return self.fault(keys, blocks)

    def count(self, step):
        self.now += self.token * (len(step.tokens) - len(step.requests))
        self.num_computed += len(step.tokens)

    def compute(self, step):
        """Compute a step; returns the texts that have ended."""
        self.count(step)
        finished = self.scheduler.update(step, forward(self.cache, step).astype(np.int64))
        return {request: tokens.tolist() for request, tokens, _ in finished}

    def serve(self):
        """Serve all to the end; returns their texts."""
        texts = serve(self.scheduler, self.cache, self.count)
        assert self.num_stored() == self.cache.stats().used == 0
        self.swap.close()
        return texts

    def num_stored(self):
        self.swap._patient.flush()
        return len(self.store._slots)

    def steps(self, num_steps):
        for _ in range(num_steps):
            self.compute(self.scheduler.schedule())
        return self

    def tokens(self):
        """The tokens that each request has."""
        return {number: self.scheduler.tokens(number) for number in self.scheduler._requests}

    @property
    def out(self):
        """The requests that are swapped out."""
        return [number for number, request in self.scheduler._requests.items() if request.copy]


@pytest.mark.parametrize("prefix_cache", [False, True])
def test_what_comes_back_is_not_computed_again(prefix_cache):
    crowd = Crowd(prefix_cache=prefix_cache)
    assert crowd.serve() == TEXTS
    assert crowd.scheduler.num_swapped == crowd.scheduler.num_preempted > 3
    assert crowd.num_computed == ONCE


@pytest.mark.parametrize(("token", "call"), [(0.0, 1.0), (1.0, 1e5)])
def test_a_store_that_takes_longer_than_computing_is_tried_once(token, call):
    crowd = Crowd(token=token, call=call, prefix_cache=False)
    assert crowd.serve() == TEXTS
    assert crowd.scheduler.num_swapped == 1 < crowd.scheduler.num_preempted
    assert crowd.num_computed > ONCE


def test_the_same_calls_and_clock_give_the_same_steps():
    def run():
        crowd, seen = Crowd(token=0.01, call=0.1), []
        serve(crowd.scheduler, crowd.cache, lambda step: (crowd.count(step), seen.append(step.slots.tolist())))
        return seen, crowd.scheduler.num_swapped, crowd.scheduler.num_preempted

    assert run() == run()


@pytest.mark.parametrize("fault", [fault for fault, _ in FAULTS.values()], ids=FAULTS)
@pytest.mark.parametrize("of", ["each call", "the second half"])
def test_a_fault_costs_a_computation_and_no_wrong_token(fault, of):
    calls = []

    def second_half(keys, blocks):
        calls.append(None)
        return blocks if len(calls) < 6 else fault(keys, blocks)

    crowd = Crowd(fault=fault if of == "each call" else second_half)
    assert crowd.serve() == TEXTS
    assert crowd.scheduler.num_preempted > 3


@pytest.mark.parametrize("num_good", [0, 2, 3])
def test_a_store_that_stalls_is_not_waited_for_again(num_good):
    goes_on, calls = threading.Event(), []

    def stall(keys, blocks):
        calls.append(None)
        assert len(calls) <= num_good or goes_on.wait()
        return blocks

    crowd = Crowd(fault=stall, timeout=0.2)
    texts = serve(crowd.scheduler, crowd.cache, crowd.count)
    assert texts == TEXTS
    assert crowd.cache.stats().used == 0
    assert len(calls) <= num_good + 2  # one to put, one to get
    goes_on.set()
    assert crowd.num_stored() == 0


def test_the_end_of_a_request_that_is_out_leaves_nothing():
    crowd = Crowd().steps(SWAPS_OUT + 1)
    [number] = crowd.out
    assert crowd.num_stored() > 0
    crowd.scheduler.abort(number)
    assert crowd.num_stored() == 0
    assert crowd.serve() == {i: text for i, text in TEXTS.items() if i != number}


def test_restart_computes_what_is_out_again_with_other_tokens():
    crowd = Crowd().steps(SWAPS_OUT + 1)
    crowd.scheduler.restart(crowd.tokens() | {number: PROMPTS[number] for number in crowd.out})
    assert crowd.num_stored() == crowd.cache.num_seqs == 0
    assert crowd.serve() == TEXTS


@pytest.mark.parametrize("num_steps", [SWAPS_OUT, SWAPS_IN])
@pytest.mark.parametrize("instants", [range(1, 400, 40), pytest.param(range(1, 400, 3), marks=pytest.mark.long)])
def test_an_interrupt_of_a_swap_leaves_nothing(num_steps, instants):
    crowd = Crowd().steps(num_steps)
    before = crowd.out
    crowd.steps(1)
    assert crowd.out != before
    num_came = 0
    for instant in instants:
        crowd = Crowd().steps(num_steps)
        tokens = crowd.tokens()
        try:
            with Interrupt(instant, ["pagedkv/scheduling", "pagedkv/stores", "pagedkv/cache.py"]):
                crowd.scheduler.schedule()
        except KeyboardInterrupt:
            num_came += 1
        crowd.scheduler.restart(tokens)
        assert crowd.num_stored() == crowd.cache.num_seqs == 0
        texts = crowd.serve()
        assert texts == {number: TEXTS[number] for number in tokens}
    assert num_came > 4


def test_a_listener_that_raises_while_a_request_comes_back_costs_no_token():
    failing = []

    def listener(event):
        if failing:
            raise failing.pop()

    crowd = Crowd(events=listener)
    copy_in = crowd.swap.copy_in
    crowd.swap.copy_in = lambda seq, copy: (failing.append(ZeroDivisionError()), copy_in(seq, copy))[1]
    texts, num_failed = {}, 0
    while crowd.scheduler.num_running + crowd.scheduler.num_waiting:
        failed = False
        try:
            step = crowd.scheduler.schedule()
        except ZeroDivisionError:
            failed, num_failed = True, num_failed + 1
            crowd.cache.check()
        failing.clear()
        if not failed:
            texts |= crowd.compute(step)
    assert texts == TEXTS
    assert num_failed > 0
    assert crowd.num_computed > ONCE
    assert crowd.num_stored() == crowd.cache.num_seqs == 0


def test_a_clock_that_raises_costs_no_token_and_no_request():
    draws = random.Random(0)

    def clock():
        if draws.random() < 0.3:
            raise ZeroDivisionError
        return crowd.now

    crowd = Crowd()
    crowd.scheduler = pagedkv.Scheduler(crowd.cache, swap=crowd.swap, clock=clock)
    for prompt in PROMPTS:
        crowd.scheduler.add(prompt, NUM_NEW)
    texts, num_failed = {}, 0

    def repeated(call, *args):
        nonlocal num_failed
        for _ in range(20):
            try:
                return call(*args)
            except ZeroDivisionError:
                num_failed += 1
        raise AssertionError("a call that is repeated never succeeds")

    while step := repeated(crowd.scheduler.schedule):
        crowd.count(step)
        for number, tokens, _ in repeated(crowd.scheduler.update, step, forward(crowd.cache, step).astype(np.int64)):
            texts[number] = tokens.tolist()
    assert texts == TEXTS
    assert num_failed > 30
    assert crowd.scheduler.num_swapped > 0
    assert crowd.num_stored() == crowd.cache.num_seqs == 0


class Costs:
    """Swapping on its own: its swap has a copy of 10 tokens of any sequence, and takes as long as one says."""

    def __init__(self):
        self.now = self.seconds = 0.0
        self.swapping = Swapping(self, lambda: self.now)

    def copy_out(self, seq):
        self.now += self.seconds
        return SimpleNamespace(num_tokens=10)

    def copy_in(self, seq, copy):
        self.now += self.seconds
        return 10

    def step(self, num_seqs, num_tokens, seconds):
        self.swapping.begin_step()
        self.now += seconds
        self.swapping.end_step(num_seqs, num_tokens)

    def swaps(self):
        return self.swapping.take_out(0, 10) is not None

    def start_again(self, num_cached, copy=None):
        return self.swapping.put_back(SimpleNamespace(tokens=[0] * 11, copy=copy), 0, num_cached)


def test_a_swap_is_tried_again_after_16_that_were_not():
    costs = Costs()
    costs.step(1, 11, 0.1)
    costs.seconds = 1.0
    assert [costs.swaps() for _ in range(18)] == [True] + 16 * [False] + [True]
    costs.seconds = 0.01
    assert not any(costs.swaps() for _ in range(16))
    assert all(costs.swaps() for _ in range(18))  # the one that is tried has changed what is known


def test_a_token_costs_what_a_step_with_chunks_takes_longer():
    """10 tokens beside those that decode take a second more: a swap of 10 in half a second each way is as dear."""
    for seconds, pays in ((0.45, True), (0.55, False)):
        costs = Costs()
        costs.step(4, 4, 7.0)
        costs.step(4, 14, 8.0)
        costs.step(4, 6, 70.0)  # says more of other things
        costs.seconds = seconds
        assert costs.swaps()
        costs.start_again(0, SimpleNamespace(num_tokens=10))
        assert costs.swaps() == pays


def test_one_measure_that_is_far_off_decides_nothing():
    costs = Costs()
    for seconds in (100.0, 1.0, 1.0):
        costs.step(1, 11, seconds)
    costs.seconds = 2.0
    assert [costs.swaps(), costs.swaps()] == [True, False]


def test_what_the_prefix_cache_finds_costs_nothing_either_way():
    costs = Costs()
    costs.step(1, 11, 1.0)
    costs.seconds = 0.2
    assert costs.swaps()
    costs.start_again(0)
    assert costs.swaps()
    for _ in range(2):
        assert costs.start_again(9) == 9
    assert not costs.swaps()


def test_what_is_out_stays_out_if_it_takes_longer_to_come_back():
    costs = Costs()
    costs.step(1, 11, 1.0)
    copy = SimpleNamespace(num_tokens=10)
    costs.seconds = 2.0
    assert costs.start_again(0, copy) == 10
    assert costs.start_again(0, copy) == 0


def test_the_swap_is_of_the_scheduler_s_cache():
    swap, _ = swap_of(make_cache())
    for wrong in (swap, 7):
        with pytest.raises(
            ValueError, match=r"swap must be a SwapSpace of the scheduler's cache, got .*: pass SwapSpace\(cache"
        ):
            pagedkv.Scheduler(make_cache(), swap=wrong)
    with pytest.raises(TypeError, match="clock must be a function that returns seconds, got 7"):
        pagedkv.Scheduler(make_cache(), clock=7)

"""Scheduler, case by case."""

import numpy as np
import pytest

import pagedkv
from pagedkv.errors import OutOfBlocksError

from .toy import alone, forward, make_cache, serve

SYSTEM = [i % 11 for i in range(32)]


def scheduler_of(cache, **options):
    return pagedkv.Scheduler(cache, **options)


def counts(step):
    return dict(zip(step.requests.tolist(), np.diff(step.batch.query_starts).tolist(), strict=True))


def plans(scheduler, cache):
    """The tokens of each request in each step, to the end."""
    seen = []
    serve(scheduler, cache, lambda step: seen.append(counts(step)))
    return seen


def test_chunks_of_a_prompt_beside_decodes():
    cache = make_cache()
    scheduler = scheduler_of(cache, max_num_batched_tokens=8)
    first, second = scheduler.add([1, 2, 3], 6), scheduler.add(range(17), 2)
    texts = {}

    def plan_of(step):
        texts[len(texts)] = counts(step)

    assert serve(scheduler, cache, plan_of) == {first: alone((1, 2, 3), 6), second: alone(tuple(range(17)), 2)}
    assert [*texts.values()] == [{0: 3, 1: 5}, {0: 1, 1: 7}, {0: 1, 1: 5}, {0: 1, 1: 1}, {0: 1}, {0: 1}]


def test_arrays_go_straight_into_the_operations():
    cache = make_cache()
    scheduler = scheduler_of(cache)
    scheduler.add([1, 2, 3, 4, 5], 3)
    step = scheduler.schedule()
    x = np.ones((5, 1, 64), np.float32)
    caches = cache.k_caches[0], cache.v_caches[0]
    pagedkv.write_kv(x, x, *caches, step.slots)
    batch = step.batch
    out = pagedkv.prefill_attention(x, *caches, batch.block_tables, batch.seq_lens, batch.query_starts)
    assert (out == cache.attend(0, x, batch)).all()
    assert (step.tokens.dtype, step.slots.dtype, batch.positions.dtype) == (np.int64,) * 3
    assert step.logits_indices.tolist() == [4]


def test_arrays_are_the_cache_s():
    torch = pytest.importorskip("torch")
    cache = make_cache(array_module="torch")
    scheduler = scheduler_of(cache, max_num_batched_tokens=4)
    scheduler.add([1, 2, 3, 4, 5], 3)
    step = scheduler.schedule()
    assert [step.tokens.tolist(), step.slots.tolist(), step.logits_indices.tolist()] == [[1, 2, 3, 4], [0, 1, 2, 3], []]
    batch = step.batch
    for array in (step.tokens, step.slots, step.logits_indices, batch.positions, batch.query_starts):
        assert isinstance(array, torch.Tensor)
    assert scheduler.update(step, []) == []
    assert scheduler.schedule().logits_indices.tolist() == [0]


@pytest.mark.parametrize("budget", [8, 64, 1000])
def test_a_common_beginning_is_computed_once(budget):
    prompts = [SYSTEM + [20 + i] * (i + 1) for i in range(4)]
    texts, computed = {}, {}
    for prefix_cache in (True, False):
        cache, tokens = make_cache(prefix_cache=prefix_cache), []
        scheduler = scheduler_of(cache, max_num_batched_tokens=budget)
        for prompt in prompts:
            scheduler.add(prompt, 5)
        texts[prefix_cache] = serve(scheduler, cache, lambda step, tokens=tokens: tokens.append(len(step.tokens)))
        computed[prefix_cache] = sum(tokens)
    assert texts[True] == texts[False] == {i: alone(tuple(prompt), 5) for i, prompt in enumerate(prompts)}
    assert computed[False] - computed[True] == 3 * len(SYSTEM)


def test_another_salt_waits_for_nobody():
    cache = make_cache()
    scheduler = scheduler_of(cache)
    for salt in (None, "a", b"b"):
        scheduler.add(SYSTEM, 1, salt=salt)
    scheduler.add(SYSTEM, 1)
    assert counts(scheduler.schedule()) == {0: 32, 1: 32, 2: 32}


def test_a_request_that_finds_nothing_computes_all_beside_the_others_and_they_find_it():
    cache = make_cache()
    scheduler = scheduler_of(cache)
    scheduler.add(SYSTEM, 1)
    scheduler.add(SYSTEM, 1, find=False)
    assert plans(scheduler, cache) == [{0: 32, 1: 32}]
    cache.reset()
    scheduler.add(SYSTEM, 1, find=False)
    scheduler.add([*SYSTEM, 7], 1)
    assert plans(scheduler, cache) == [{2: 32}, {3: 1}]
    scheduler.add(SYSTEM, 1, find=False)
    assert plans(scheduler, cache) == [{4: 32}]
    cache.check()


def test_priorities_starve_nobody():
    """In each step an urgent request is added, and each takes three steps: most never start."""
    cache = make_cache(8)
    scheduler = scheduler_of(cache, aging=8, max_num_seqs=1)
    patient = scheduler.add([1, 2], 3, priority=2)
    ended = []
    while patient not in ended:
        assert len(ended) < 2 * 8 + 1
        scheduler.add([3, 4], 3, priority=0)
        step = scheduler.schedule()
        ended += [request for request, *_ in scheduler.update(step, forward(cache, step).astype(int))]
    assert len(ended) == 2 * 8 + 1
    assert scheduler.num_waiting > 20


def test_a_lower_priority_starts_first():
    cache = make_cache()
    scheduler = scheduler_of(cache, max_num_seqs=1)
    numbers = [scheduler.add([1], 1, priority=priority) for priority in (1, 0, -1, 0)]
    started = [next(iter(plan)) for plan in plans(scheduler, cache)]
    assert started == [numbers[i] for i in (2, 1, 3, 0)]


def test_the_watermark_is_for_those_that_run():
    cache = make_cache(10)
    scheduler = scheduler_of(cache, watermark=0.25)
    scheduler.add(range(36), 2)  # 9 of 10 blocks: alone it need not leave any
    scheduler.add([40], 2)
    assert [*map(len, plans(scheduler, cache))] == [1, 1, 1, 1]
    scheduler.add([1] * 8, 2)
    scheduler.add(range(10, 30), 2)  # 2 and 5 blocks, and 3 stay free
    scheduler.add([40], 2)
    assert [*plans(scheduler, cache)[0].values()] == [8, 20]


def test_the_same_calls_give_the_same_steps():
    def run():
        cache = make_cache(12)
        scheduler = scheduler_of(cache, max_num_batched_tokens=16)
        for i in range(8):
            scheduler.add([*range(i, i + 3 + 2 * i)], 4 + i, priority=i % 3)
        seen = []
        serve(
            scheduler,
            cache,
            lambda step: seen.append((counts(step), step.slots.tolist(), step.batch.seq_lens.tolist())),
        )
        assert scheduler.num_preempted > 0
        return seen

    assert run() == run()


def test_the_first_request_is_never_preempted_and_no_other_one_is_lost():
    cache = make_cache(12)
    scheduler = scheduler_of(cache)
    first, *others = [scheduler.add([*range(10 * i, 10 * i + 9)], 20) for i in range(3)]
    steps = []
    texts = serve(scheduler, cache, lambda step: steps.append(step.requests.tolist()))
    assert scheduler.num_preempted > 0
    runs = [first in step for step in steps]
    assert runs == sorted(runs, reverse=True)  # in each step from the beginning on, until it ends
    assert texts == {n: alone((*range(10 * i, 10 * i + 9),), 20) for i, n in enumerate([first, *others])}


def test_a_preempted_request_does_not_count_its_own_hits_as_cached():
    cache = make_cache(12)
    scheduler = scheduler_of(cache)
    numbers = [scheduler.add([*range(10 * i, 10 * i + 9)], 20) for i in range(3)]
    assert [scheduler.num_cached(number) for number in numbers] == [0] * 3  # they wait
    seen = set()
    serve(scheduler, cache, lambda step: seen.update(map(scheduler.num_cached, step.requests.tolist())))
    assert scheduler.num_preempted > 0
    assert seen == {0}
    scheduler.add(range(9), 1)
    serve(scheduler, cache)
    again = scheduler.add([*range(8), 40], 1)
    scheduler.schedule()
    assert scheduler.num_cached(again) == 8
    with pytest.raises(KeyError):
        scheduler.num_cached(numbers[0])


def test_a_second_turn_finds_the_first():
    cache = make_cache()
    scheduler = scheduler_of(cache)
    number = scheduler.add(SYSTEM, 5, resumable=True)
    first = serve(scheduler, cache)[number]
    with pytest.raises(ValueError, match="a request can have 256 tokens in this cache, got 39 and max_tokens=300"):
        scheduler.extend(number, [1, 2], 300)
    scheduler.extend(number, [1, 2], 4)
    with pytest.raises(ValueError, match="in the middle of a turn"):
        scheduler.extend(number, [], 4)
    seen = []
    assert serve(scheduler, cache, lambda step: seen.append(counts(step)))[number] == alone((*SYSTEM, *first, 1, 2), 4)
    assert seen[0] == {number: 3}  # the first turn's last token, and two new ones
    assert scheduler.num_cached(number) == len(SYSTEM) + 4
    assert scheduler.abort(number)
    with pytest.raises(KeyError, match="no request 0: it has ended or was never added"):
        scheduler.extend(number, [], 1)


def test_abort_of_a_request_that_has_ended_changes_nothing():
    """A client may leave in the step that ends its text."""
    cache = make_cache()
    scheduler = scheduler_of(cache)
    number, other = scheduler.add([1], 1), scheduler.add([2], 3)
    scheduler.update(step := scheduler.schedule(), forward(cache, step).astype(int))
    assert not scheduler.abort(number)
    assert not scheduler.abort(np.int64(number))
    for never in (other + 1, -1):
        with pytest.raises(KeyError, match=f"no request {never}: it has ended or was never added"):
            scheduler.abort(never)
    with pytest.raises(TypeError, match="request must be an int"):
        scheduler.abort("0")
    assert [*serve(scheduler, cache)] == [other]


def test_a_request_that_can_never_fit_is_refused_by_add():
    scheduler = scheduler_of(make_cache(4))
    assert scheduler.max_request_len == 16
    scheduler.add(range(16), 1)  # the token that it generates is not computed
    with pytest.raises(ValueError, match="a request can have 16 tokens in this cache, got 16 and max_tokens=2: lower"):
        scheduler.add(range(16), 2)
    scheduler = scheduler_of(make_cache(400, max_seq_len=32))
    assert scheduler.max_request_len == 32
    with pytest.raises(ValueError, match="a request can have 32 tokens"):
        scheduler.add(range(33), 1)
    assert scheduler.num_waiting == 0


def test_what_fits_later_waits():
    cache = make_cache(4)
    scheduler = scheduler_of(cache)
    seq, _ = cache.add(4)
    number = scheduler.add(range(16), 1)
    with pytest.raises(
        OutOfBlocksError,
        match="request 0 cannot start, and none runs that could end: 4 blocks asked for, 3 of 4 are free",
    ) as error:
        scheduler.schedule()
    assert (error.value.requested, error.value.free) == (4, 3)
    cache.free(seq)
    assert serve(scheduler, cache) == {number: alone(tuple(range(16)), 1)}


def test_an_aborted_request_leaves_the_current_step():
    cache = make_cache()
    scheduler = scheduler_of(cache)
    first, second, third = (scheduler.add([i, i], 3) for i in range(3))
    step = scheduler.schedule()
    scheduler.abort(second)
    assert scheduler.num_running == 2
    scheduler.update(step, forward(cache, step).astype(int))
    assert cache.stats().used == 2
    assert serve(scheduler, cache) == {first: alone((0, 0), 3), third: alone((2, 2), 3)}


@pytest.mark.parametrize("fails", [False, True])
def test_blocks_that_a_step_still_writes_are_not_handed_out(fails):
    cache = make_cache(8)
    scheduler = scheduler_of(cache)
    number = scheduler.add(SYSTEM[:8], 3)
    step = scheduler.schedule()
    scheduler.abort(number)
    other, _ = cache.add(8)
    assert not {*cache.slots(other, 0, 8).tolist()} & {*step.slots.tolist()}
    assert cache.stats().used == 4
    if fails:
        scheduler.drop()
    else:
        assert scheduler.update(step, forward(cache, step).astype(int)) == []
    assert (scheduler.schedule(), cache.stats().used) == (None, 2)


def test_a_step_that_failed_is_planned_again():
    cache = make_cache(12)
    scheduler = scheduler_of(cache, max_num_batched_tokens=8)
    prompts = [SYSTEM[:9], SYSTEM[:7], SYSTEM[:20]]
    for prompt in prompts:
        scheduler.add(prompt, 6)
    texts, failed = {}, 0
    while step := scheduler.schedule():
        scheduler.drop()
        scheduler.drop()  # nothing is left to drop
        again = scheduler.schedule()
        assert counts(again) == counts(step)
        assert again.tokens.tolist() == step.tokens.tolist()
        for finished in scheduler.update(again, forward(cache, again).astype(int)):
            texts[finished.request] = finished.tokens.tolist()
        failed += 1
    assert texts == {i: alone(tuple(prompt), 6) for i, prompt in enumerate(prompts)}
    assert failed > 6


def test_a_schedule_that_fails_has_changed_nothing(monkeypatch):
    cache = make_cache()
    scheduler = scheduler_of(cache)
    number = scheduler.add(SYSTEM, 2)
    batch = cache.batch
    monkeypatch.setattr(cache, "batch", lambda *args: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        scheduler.schedule()
    monkeypatch.setattr(cache, "batch", batch)
    cache.check()
    assert serve(scheduler, cache) == {number: alone(tuple(SYSTEM), 2)}


def test_a_schedule_whose_listener_fails_can_be_made_again():
    """Of one request the start evicts a block for the copy of another, of the other an append evicts some."""
    failing = []

    def listener(event):
        if failing:
            raise failing.pop()

    for prompt in (SYSTEM[:28], [40 + i % 5 for i in range(15)]):
        cache = make_cache(8, events=listener)
        scheduler = scheduler_of(cache)
        for before in (SYSTEM[:28], [49] * 4):
            scheduler.add(before, 1)
            serve(scheduler, cache)
        if prompt == SYSTEM[:28]:
            cache.pin("its blocks", prompt)
        number = scheduler.add(prompt, 3)
        failing.append(ZeroDivisionError())
        with pytest.raises(ZeroDivisionError):
            scheduler.schedule()
        if prompt == SYSTEM[:28]:
            cache.unpin("its blocks")
        assert serve(scheduler, cache) == {number: alone(tuple(prompt), 3)}
        assert cache.num_seqs == 0


def test_a_step_whose_listener_always_raises_can_be_dropped():
    failing = []
    cache = make_cache(events=lambda event: failing and 1 / 0)
    scheduler = scheduler_of(cache)
    prompts = [[number, *SYSTEM[1:9]] for number in (1, 2)]
    numbers = [scheduler.add(prompt, 2) for prompt in prompts]
    step = scheduler.schedule()
    failing.append(True)
    with pytest.raises(ZeroDivisionError):
        scheduler.update(step, forward(cache, step).astype(int))
    scheduler.drop()
    failing.clear()
    texts = [alone(tuple(prompt), 2) for prompt in prompts]
    assert serve(scheduler, cache) == dict(zip(numbers, texts, strict=True))


def test_schedule_while_another_thread_takes_blocks(monkeypatch):
    cache = make_cache(8)
    scheduler = scheduler_of(cache)
    number = scheduler.add(SYSTEM[:12], 2)
    append, taken = cache.append, []

    def late(*args):
        taken.append(cache.pool.allocate(cache.num_free - 1))
        return append(*args)

    with monkeypatch.context() as patch:
        patch.setattr(cache, "append", late)
        with pytest.raises(OutOfBlocksError, match="3 blocks asked for, 1 of 8 are free"):
            scheduler.schedule()
    cache.pool.release(taken[0])
    assert serve(scheduler, cache) == {number: alone(tuple(SYSTEM[:12]), 2)}


def test_no_memory_for_tokens_starts_no_sequence(monkeypatch):
    cache = make_cache()
    scheduler = scheduler_of(cache)
    number = scheduler.add(SYSTEM, 2)
    with monkeypatch.context() as patch:
        patch.setattr("pagedkv.scheduling.running.np.zeros", lambda *args: [][0])
        with pytest.raises(IndexError):
            scheduler.schedule()
    assert cache.num_seqs == 0
    assert serve(scheduler, cache) == {number: alone(tuple(SYSTEM), 2)}


def test_a_failed_copy_leaves_no_findable_block_with_wrong_contents(monkeypatch):
    """The copy of a whole prompt's last block goes to the only free one, which can be found, too."""
    cache = make_cache(3)
    scheduler = scheduler_of(cache)
    for prompt in (SYSTEM[:8], [40] * 4):
        scheduler.add(prompt, 1)
        serve(scheduler, cache)
    cache.pin("a", SYSTEM[:8])
    scheduler.add(SYSTEM[:8], 1)
    monkeypatch.setattr(cache._layer_caches, "copy", lambda copies: [][0])
    with pytest.raises(IndexError):
        scheduler.schedule()
    assert cache.find([40] * 4) == 0


@pytest.mark.parametrize("method", ["commit", "free"])
def test_an_update_that_fails_can_be_made_again(monkeypatch, method):
    """As a cache does while another thread changes it."""
    cache = make_cache()
    scheduler = scheduler_of(cache)
    number = scheduler.add(SYSTEM, 1)
    step = scheduler.schedule()
    tokens = forward(cache, step).astype(int)
    with monkeypatch.context() as patch:
        patch.setattr(cache, method, lambda seqs: [][0])
        with pytest.raises(IndexError):
            scheduler.update(step, tokens)
    assert scheduler.tokens(number).tolist() == SYSTEM
    [(finished, text, reason)] = scheduler.update(step, tokens)
    assert (finished, text.tolist(), reason) == (number, alone(tuple(SYSTEM), 1), "length")
    assert (scheduler.schedule(), cache.stats().used) == (None, 0)


def test_an_update_that_is_refused_has_changed_nothing():
    cache = make_cache()
    scheduler = scheduler_of(cache)
    number = scheduler.add(SYSTEM, 2)
    with pytest.raises(ValueError, match="step must be the last one"):
        scheduler.update(None, [])
    step = scheduler.schedule()
    for tokens, error, message in (
        ([1, 2], ValueError, r"tokens must have shape \(num_sampled,\) = \(1,\), got \(2,\)"),
        ([-1], ValueError, "tokens must be ids"),
        ([1.5], TypeError, "an integer dtype"),
    ):
        with pytest.raises(error, match=message):
            scheduler.update(step, tokens)
    scheduler.update(step, forward(cache, step).astype(int))
    with pytest.raises(ValueError, match="step must be the last one"):
        scheduler.update(step, [1])
    assert serve(scheduler, cache)[number] == alone(tuple(SYSTEM), 2)


def test_the_end_token_ends_a_text():
    text = alone((1, 2, 3), 8)
    cache = make_cache()
    scheduler = scheduler_of(cache, eos_token_id=text[3])
    scheduler.add([1, 2, 3], 8)
    scheduler.add([1, 2, 3], 2)
    reasons = {}
    while step := scheduler.schedule():
        for finished in scheduler.update(step, forward(cache, step).astype(int)):
            reasons[finished.request] = finished.tokens.tolist(), finished.reason
    end = text.index(text[3]) + 1
    assert reasons == {0: (text[:end], "stop"), 1: (text[:2], "length")}


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"max_num_batched_tokens": 0}, ValueError, "max_num_batched_tokens must be at least 1"),
        ({"max_num_batched_tokens": 8, "max_num_seqs": 9}, ValueError, "max_num_seqs must be at most"),
        ({"max_num_seqs": 257}, ValueError, "and the cache's max_seqs = 256, got 257"),
        ({"watermark": 1.5}, ValueError, "watermark must be from 0 to 1"),
        ({"aging": -1}, ValueError, "aging must be at least 0"),
        ({"aging": 2**31}, ValueError, "aging must be at most 2147483647"),
        ({"eos_token_id": "x"}, TypeError, "eos_token_id must be an int"),
    ],
)
def test_options_are_checked(options, error, message):
    with pytest.raises(error, match=message):
        scheduler_of(make_cache(), **options)


def test_arguments_are_checked():
    with pytest.raises(TypeError, match="cache must be a PagedKVCache, got BlockPool"):
        pagedkv.Scheduler(pagedkv.BlockPool(4))
    scheduler = scheduler_of(make_cache())
    for args, options, error, message in (
        (([], 1), {}, ValueError, "at least one token"),
        (([1], 0), {}, ValueError, "max_tokens must be at least 1"),
        (([1], 1), {"priority": 1.0}, TypeError, "priority must be an int"),
        (([1], 1), {"salt": 1}, TypeError, "salt must be"),
        (([-1], 1), {}, ValueError, "tokens must be ids"),
    ):
        with pytest.raises(error, match=message):
            scheduler.add(*args, **options)
    assert scheduler.num_waiting == 0
    assert scheduler.add([1], 1) == 0
    assert repr(scheduler).startswith("Scheduler(0 requests run, 1 wait, of PagedKVCache(1 layers")


def test_restart_computes_requests_again_with_other_tokens():
    """Whatever a call was in the middle of: here a step, of which a request was aborted, and a start."""
    cache = make_cache(64)
    others = cache.add(9).seq
    scheduler, num_free = scheduler_of(cache, max_num_batched_tokens=6), cache.num_free
    first, second, aborted, forgotten = (scheduler.add([i, *range(1, 9)], 5) for i in range(4))
    for _ in range(3):
        scheduler.update(step := scheduler.schedule(), forward(cache, step).astype(np.int64))
    scheduler.schedule()
    scheduler.abort(aborted)
    cache.add_found([7] * 8, last=scheduler._admission._last)
    tokens = [*alone((1, *range(1, 9)), 5)[:3]]
    scheduler.restart({first: [0, *range(1, 9)], second: [1, *range(1, 9), *tokens]})
    assert (cache.num_free, cache.num_seqs) == (num_free, 1)
    assert (scheduler.num_running, scheduler.num_waiting) == (0, 2)
    assert not scheduler.abort(forgotten)
    assert serve(scheduler, cache) == {i: alone((i, *range(1, 9)), 5) for i in (first, second)}
    assert cache.seq_lens([others]) == [9]


def test_hits_of_preempted_requests_are_counted_separately():
    """Prompts with nothing in common, computed in chunks; and one of them again, of which a block is shared."""
    cache = make_cache(10)
    scheduler = scheduler_of(cache, max_num_batched_tokens=6)
    for number in range(4):
        scheduler.add([number, *SYSTEM[:7]], 16)
    serve(scheduler, cache)
    stats = cache.stats()
    assert scheduler.num_preempted > 0
    assert (stats.queried_tokens, stats.hit_tokens) == (32, 0)
    assert stats.preempted_tokens > stats.preempted_hit_tokens > 0
    number = scheduler.add([3, *SYSTEM[:7]], 1, resumable=True)
    serve(scheduler, cache)
    scheduler.extend(number, [], 1)
    serve(scheduler, cache)
    after = cache.stats()
    assert (after.queried_tokens, after.hit_tokens) == (32 + 8 + 9, 7 + 8)
    assert (after.preempted_tokens, after.preempted_hit_tokens) == (stats.preempted_tokens, stats.preempted_hit_tokens)

"""Which snapshots of states stay, and what prompts find of them: cases by hand, in blocks of 4 tokens.

The state of a sequence is the list of all its tokens, and the next token that is chosen depends on nothing else.
"""

from itertools import chain, pairwise

import numpy as np
import pytest

import pagedkv
from pagedkv.errors import CapacityError

from ..memory.texts import P, Texts, advanced, make_cache, slots_held, snapshots, texts_of


class Server:
    """A scheduler, and a model whose states are texts; `given` are the tokens that it chooses, by request."""

    def __init__(self, num_states=100, num_blocks=200, prefix_cache=True, max_seqs=100, **options):
        self.cache = make_cache(num_states, num_blocks=num_blocks, prefix_cache=prefix_cache, max_seqs=max_seqs)
        self.scheduler = pagedkv.Scheduler(self.cache, **options)
        self.given, self.ends, self.num_computed, self.num_steps, self.hits = {}, {}, 0, 0, {}

    def add(self, tokens, new=(0,), **options):
        """Add a request which generates these tokens."""
        number = self.scheduler.add(tokens, len(new), **options)
        self.given[number] = [*tokens, *new]
        return number

    def forward(self, step):
        """Compute a step: states are those of the texts, and become those behind the step's tokens."""
        starts = step.batch.query_starts.tolist()
        new = [step.tokens[a:b].tolist() for a, b in pairwise(starts)]
        states = self.cache.read_states(step.seqs)
        before = self.cache.seq_lens(step.seqs) - np.diff(starts)
        for number, text, n in zip(step.requests.tolist(), texts_of(states), before.tolist(), strict=True):
            assert text == self.scheduler.tokens(number)[:n].tolist()
        self.cache.write_states(step.seqs, advanced(states, new))
        return [self.given[number][len(self.scheduler.tokens(number))] for number in step.sampled.tolist()]

    def step(self):
        """Plan, compute and finish a step; None if there is none."""
        step = self.scheduler.schedule()
        if step is None:
            return None
        tokens = self.forward(step)
        for number in step.requests.tolist():
            self.hits[number] = self.scheduler.num_cached(number)
        lens = dict(zip(step.requests.tolist(), step.batch.seq_lens.tolist(), strict=True))
        for number, end in lens.items():
            self.ends.setdefault(number, []).append(end)
        self.num_computed, self.num_steps = self.num_computed + len(step.tokens), self.num_steps + 1
        finished = self.scheduler.update(step, tokens)
        self.cache.check()
        return finished

    def run(self):
        """Serve all requests to their ends."""
        while self.step() is not None:
            pass
        return self

    def serve(self, tokens, new=(0,), **options):
        """Serve one request: how many of its tokens were found, and where its chunks ended."""
        number = self.add(tokens, new, **options)
        self.run()
        return self.hits[number], self.ends[number][: len(self.ends[number]) - len(new) + 1]


def text(*parts):
    """Tokens: of a number the first so many, of a pair those from one to the other."""
    return list(chain.from_iterable(range(1, part + 1) if isinstance(part, int) else range(*part) for part in parts))


# -- where chunks end, and which snapshots stay
# A request that has ended leaves the snapshot at its last full block, too, as a text may go on there (case 10).
@pytest.mark.parametrize(
    ("options", "num_tokens", "ends", "stay"),
    [
        ({}, 10, [8, 10], [8]),  # case 1
        ({}, 8, [4, 8], [4, 8]),  # 2: the state stands at 8, too, and a longer prompt may go on there
        ({}, 4, [4], [4]),  # 3
        ({}, 3, [3], []),
        ({}, 1, [1], []),
        ({}, 13, [12, 13], [12]),  # 4
        ({"max_num_batched_tokens": 5, "max_num_seqs": 1}, 18, [5, 10, 15, 16, 18], [16]),  # 5
        ({"snapshot_every": 8}, 30, [8, 16, 24, 28, 30], [8, 16, 24, 28]),  # 6
        ({"snapshot_every": 9}, 22, [8, 16, 20, 22], [8, 16, 20]),
        ({"max_num_batched_tokens": 4, "max_num_seqs": 1}, 18, [4, 8, 12, 16, 18], [16]),  # others make way
        ({"prefix_cache": False}, 18, [18], []),
    ],
)
def test_chunks_end_where_a_snapshot_stays(options, num_tokens, ends, stay):
    server = Server(**options)
    assert server.serve(text(num_tokens)) == (0, ends)
    assert snapshots(server.cache) == stay


def test_a_prompt_of_full_blocks_is_found_but_for_the_last():
    """Case 2: a state behind all tokens but the last is nowhere, so that the last block is computed again."""
    server = Server()
    server.serve(text(8))
    assert server.serve(text(8)) == (4, [8])
    assert server.serve(text(9)) == (8, [9])


@pytest.mark.parametrize(("common", "branch"), [(16, 16), (14, 12)])  # cases 7 and 8
def test_a_snapshot_stays_where_prompts_part(common, branch):
    server = Server()
    assert server.serve(text(22))[0] == 0
    assert server.serve(text(common, (90, 99))) == (0, [branch, (common + 8) // P * P, common + 9])
    assert server.serve(text(common, (50, 59)))[0] == branch
    assert snapshots(server.cache) == sorted([branch, 20, *[(common + 8) // P * P] * 2])
    assert server.cache.stats().tokens_without_state == branch


def test_snapshots_where_the_caller_wants_them():
    server = Server()
    assert server.serve(text(22), snapshot_at=[9, 14, 3]) == (0, [8, 12, 20, 22])
    assert server.serve(text(12, (60, 70)))[0] == 12
    assert server.serve(text(30), snapshot_at=[20]) == (20, [28, 30])
    for wrong in ([31], [-1]):
        with pytest.raises(ValueError, match=r"^snapshot_at must be lengths from 0 to num_tokens = 30, got \["):
            server.add(text(30), snapshot_at=wrong)


# -- turns of a chat
def test_the_next_turn_finds_all_but_a_part_of_a_block():
    """Case 9. The last token that is chosen, 16, was never computed."""
    server = Server()
    server.serve(text(10), text((11, 17)))
    before = server.num_computed
    assert server.serve(text(15, (70, 76))) == (12, [20, 21])
    assert server.num_computed - before == 9
    assert snapshots(server.cache) == [8, 12, 20]


def test_a_long_answer_is_found_too():
    """Cases 10 and 11: one snapshot moves along with the text."""
    server = Server()
    number = server.add(text(10), text((11, 33)))
    while len(server.scheduler.tokens(number)) < 31:
        server.step()
    assert snapshots(server.cache) == [8, 28]
    assert slots_held(server.cache) == 3
    server.run()
    assert server.serve(text(31, (70, 71)))[0] == 28


def test_a_long_answer_pushes_out_nobody():
    """Its snapshots take the place of each other."""
    server = Server(num_states=4)
    server.serve(text((60, 70)))
    server.serve(text(10), text((11, 45)))
    assert server.cache.find(text((60, 70))) == 8


def test_three_turns_compute_what_is_new_and_at_most_a_block_more():
    server, tokens, before = Server(), text(18), 0
    for turn in range(3):
        answer, question = [*range(50, 57 + turn)], [*range(70, 73)]
        num_computed, number = server.num_computed, server.add(tokens, answer)
        server.run()
        new = len(tokens) - before  # the last token of the answer before among them
        assert server.num_computed - num_computed - (len(answer) - 1) in range(new, new + P)
        assert server.hits[number] == len(tokens) - (server.num_computed - num_computed - len(answer) + 1)
        before = len(tokens) + len(answer) - 1
        tokens = [*tokens, *answer, *question]


def test_what_earlier_turns_left_gives_way_first():
    """Four chats that take turns need two slots each, though every turn leaves two snapshots."""
    server, chats = Server(num_states=8), [text((100 * i, 100 * i + 6)) for i in range(1, 5)]
    for turn in range(4):
        for chat in chats:
            hit, _ = server.serve(chat, range(50, 55))
            assert hit == (turn > 0) * ((len(chat) - 3 - 1) // P * P)
            chat += [*range(50, 55), 70, 71, 72]


def test_a_template_that_drops_what_was_thought():
    """Case 12: the next prompt parts from the text inside the prompt before it, behind a snapshot or before all."""
    server = Server()
    server.serve(text(11), text((12, 22)))
    assert server.cache.find([*text(9), 99, *range(12, 20)]) == 8
    assert server.cache.find([*text(7), 98, *range(60, 70)]) == 0
    server = Server()
    server.serve(text(23), text((24, 40)), snapshot_at=[18])
    assert server.cache.find([*text(18), 99, 98]) == 16


# -- requests that come at once
@pytest.mark.parametrize(
    ("common", "own", "size", "hits", "computed", "num_steps"),
    [
        (52, 10, 8, [0, 0, *[52] * 6], 184, 4),  # case 13
        (0, 22, 3, [0, 20, 20], 26, 2),  # 15: the same text, which has no part of its own
    ],
)
def test_requests_wait_for_a_snapshot(common, own, size, hits, computed, num_steps):
    server = Server()
    for i in range(size):
        server.add(text(common, (100 * (i + 1), 100 * (i + 1) + own)) if common else text(own))
    server.run()
    assert [server.hits[i] for i in range(size)] == hits
    assert (server.num_computed, server.num_steps) == (computed, num_steps)


def test_without_waiting_each_would_compute_all():
    """Case 14: sequences that a caller starts at once find nothing of each other."""
    texts = Texts(make_cache())
    prompts = [text(52, (100 * i, 100 * i + 10)) for i in range(1, 9)]
    seqs = [texts.start(prompt) for prompt in prompts]
    texts.compute(*((seq, prompt) for (seq, _), prompt in zip(seqs, prompts, strict=True)))
    assert [hit for _, hit in seqs] == [0] * 8
    assert texts.num_computed == 496


def test_prompts_behind_a_common_beginning_find_it(monkeypatch):
    """Eight prompts of 600 tokens behind a common 512, in blocks of 16."""
    monkeypatch.setattr("tests.memory.texts.P", 16)
    monkeypatch.setattr("tests.memory.texts.ROOM", 640)
    server = Server(num_states=1200)
    for i in range(1, 9):
        server.add([*range(1, 513), *range(1000 * i, 1000 * i + 88)])
    server.run()
    assert [server.hits[i] for i in range(8)] == [0, 0, *[512] * 6]
    assert server.num_computed == 1728


# -- eviction
def test_without_its_block_a_snapshot_is_gone():
    """Case 16: so are those behind the block."""
    server = Server()
    server.serve(text(22))
    server.serve(text(16, (90, 99)))
    cache = server.cache
    block = cache.pool._prefix_cache.find(np.array(text(16), np.int32), bytes(16))[3:]
    cache.pool._commit(cache.pool._plan(forgotten=block)[1])
    cache.check()
    assert (cache.find(text(22)), cache.find_blocks(text(22)), snapshots(cache)) == (0, 12, [])


def test_without_its_snapshot_a_block_stays():
    """Case 17: what is computed again leaves the snapshot again."""
    server = Server(num_states=2)
    server.serve(text(22))
    server.serve(text((30, 52)))
    cache = server.cache
    assert snapshots(cache) == [20]
    assert (cache.find(text(22)), cache.find_blocks(text(22))) == (0, 20)
    assert server.serve(text(22)) == (0, [20, 22])
    assert server.serve(text(22)) == (20, [22])


def test_salts():
    """Case 18."""
    server = Server()
    server.serve(text(22), salt="a")
    assert [server.cache.find(text(22), salt) for salt in ("a", "b", None)] == [20, 0, 0]


def test_the_oldest_snapshot_gives_way():
    """Case 24: three slots keep the snapshots of the last two of five prompts."""
    server = Server(num_states=3)
    prompts = [text((100 * i + 1, 100 * i + 11)) for i in range(5)]
    for prompt in prompts:
        server.serve(prompt)
    assert [server.cache.find(prompt) for prompt in prompts] == [0, 0, 0, 8, 8]


def test_running_sequences_take_all_slots():
    """Case 25: three slots, three sequences that run, and no room for a fourth."""
    texts = Texts(make_cache(3))
    for i in range(3):
        texts.prompt(text((100 * i + 1, 100 * i + 11)))
    assert snapshots(texts.cache) == []
    with pytest.raises(CapacityError, match=r"0 of 3 rows are free: max_seqs and state_memory set the limit$"):
        texts.start(text(10))
    texts.check()


def test_a_snapshot_that_was_found_stays_longer():
    """Case 26; and not for ever, or else snapshots that nobody needs any more would keep out all others."""
    server = Server(num_states=4)
    server.serve(text(22))
    server.serve(text(16, (90, 99)))
    assert server.serve(text(16, (50, 59)))[0] == 16
    for i in range(3, 7):
        server.serve(text((100 * i, 100 * i + 10)))
    assert server.cache.find(text(16, (60, 69))) == 16
    for i in range(7, 30):
        server.serve(text((100 * i, 100 * i + 10)))
    assert server.cache.find(text(16, (60, 69))) == 0


# -- forks, going back, starting again
def test_forks_have_states_of_their_own():
    """Case 19. The fork shares its slot until it goes on, and room for the copy is there."""
    texts = Texts(make_cache(3))
    seq, _ = texts.prompt(text(10))
    other = texts.fork(seq)
    assert slots_held(texts.cache) == 2
    texts.decode(seq, [77])
    texts.decode(other, [88])
    assert slots_held(texts.cache) == 3
    texts.check()


def test_going_back():
    """Case 20: a snapshot that moves along has left 16."""
    texts = Texts(make_cache())
    seq, _ = texts.prompt(text(10))
    texts.decode(seq, range(11, 20))
    assert texts.cache.lens_with_state(seq).tolist() == [0, 8, 16, 19]
    with pytest.raises(ValueError, match=f"sequence {seq} has a state, got 17: it has one for 16 and 19$"):
        texts.truncate(seq, 17)
    texts.truncate(seq, 16)
    texts.decode(seq, [77])
    assert texts_of(texts.cache.read_states(seq))[0][-2:] == [16, 77]


def test_a_preempted_request_goes_on_from_its_last_snapshot():
    """Case 21: 3 of 19 tokens are computed again."""
    server = Server()
    number = server.add(text(10), text((11, 40)))
    while len(server.scheduler.tokens(number)) < 20:
        server.step()
    server.scheduler._admission._preempt(server.scheduler._requests[number])
    step = server.scheduler.schedule()
    assert step.batch.seq_lens.tolist() == [20]
    assert len(step.tokens) == 4  # and the one that was chosen last
    server.scheduler.drop()
    server.run()


@pytest.mark.parametrize("written", [False, True])
def test_a_failed_step_is_run_again(written):
    """Case 22: before the states are written the sequence has its old one, behind it, goes back to the snapshot."""
    server = Server()
    number = server.add(text(10), text((11, 20)))
    server.step()
    for expected, tokens in (([8], 2), ([8], 2)):
        step = server.scheduler.schedule()
        assert len(step.tokens) == tokens
        if written:
            server.forward(step)
        server.scheduler.drop()
        server.cache.check()
        assert server.cache.state_lens(step.seqs).tolist() == server.cache.seq_lens(step.seqs).tolist() == expected
    for _ in range(4):
        server.step()
    step = server.scheduler.schedule()
    if written:
        server.forward(step)
    server.scheduler.drop()
    assert server.cache.state_lens(step.seqs).tolist() == [12 if written else 13]
    server.run()
    assert server.ends[number][-1] == 18


def test_an_update_that_fails_behind_its_commit_can_be_repeated_or_dropped():
    server = Server()
    server.add(text(13), text((14, 30)))
    for give_up in (False, True):
        step = server.scheduler.schedule()
        tokens = server.forward(step)
        commit = server.cache.commit

        def fails(*args, commit=commit, **options):
            commit(*args, **options)
            raise RuntimeError("behind the commit")

        server.cache.commit = fails
        with pytest.raises(RuntimeError, match="behind the commit"):
            server.scheduler.update(step, tokens)
        del server.cache.commit
        if give_up:
            server.scheduler.drop()
        else:
            server.scheduler.update(step, tokens)
    assert snapshots(server.cache) == [12]
    server.run()


def test_an_aborted_prompt_leaves_the_blocks_that_it_has_computed():
    """Case 23: no snapshot, since it has reached no stop."""
    server = Server(max_num_batched_tokens=10, max_num_seqs=1)
    number = server.add(text(30))
    server.step()
    server.scheduler.abort(number)
    assert (server.cache.find_blocks(text(30)), server.cache.find(text(30)), snapshots(server.cache)) == (8, 0, [])


def test_many_requests_run_in_few_slots():
    server = Server(num_states=8, num_blocks=24, max_num_batched_tokens=32)
    assert server.cache.max_seqs == 8
    for i in range(24):
        server.add(text(8 + i % 3, (100 * i, 100 * i + 5 + i % 4)), range(500, 500 + 10 + i % 5))
    most = 0
    while server.step() is not None:
        most = max(most, server.cache.stats().used_states)
    stats = server.cache.stats()
    assert most == 8
    assert server.scheduler.num_preempted > 0
    assert stats.preempted_tokens >= 8 * server.scheduler.num_preempted, "each starts again with its prompt at least"
    assert (stats.used, stats.used_states, stats.num_states) == (0, 0, 8)


def test_more_requests_than_slots_are_refused():
    with pytest.raises(ValueError, match=r"the cache's max_seqs = 3, which state_memory may limit, got 4$"):
        Server(num_states=3, max_num_seqs=4)

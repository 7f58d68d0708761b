"""A Ctrl-C in the middle of a call leaves each sequence with a state of its own tokens, or with one that is lost."""

from contextlib import suppress
from unittest import mock

import numpy as np
import pytest

import pagedkv.cache
from pagedkv.memory import BlockPool

from ...support.interrupts import interrupts_at_every_instant
from ..manager import state
from ..texts import Texts, advanced, make_cache, snapshot_texts, texts_of


class Scene:
    """A fork that shares a state, a sequence at a snapshot, and one whose state is written in place; all slots held."""

    def __init__(self):
        self.texts = Texts(make_cache(6, num_blocks=40, max_seqs=6))
        self.cache = cache = self.texts.cache
        self.seq, _ = self.texts.prompt(range(1, 11))
        self.fork = self.texts.fork(self.seq)
        self.other, _ = self.texts.prompt(range(50, 58), 4)
        self.seqs, self.new = [self.seq, self.fork, self.other], [[11, 12, 13], [14], [58]]
        self.states = cache.read_states(self.seqs)
        cache.append(self.seqs, [*map(len, self.new)], [token for tokens in self.new for token in tokens])

    def bookkeeping(self):
        """All that the cache knows but the states themselves, of which some may be half written."""
        return {name: content for name, content in state(self.cache).items() if name != "states"}

    def is_sound(self):
        """The states are those of the tokens that they stand for."""
        cache = self.cache
        cache.check()
        live = cache._rows.handles.of(np.flatnonzero(cache._rows.handles.live))
        for seq, stands_for in zip(live.tolist(), cache.state_lens(live).tolist(), strict=True):
            length = int(cache.seq_lens(seq)[0])
            tokens = cache.pool._prefix_cache.tokens[cache.slots(seq, 0, length)].tolist()
            if stands_for >= 0:
                assert texts_of(cache.read_states(seq)) == [tokens[:stands_for]]
        assert all(text == tokens for text, tokens in snapshot_texts(cache))


def written(scene):
    scene.cache.write_states(scene.seqs, advanced(scene.states, scene.new))


def committed(scene):
    written(scene)
    scene.cache.commit(scene.seqs)


MUTATIONS = {
    "write_states": written,
    "commit": committed,
    "add_found": lambda s: s.cache.add_found(range(1, 20)),
    "fork": lambda s: s.cache.fork(s.other, 2),
    "reorder": lambda s: s.cache.reorder(s.seqs, [2, 2, 0]),
    "truncate": lambda s: s.cache.truncate([s.seq, s.other], [8, 4]),
    "free": lambda s: s.cache.free([s.other, s.seq]),
    "pin": lambda s: s.cache.pin("first", range(1, 9)),
    "reset": lambda s: s.cache.reset(),
}


def steps_of(mutate):
    """The bookkeeping before a call, and after each of its steps."""
    scene, commit, store = Scene(), BlockPool._commit, pagedkv.cache.store
    steps = [scene.bookkeeping()]

    def recorded(function):
        def call(*args, **options):
            function(*args, **options)
            steps.append(scene.bookkeeping())

        return call

    with mock.patch.object(BlockPool, "_commit", recorded(commit)), mock.patch("pagedkv.cache.store", recorded(store)):
        mutate(scene)
    scene.is_sound()
    return steps


@pytest.mark.parametrize("mutate", MUTATIONS.values(), ids=MUTATIONS)
def test_an_interrupt_leaves_no_wrong_state(mutate):
    outcomes, steps = [], steps_of(mutate)
    for interrupt in interrupts_at_every_instant():
        scene = Scene()
        with suppress(KeyboardInterrupt), interrupt:
            mutate(scene)
        scene.is_sound()
        now = scene.bookkeeping()
        assert now in steps, f"half changed after an interrupt in {interrupt.came_at}"
        outcomes.append(steps.index(now))
    assert outcomes == sorted(outcomes)
    assert {steps[0] == steps[outcomes[0]], steps[-1] == steps[outcomes[-1]]} == {True}

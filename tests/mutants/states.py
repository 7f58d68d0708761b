"""States of sequences: slots, snapshots, and the chunks that end at them."""

from .mutant import Mutant

SLOTS = "tests/memory/test_states.py::"
CASES = "tests/scheduling/test_states.py::"
EVENTS = "test_events_of_a_snapshot_are_those_of_a_group_of_its_own"
MACHINE = "tests/memory/test_state_machine.py::TestStateMachine"

MUTANTS = [
    Mutant(
        "states: a sequence overwrites the state that its fork still needs",
        "(counts[last] == refs[slots[owned]]) & (last == np.arange(len(owned)))",
        "last == np.arange(len(owned))",
        SLOTS + "test_a_fork_shares_the_state_until_one_of_both_goes_on",
    ),
    Mutant(
        "states: forks that go on at once write to one slot",
        "(counts[last] == refs[slots[owned]]) & (last == np.arange(len(owned)))",
        "counts[last] == refs[slots[owned]]",
        SLOTS + "test_a_fork_has_room_for_its_state_at_once",
    ),
    Mutant(
        "states: a sequence takes a new slot where no other is left",
        "[:num_spare]] = False\n",
        "] = False\n",
        CASES + "test_running_sequences_take_all_slots",
    ),
    Mutant(
        "states: a snapshot is overwritten while slots are free",
        "[:num_spare]] = False\n",
        "[:0]] = False\n",
        CASES + "test_going_back",
    ),
    Mutant(
        "states: a snapshot that is overwritten can still be found",
        "begin = [(self._blocks, slots, np.full(len(slots), NO_BLOCK)), (self.lens",
        "begin = [(self.lens",
        MACHINE,
    ),
    Mutant(
        "states: an interrupted write does not show",
        ", (self.lens, slots, np.full(len(slots), -1))]",
        "]",
        SLOTS + "test_an_interrupted_write_shows[2]",
    ),
    Mutant(
        "states: snapshots give way before free slots",
        "np.lexsort((age, snapshots[unused]))",
        "age.argsort()",
        CASES + "test_a_long_answer_pushes_out_nobody",
    ),
    Mutant(
        "states: the youngest snapshot gives way first",
        "np.lexsort((age, snapshots[unused]))",
        "np.lexsort((-age, snapshots[unused]))",
        CASES + "test_the_oldest_snapshot_gives_way",
    ),
    Mutant(
        "states: a snapshot that was found is as old as another",
        "self._used[unused] + self._was_found[unused] * self.num_slots",
        "self._used[unused]",
        CASES + "test_a_snapshot_that_was_found_stays_longer",
    ),
    Mutant(
        "states: a snapshot that was found stays for ever",
        "self._was_found[unused] * self.num_slots",
        "self._was_found[unused] * 10**9",
        CASES + "test_a_snapshot_that_was_found_stays_longer",
    ),
    Mutant(
        "states: a snapshot outlives its block",
        "(self._blocks != NO_BLOCK) & (self._cache.serials(self._blocks) == self._serials)",
        "self._blocks != NO_BLOCK",
        CASES + "test_without_its_block_a_snapshot_is_gone",
    ),
    Mutant(
        "states: a router believes in a snapshot whose block is gone",
        "events += self._states_removed(removed[",
        "self._states_removed(removed[",
        SLOTS + EVENTS,
    ),
    Mutant(
        "states: a router believes in a snapshot that is overwritten",
        "begin += self._cache.plan_tell_states(",
        "self._cache.plan_tell_states(",
        SLOTS + EVENTS,
    ),
    Mutant(
        "states: each boundary that a text passes leaves a snapshot",
        "        make_way[slots] = were_passed[slots] = False\n",
        "        make_way[:] = were_passed[:] = False\n",
        CASES + "test_a_long_answer_is_found_too",
    ),
    Mutant(
        "states: a snapshot that a prompt has found goes with the text that left it",
        "np.isin(self._moves_with, rows) & ~self._was_found",
        "np.isin(self._moves_with, rows)",
        SLOTS + "test_a_snapshot_that_a_prompt_has_found_stays",
    ),
    Mutant(
        "states: a later text takes away the snapshots of the one that had its row",
        "            (self._moves_with, slots, np.full(len(slots), _ENDED)),\n",
        "",
        MACHINE,
    ),
    Mutant(
        "states: what earlier turns of a chat left stays as long as all else",
        "            (self._used, passed, np.zeros_like(passed)),\n",
        "",
        CASES + "test_what_earlier_turns_left_gives_way_first",
    ),
    Mutant(
        "states: the snapshot at a stop moves on with the text",
        "moves_with[np.bincount(which, lasting, len(blocks)) > 0] = _NO_ROW",
        "pass",
        CASES + "test_a_long_answer_is_found_too",
    ),
    Mutant(
        "states: a hit leaves no token to compute",
        "found = found[: (prompt.num_tokens - 1) // size]",
        "found = found[: prompt.num_tokens // size]",
        CASES + "test_a_prompt_of_full_blocks_is_found_but_for_the_last",
    ),
    Mutant(
        "states: a sequence goes back to a state that stands for more",
        "        if np.count_nonzero(back):\n",
        "        if False:\n",
        CASES + "test_going_back",
    ),
    Mutant(
        "states: a lost state is none after an append that is undone",
        "np.where(self.lens[found] == lens[back], found, slots[back])",
        "found",
        SLOTS + "test_a_lost_state_stays_lost",
    ),
    Mutant(
        "states: a commit takes a state that stands for fewer tokens",
        "            snapshots.require_written(self._rows, rows)\n",
        "",
        SLOTS + "test_states_must_be_written_before_a_commit",
    ),
    Mutant(
        "states: a chunk passes its stop",
        "np.minimum(self.lens[self.lanes], self.next_stops[self.lanes]) - self.num_computed[self.lanes]",
        "self.num_uncomputed",
        CASES + "test_chunks_end_where_a_snapshot_stays",
    ),
    Mutant(
        "states: no snapshot where another prompt has parted from this one",
        "stops = {last, num_matched, *",
        "stops = {last, *",
        CASES + "test_a_snapshot_stays_where_prompts_part",
    ),
    Mutant(
        "states: requests do not wait for the snapshot of a running prompt",
        "            for stop in running.stops[lane]\n",
        "            for stop in ()\n",
        CASES + "test_requests_wait_for_a_snapshot",
    ),
    Mutant(
        "states: requests do not wait for the blocks that show where they part",
        "[behind].any():\n            return True\n",
        "[behind].any():\n            pass\n",
        CASES + "test_requests_wait_for_a_snapshot",
    ),
    Mutant(
        "states: a failed step leaves a state ahead of its tokens",
        "num_computed[i] = lens[lens <= num_computed[i]][-1]",
        "num_computed[i] = lens[-1]",
        CASES + "test_a_failed_step_is_run_again",
    ),
]

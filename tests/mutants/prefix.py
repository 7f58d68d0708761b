"""The prefix cache."""

from .mutant import Mutant

PREFIX_CACHE = "tests/memory/prefix/test_prefix_cache.py::"
PREFIX_MACHINE = "tests/memory/prefix/test_machine.py::TestPrefixMachine"
KV_EVENTS = "tests/integrations/test_kv_events.py::"

MUTANTS = [
    Mutant(
        "prefix: blocks of colliding digests serve each other's tokens",
        "self._rows().take(blocks, axis=0) == rows\n",
        "rows == rows\n",
        "tests/memory/prefix/test_machine.py::TestCollidingMachine",
    ),
    Mutant(
        "prefix: part of a block is found behind another block",
        " or self._parents[behind] != self._serials[block]:",
        ":",
        PREFIX_CACHE + "test_a_reused_block_is_not_found_behind_its_old_parent",
    ),
    Mutant(
        "prefix: a block that is overwritten in place is still found",
        "            forgotten = blocks[owned]\n",
        "            forgotten = blocks[:0]\n",
        PREFIX_CACHE + "test_descendants_become_unfindable_when_a_copy_has_no_room",
    ),
    Mutant(
        "prefix: a block that other forks hold stays behind one that is evicted",
        "return self.descendants(evicted) if self._are_adopted[0] else self.holding_with(evicted)",
        "return self.holding_with(evicted)",
        PREFIX_CACHE + "test_a_block_that_another_fork_has_stored_is_lost_with_the_one_before_it",
    ),
    Mutant(
        "prefix: a block stays whose parent is gone",
        "            lost |= lost[above]\n",
        "",
        "tests/memory/prefix/test_hooks.py::test_another_order_of_eviction",
    ),
    Mutant(
        "prefix: all of a prompt is found and no token is left to compute",
        "        if num_found < prompt.num_tokens:\n",
        "        if num_found <= prompt.num_tokens:\n",
        PREFIX_CACHE + "test_of_a_prompt_that_is_all_there_one_token_is_left",
    ),
    Mutant(
        "prefix: the first block of a sequence is evicted first",
        'np.argsort(-self._serials[blocks], kind="stable")',
        'np.argsort(self._serials[blocks], kind="stable")',
        PREFIX_MACHINE,
    ),
    Mutant(
        "prefix: a block that is used again is evicted",
        "            others = ~self._tally.among(evicted, blocks)\n",
        "            others = np.full(len(evicted), True)\n",
        PREFIX_CACHE + "test_found_blocks_are_not_evicted_for_the_rest_of_a_prompt",
    ),
    Mutant(
        "prefix: an evicted block is found",
        "[(self._serials, removed, np.zeros(len(removed), np.int64))] if len(removed) else []",
        "[]",
        PREFIX_MACHINE,
    ),
    Mutant(
        "prefix: two digests are put into one slot of the index",
        "    if not again:\n",
        "    if slots:\n",
        "tests/memory/prefix/test_index.py",
    ),
    Mutant(
        "prefix: a truncated sequence is found by its old tokens",
        "np.minimum(self.num_found[rows], lens // self.cache.block_size)",
        "self.num_found[rows]",
        PREFIX_MACHINE,
    ),
    Mutant(
        "events: a fork forgets its salt",
        "(self.num_known, self.num_found, self._roots, self.salts)]",
        "(self.num_known, self.num_found, self._roots)]",
        "tests/memory/prefix/test_hooks.py::test_events_name_the_salt_of_first_blocks",
    ),
    Mutant(
        "events: nobody hears that some did not fit",
        "            cleared.put(AllBlocksCleared())\n",
        "",
        KV_EVENTS + "test_events_that_do_not_fit_are_replaced_by_one_that_clears_all",
    ),
    Mutant(
        "events: a replay lacks the message that was asked for",
        "            if number >= request[1]:\n",
        "            if number > request[1]:\n",
        KV_EVENTS + "test_a_replay_has_the_messages_that_are_kept",
    ),
    Mutant(
        "groups: a hit may lack the first block of a window",
        "possible = (last_gap < groups",
        "possible = (last_gap <= groups",
        "tests/memory/groups/test_cases.py::test_a_hit_ends_where_a_block_of_the_window_is_missing",
    ),
    Mutant(
        "groups: what a window has passed is evicted before its time",
        "        again = self._found_again[blocks]\n",
        "        again = np.zeros(len(blocks), np.bool)\n",
        "tests/memory/groups/test_needs.py::"
        "test_prompts_find_their_common_beginning_in_half_of_the_blocks_that_they_need",
    ),
]

"""Stores outside of a cache, and what they are trusted with."""

from .mutant import Mutant

WIRE = "tests/stores/test_wire.py::"
FILE = "tests/stores/test_file.py::"
WINDOWS = "tests/stores/test_windows.py::"
PREFIXES = "tests/stores/test_prefixes.py::"
STATES = "tests/stores/test_states.py::"
REDIS = "tests/stores/test_redis.py::"
KEYS_DIFFER = WIRE + "test_keys_differ_with_all_that_k_and_v_depend_on"

MUTANTS = [
    Mutant(
        "wire: blocks of int8 rows are stored without their scales",
        "for i, view in enumerate(views):\n                            part",
        "for i, view in enumerate(views[:2]):\n                            part",
        WIRE + "test_any_cache_reads_what_another_wrote[{'kv_dtype': 'int8'}-HND]",
    ),
    Mutant(
        "wire: a key does not name the salt", "self._sizes_of_root(salt)", "self._sizes_of_root(bytes(16))", KEYS_DIFFER
    ),
    Mutant(
        "wire: a key does not name the model", "_sizes_of_root(salt) + self._model", "_sizes_of_root(salt)", KEYS_DIFFER
    ),
    Mutant(
        "wire: a key does not name the scales",
        "_HEAD.pack(digest, head) + scales",
        "_HEAD.pack(digest, head)",
        KEYS_DIFFER,
    ),
    Mutant(
        "wire: how many tokens are missing is hashed as a token",
        'b"without" + digest',
        "digest",
        WINDOWS + "test_a_last_token_is_told_from_how_many_tokens_of_a_block_are_missing[7]",
    ),
    Mutant(
        "wire: all heads have one key",
        "_HEAD.pack(digest, head)",
        "_HEAD.pack(digest, 0)",
        WIRE + "test_ranks_find_their_heads",
    ),
    Mutant(
        "wire: rows in another order have the same checksum",
        "words.sum(axis=0).tobytes() + words.sum(axis=1).tobytes()",
        "words.sum(axis=0).tobytes()",
        WIRE + "test_only_the_block_itself_is_opened",
    ),
    Mutant(
        "blocks: some KV heads are enough",
        "opened[: len(opened) // self.num_heads * self.num_heads]",
        "opened",
        WIRE + "test_what_is_whole_comes_before_the_first_gap",
    ),
    Mutant(
        "slots: the beginning of a sequence goes first",
        "[*zip(keys, zip(slots, sizes, strict=True), strict=True)][::-1]",
        "[*zip(keys, zip(slots, sizes, strict=True), strict=True)]",
        "tests/stores/test_stores.py::test_the_least_recently_used_blocks_make_room[host]",
    ),
    Mutant(
        "file: the entry of an evicted block stays while its slot is written",
        "self._erase(slots)\n            for",
        "for",
        FILE + "test_a_put_that_fails_half_way_leaves_no_wrong_block",
    ),
    Mutant(
        "file: two stores share a file",
        "fcntl.LOCK_EX | fcntl.LOCK_NB",
        "fcntl.LOCK_SH | fcntl.LOCK_NB",
        FILE + "test_one_store_at_a_time_has_the_file",
    ),
    Mutant(
        "redis: blocks that a client left behind stay for ever",
        "if #key == KEY_BYTES and",
        "if false and",
        REDIS + "test_blocks_that_a_client_has_not_counted_are_counted_and_evicted[valkey]",
    ),
    Mutant(
        "redis: a full server gives back nothing",
        "redis.pcall('ZADD'",
        "redis.call('ZADD'",
        REDIS + "test_a_server_that_is_full_still_reads[valkey]",
    ),
    Mutant(
        "prefixes: what the store did not take counts as stored",
        "if not taken.done()}",
        "}",
        PREFIXES + "test_what_the_store_did_not_take_is_stored_again",
    ),
    Mutant(
        "prefixes: a damaged block stays",
        "self.patient.remove_damaged(damaged)",
        "pass",
        WINDOWS + "test_damaged_blocks_that_come_are_replaced[cut-without windows]",
    ),
    Mutant(
        "nixl: a host makes room for any number of keys",
        " or count > _KEYS_AT_ONCE",
        "",
        "tests/stores/test_nixl.py::test_a_host_does_not_do_what_no_store_asks_for[too many keys]",
    ),
    Mutant(
        "patient: each call waits for a store that stalls",
        "self._stalled = asked",
        "self._stalled = None",
        PREFIXES + "test_a_store_that_stalls_has_nothing",
    ),
    Mutant(
        "windows: what did not come can be found",
        "self.cache.append(added.seq, 0)",
        "self.cache.seq_lens(added.seq)",
        WINDOWS + "test_another_cache_finds_what_one_has_stored[kept tokens-one shape]",
    ),
    Mutant(
        "windows: a block of the cache comes in part",
        "if start >= saved and start",
        "if start",
        WINDOWS + "test_a_cache_that_needs_more_than_was_saved_computes_it[{'block_size': 16}]",
    ),
    Mutant(
        "swap: what was not committed can be found",
        "(len(copy.tokens), False)",
        "(len(copy.tokens), True)",
        "tests/stores/test_swap.py::test_what_could_be_found_can_be_found_again",
    ),
    Mutant(
        "swap: what a reset has made unfindable comes back with its tokens",
        "copy.num_clears != there.num_clears",
        "False",
        "tests/stores/test_swap.py::test_what_was_swapped_out_before_a_reset_is_never_found",
    ),
    Mutant(
        "swap: what others share goes with its first owner",
        "tuple(copies[i] for i in {*owners} if i < len(copies))",
        "()",
        "tests/stores/test_swap.py::test_what_sequences_share_is_stored_once",
    ),
    Mutant(
        "swap: the store keeps copies that nobody has",
        "self._patient.remove_with(copy, [*keys, *record[0]])",
        "pass",
        "tests/stores/test_swap.py::test_a_copy_leaves_the_sequence_as_it_is_and_is_removed_with_its_object",
    ),
    Mutant(
        "swap: a state comes back without all of its blocks",
        "if state is not None and stop < copy.num_tokens:",
        "if start < 0:",
        STATES + "test_each_lost_or_damaged_part_is_a_miss[lost]",
    ),
    Mutant(
        "swap: tokens without a state come back",
        "num_tokens, slot = one.num_computed, one.state_slot",
        "num_tokens, slot = one.num_tokens, one.state_slot",
        STATES + "test_tokens_that_were_not_computed_do_not_come_back",
    ),
    Mutant(
        "swap: an interrupted sequence keeps a length without a state",
        "before = int(lens[lens <= before][-1])",
        "pass",
        STATES + "test_an_interrupt_leaves_no_length_without_a_state[1-write]",
    ),
    Mutant(
        "swap: what comes back with a state is found before it was committed",
        "if copy.num_committed == len(copy.tokens) // cache.block_size * cache.block_size:",
        "if copy.num_committed:",
        STATES + "test_what_was_not_committed_is_found_after_the_commit",
    ),
    Mutant(
        "prefixes: a state comes without all of its blocks",
        "if added.num_cached == n:",
        "if added.num_cached >= 0:",
        STATES + "test_prefixes_need_all_blocks_and_the_state[lost]",
    ),
    Mutant(
        "prefixes: a state that ends in the middle of a wire block comes without the tokens in it",
        "if num_tokens % size and not self.give(",
        "if not num_tokens and not self.give(",
        STATES + "test_another_cache_goes_on_from_a_stored_state[22-whole]",
    ),
    Mutant(
        "prefixes: a key does not name the shapes and dtypes of states",
        'b"state" + self._layout + digest',
        'b"state" + digest',
        STATES + "test_other_states_are_not_found[dtypes]",
    ),
    Mutant(
        "saved: a state that is behind its sequence is saved",
        "contents.num_computed < num_tokens",
        "False",
        STATES + "test_a_sequence_whose_state_is_behind_is_not_saved",
    ),
    Mutant(
        "scheduler: a request that comes back stops behind itself",
        "running.move(np.array([request.lane]), np.array([num_cached]))",
        "running.num_computed[request.lane] = num_cached",
        STATES + "test_preempted_requests_come_back_with_their_states[200]",
    ),
    Mutant(
        "patient: each call waits for a store that does not take",
        "self._behind = taken",
        "pass",
        "tests/stores/test_swap.py::test_a_store_that_stalls_is_waited_for_once",
    ),
    Mutant(
        "saved: a store without room for a sequence has saved it",
        "return all(prefixes.patient.has([*keys, *given], prefixes.patient.deadline()))",
        "return True",
        "tests/stores/test_saved.py::test_a_store_without_room_for_all_of_it_has_not_saved_it[28-False-268435456]",
    ),
    Mutant(
        "prefixes: layers of several shapes have wire blocks in common",
        "layers.setdefault((group.window, group.shape), [])",
        "layers.setdefault((group.window, None), [])",
        "tests/stores/test_windows.py::test_a_store_has_room_for_the_blocks_of_all_shapes",
    ),
    Mutant(
        "saved: parts of two texts make one",
        "all(of_part == digest for of_part, _ in came)",
        "came[0][0]",
        "tests/stores/test_saved.py::test_damaged_texts_are_not_restored",
    ),
]

"""The block pool, the sequences and their tables."""

from .mutant import Mutant

TABLE = "tests/memory/test_table.py::"
GROUPS = "tests/memory/groups/test_cases.py::"
TRANSACTION = "tests/memory/transactions/test_transaction.py::"
COPIES = "tests/test_cache.py::test_append_copies_the_shared_block_in_every_layer"
MACHINE = "tests/memory/test_manager_machine.py"
PREFIX_MACHINE = "tests/memory/prefix/test_machine.py::TestPrefixMachine"
POOL = "tests/memory/test_pool.py"

MUTANTS = [
    Mutant(
        "copies: the scales of int8 rows stay behind",
        "for stack in self.stacks:",
        "for stack in self.stacks[:2]:",
        COPIES + "[4096-float16-int8-NHD-numpy]",
    ),
    Mutant(
        "pool: a block with two owners is written without a copy",
        "shared = pool._refs[blocks] > 1",
        "shared = pool._refs[blocks] > 2",
        MACHINE,
    ),
    Mutant(
        "fork: no references are taken",
        "gained=blocks, times=n, num_seqs=num_seqs",
        "",
        MACHINE,
    ),
    Mutant(
        "fork: no reference is taken to a partial last block",
        "owned_spans(first, self.of_lines(self.num_blocks(self.lens[rows])) - first)",
        "owned_spans(first, self.of_lines(self.lens[rows] // self.block_size) - first)",
        MACHINE,
    ),
    Mutant(
        "append: one token past the capacity is accepted",
        "if ends.max(initial=0) > self.max_len:",
        "if ends.max(initial=0) > self.max_len + 1:",
        TABLE + "test_a_step_past_the_longest_sequence_is_refused",
    ),
    Mutant(
        "append: all slots are in the first new block",
        "(first_entry - first)[owners] + positions // size",
        "first_entry[owners]",
        MACHINE,
    ),
    Mutant(
        "slots of a range have 32 bits",
        "np.int64(self.block_size) + offset",
        "np.int32(self.block_size) + offset",
        TABLE + "test_slots_past_32_bits",
    ),
    Mutant(
        "truncate: the partial last block is released",
        "        num_kept = self.of_lines(self.num_blocks(lens))\n",
        "        num_kept = self.of_lines(lens // self.block_size)\n",
        MACHINE,
    ),
    Mutant(
        "free: the length stays",
        "            (self.lens, rows, lens),\n        ]",
        "        ]",
        MACHINE,
    ),
    Mutant(
        "free: the handle stays valid",
        "            (self._issued, rows, _RETIRED.repeat(len(rows))),\n",
        "",
        MACHINE,
    ),
    Mutant(
        "a sequence may be named twice in a call",
        "repeated = self._tally.repeated(rows)",
        "repeated = np.zeros(len(rows), bool)",
        MACHINE,
    ),
    Mutant(
        "append: references are dropped before blocks are taken",
        "        dropped = blocks[copied]\n",
        "        dropped = blocks[copied]\n        pool._refs[dropped] -= 1\n",
        TRANSACTION + "test_an_interrupted_mutation_has_changed_everything_or_nothing[append 1]",
    ),
    Mutant(
        "a second thread waits instead of being refused",
        "(changes and guard.changing)",
        "False",
        "tests/memory/test_guard.py::test_a_mutation_is_refused_in_the_middle_of_one_of_another_thread",
    ),
    Mutant(
        "append: blocks are copied after the commit",
        "        self._layer_caches.copy(plan.copies)\n        slots",
        "        self.pool._commit(plan.writes)\n        self._layer_caches.copy(plan.copies)\n        slots",
        TRANSACTION + "test_an_interrupted_mutation_has_changed_everything_or_nothing[append 1]",
    ),
    Mutant(
        "copy on write leaves out the first layer",
        "for first in range(0, num_layers, at_once)]",
        "for first in range(1, num_layers, at_once)]",
        "tests/test_cache.py::test_append_copies_the_shared_block_in_every_layer",
    ),
    Mutant(
        "append: a step repeats the last one though the pool has changed",
        " or last_step.change != self.pool._num_changes[0]:",
        ":",
        PREFIX_MACHINE,
    ),
    Mutant(
        "append: a block that the last step filled is never committed",
        "uncommitted = bool(len(full)) if all_stored else None",
        "uncommitted = bool(len(full))",
        PREFIX_MACHINE,
    ),
    Mutant(
        "retain: a block named twice gets one reference",
        "(before + changes)",
        "(before + np.sign(changes))",
        POOL,
    ),
    Mutant(
        "release: a free block is accepted",
        "np.count_nonzero(refs < 0):",
        "np.count_nonzero(refs < -1):",
        POOL,
    ),
    Mutant(
        "pool: negative blocks count from the end",
        "(ids < 0) | (ids >= self.num_blocks)",
        "ids >= self.num_blocks",
        POOL,
    ),
    Mutant(
        "allocate: one block more than there is is handed out",
        "if num_new > num_free:",
        "if num_new > num_free + 1:",
        MACHINE,
    ),
    Mutant(
        "pool: the last owner copies too",
        "return np.asarray(~(nobody_else & (last == np.arange(len(blocks)))))",
        "return np.full(len(blocks), True)",
        TABLE + "test_beams_go_on_with_the_tokens_of_others",
    ),
    Mutant(
        "pool: a shared block is written by one of its owners",
        "nobody_else = counts[last] == self._refs[blocks]",
        "nobody_else = counts[last] <= self._refs[blocks]",
        MACHINE,
    ),
    Mutant(
        "allocate: blocks are taken before the commit",
        "                refs = self._refs, new_blocks, ",
        "                self._num_free[0] = num_free - num_new\n                refs = self._refs, new_blocks, ",
        TRANSACTION + "test_an_interrupted_mutation_has_changed_everything_or_nothing[pool.allocate]",
    ),
    Mutant(
        "pool: a store of the commit converts its values",
        "(before + changes).astype(np.int32, copy=False)",
        "before + changes",
        TRANSACTION + "test_stores_need_no_memory",
    ),
    Mutant(
        "CacheManager: a block that an ended sequence keeps counts as free",
        "np.maximum(-(-lens // size) - 1, 0)",
        "-(-lens // size)",
        "tests/compat/test_paged_minimal.py::test_without_room_nothing_changes",
    ),
    Mutant(
        "groups: the first one leads, whatever its window",
        "leader = int(before.argmax())",
        "leader = 0",
        "tests/memory/test_groups.py::test_every_layer_has_a_place_of_its_own_and_groups_are_filled_evenly",
    ),
    Mutant(
        "groups: a size is chosen without its padding",
        "return room * blocks * (1 + _COST_OF_GROUP * num_groups)",
        "return blocks * (1 + _COST_OF_GROUP * num_groups)",
        "tests/memory/test_groups.py::test_the_groups_of_models",
    ),
    Mutant(
        "groups: layers of several shapes count alike",
        "return 1 if shape is None else shape[0] * shape[1]",
        "return 1",
        "tests/memory/test_groups.py::test_the_groups_of_layers_of_several_shapes",
    ),
    Mutant(
        "groups: a layer reads the K and V of one of another shape",
        'for what, asked, has in zip(("window", "shape"), kinds[layer], kinds[other], strict=True):',
        'for what, asked, has in zip(("window",), kinds[layer], kinds[other]):',
        "tests/memory/groups/test_shapes.py::test_refusals",
    ),
    Mutant(
        "caches: the parts of a block begin at any byte",
        "_ALIGNED = 16",
        "_ALIGNED = 1",
        "tests/memory/groups/test_shapes.py::test_all_groups_share_the_bytes_of_a_block",
    ),
    Mutant(
        "caches: V lies on K",
        "arrays.view(blocks, start, *part)",
        "arrays.view(blocks, place * sum(nbytes), *part)",
        "tests/memory/groups/test_shapes.py::test_one_cache_has_the_bits_of_a_cache_for_each_shape[NHD-Gemma 4]",
    ),
    Mutant(
        "groups: a block is released with a key that the next query sees",
        "// self.block_size * self.block_size - keep)",
        "// self.block_size * self.block_size - keep + 1)",
        GROUPS + "test_a_window_holds_three_blocks_however_long_a_sequence_grows",
    ),
    Mutant(
        "groups: a sequence is cut to where it lacks a block",
        "np.where(first > 0, first * self.block_size + before, 0)",
        "np.where(first > 0, first * self.block_size + before - 1, 0)",
        GROUPS + "test_the_last_append_can_be_taken_back_and_no_more_than_the_window_allows",
    ),
    Mutant(
        "groups: a hit lets go of the block that the next one is stored behind",
        "before[leader] = max(before[leader], block_size)",
        "before[leader] = max(before[leader], 1)",
        GROUPS + "test_a_block_is_stored_behind_the_one_before_it_though_no_query_sees_that",
    ),
    Mutant(
        "groups: a block has the holder that an earlier one had in its place",
        "(self._starts + held.kept[kept]).reshape(-1), held.blocks[:, kept].reshape(-1)",
        "self._starts[groups, 0] + held.kept[i], held.blocks[groups, i]",
        GROUPS + "test_a_block_that_a_window_passes_before_the_commit_is_found_in_no_group",
    ),
    Mutant(
        "groups: a sequence gets a block of another group",
        "np.where(kept == NO_BLOCK, NO_BLOCK, self._starts + kept)",
        "(self._starts + kept)",
        GROUPS + "test_tokens_that_are_not_stored_stay_in_their_own_blocks",
    ),
    Mutant(
        "groups: blocks are stored behind one that was passed",
        "ends = first > np.maximum(self.num_found[rows] - 1, 0)",
        "ends = first > self.num_found[rows]",
        GROUPS + "test_nothing_is_found_behind_blocks_that_were_passed_before_they_were_stored",
    ),
]

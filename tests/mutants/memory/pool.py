"""The pool of blocks, and its reference counts."""

from ..mutant import Mutant

POOL = ("tests/memory/test_pool.py",)
TABLE = (
    "tests/memory/test_table.py",
    "tests/memory/test_table_refusals.py",
    "tests/memory/test_append.py",
    "tests/memory/test_handles.py",
)
MACHINE = ("tests/memory/test_manager_machine.py",)
TRANSACTION = "tests/memory/transactions/test_transaction.py::"

MUTANTS = [
    Mutant(
        "retain counts a block that is named twice once",
        "memory/pool.py",
        "(before + changes)",
        "(before + np.sign(changes))",
        POOL,
        ci=True,
    ),
    Mutant(
        "a block that is named twice is freed twice",
        "memory/pool.py",
        "changes = np.bincount(last, signs, len(blocks)).astype(np.int64)",
        "changes = np.bincount(last, signs, len(blocks)).astype(np.int64)[last]",
        POOL,
    ),
    Mutant(
        "release of a free block passes",
        "memory/pool.py",
        "np.count_nonzero(refs < 0):",
        "np.count_nonzero(refs < -1):",
        POOL,
        ci=True,
    ),
    Mutant(
        "retain of a free block passes",
        "memory/pool.py",
        "dead = self._refs[gained] < 1",
        "dead = self._refs[gained] < 0",
        POOL,
    ),
    Mutant(
        "negative blocks count from the end",
        "memory/pool.py",
        "(ids < 0) | (ids >= self.num_blocks)",
        "ids >= self.num_blocks",
        POOL,
        ci=True,
    ),
    Mutant(
        "released blocks come back in reverse",
        "memory/pool.py",
        "freed[::-1].astype(np.int32)",
        "freed.astype(np.int32)",
        POOL,
    ),
    Mutant(
        "allocate hands out one block more than there is",
        "memory/pool.py",
        "if num_new > num_free:",
        "if num_new > num_free + 1:",
        MACHINE,
        ci=True,
    ),
    Mutant(
        "allocate hands out the same blocks again",
        "memory/pool.py",
        "(self._num_free, 0, top)",
        "(self._num_free, 0, top + num_blank)",
        MACHINE,
    ),
    Mutant(
        "the last owner copies too",
        "memory/pool.py",
        "return np.asarray(~(nobody_else & (last == np.arange(len(blocks)))))",
        "return np.full(len(blocks), True)",
        TABLE,
        ci=True,
    ),
    Mutant(
        "nobody copies where all sharers append",
        "memory/pool.py",
        "~(nobody_else & (last == np.arange(len(blocks))))",
        "~nobody_else",
        MACHINE,
    ),
    Mutant(
        "one keeps the block that others still share",
        "memory/pool.py",
        "nobody_else = counts[last] == self._refs[blocks]",
        "nobody_else = counts[last] <= self._refs[blocks]",
        MACHINE,
        ci=True,
    ),
    Mutant(
        "allocate takes blocks before the commit",
        "memory/pool.py",
        "                refs = self._refs, new_blocks, ",
        "                self._num_free[0] = num_free - num_new\n                refs = self._refs, new_blocks, ",
        (TRANSACTION + "test_an_interrupt_at_any_place_comes_before_the_change_or_after[pool.allocate]",),
        ci=True,
    ),
    Mutant(
        "a copy on write takes blocks before the commit",
        "memory/pool.py",
        "        rest = num_free - num_blank\n",
        "        rest = num_free - num_blank\n        self._num_free[0] = rest\n",
        (TRANSACTION + "test_an_interrupt_at_any_place_comes_before_the_change_or_after[append 1]",),
    ),
    Mutant(
        "blank blocks are handed out twice",
        "memory/pool.py",
        "(self._num_free, 0, num_free - num_new)]",
        "(self._num_free, 0, num_free)]",
        MACHINE,
    ),
    Mutant(
        "a store converts",
        "memory/pool.py",
        "(before + changes).astype(np.int32, copy=False)",
        "before + changes",
        (TRANSACTION + "test_no_store_allocates",),
        ci=True,
    ),
    Mutant(
        "what an interrupt keeps from a listener comes behind the next change",
        "memory/pool.py",
        "            self._prefix_cache.emit()  # what an interrupt has left: if it raises, nothing has happened\n",
        "            pass\n",
        ("tests/memory/prefix/test_hooks.py::test_what_an_interrupt_has_left_is_told_before_the_next_change",),
    ),
    Mutant(
        "a step that a listener undoes is gone on from",
        "memory/pool.py",
        "commit([*undo(), (self._num_changes, 0, self._num_changes[0] + 1)])",
        "commit(undo())",
        ("tests/memory/prefix/test_hooks.py::test_a_step_that_a_listener_undoes_leaves_nothing_to_the_next_one",),
    ),
    Mutant(
        "blocks that a sequence releases get a reference",
        "memory/pool.py",
        "times if len(gained) else -1",
        "times",
        ("tests/memory/test_table.py",),
    ),
    Mutant(
        "reference counts wrap",
        "memory/pool.py",
        "too_many := before > MAX_INT32 - changes",
        "too_many := before < 0",
        POOL,
    ),
    Mutant(
        "blocks that a sequence gives up stay shared",
        "memory/pool.py",
        " - np.count_nonzero(before > 1)",
        "",
        MACHINE,
    ),
]

"""What a caller relies on: after interrupts, beside threads that write to arguments, whatever the thread is set to."""

from .mutant import Mutant

THREADS = ("tests/cpu/test_threads.py",)
PROCESSORS = ("tests/cpu/test_processors.py",)
COMMIT = ("tests/test_commit.py",)
OWN = ("tests/validation/test_own_arrays.py",)
PREPARED = ("tests/operations/test_prepared.py",)
ARITHMETIC = ("tests/test_arithmetic.py",)

MUTANTS = [
    Mutant(
        "threads: workers go on after an interrupt",
        "cpu/threads.py",
        "counter.value = num_items",
        "pass",
        THREADS,
    ),
    Mutant(
        "threads: what a worker raises is lost",
        "cpu/threads.py",
        "self.error = error",
        "pass",
        THREADS,
    ),
    Mutant(
        "threads: of a pool that is gone one worker ends",
        "cpu/threads.py",
        "shares.put(end)  # for the next worker",
        "return",
        THREADS,
    ),
    Mutant(
        "threads: an idle worker keeps the arrays of its last call",
        "cpu/threads.py",
        "share = None  # an idle worker keeps no arrays alive",
        "continue",
        THREADS,
    ),
    Mutant(
        "threads: workers are waited for when the interpreter ends",
        "cpu/threads.py",
        "if sys.is_finalizing():",
        "if False:",
        THREADS,
    ),
    Mutant(
        "threads: shares pile up that no worker comes to",
        "cpu/threads.py",
        "return 0 if self.shares.qsize() >= self.size else self.ready(",
        "return self.ready(",
        THREADS,
    ),
    Mutant(
        "threads: a helper may wait behind the caller",
        "cpu/processors.py",
        "own - {told[1]} or own",
        "own",
        PROCESSORS,
    ),
    Mutant(
        "threads: a long call leaves the processor of a caller who sleeps",
        "cpu/processors.py",
        "_current() if joins else None",
        "_current()",
        PROCESSORS,
    ),
    Mutant(
        "threads: workers that start later are not told",
        "cpu/processors.py",
        "told = len(self._of_each), ",
        "told = 0, ",
        PROCESSORS,
    ),
    Mutant(
        "threads: the caller works however long it takes",
        "cpu/threads.py",
        "pool, joins = _state.pool(), estimate < PATIENCE_NS",
        "pool, joins = _state.pool(), True",
        THREADS,
    ),
    Mutant(
        "the last row of a square grid says that the tables have each column twice",
        "validation/tables.py",
        "rows = [min(1, len(cos) - 1), len(cos) // 2, -1]",
        "rows = [-1]",
        ("tests/operations/test_rotary.py::test_tables_with_columns_that_are_equal_for_another_reason",),
    ),
    Mutant(
        "threads: an interrupted caller waits for a share twice",
        "cpu/threads.py",
        "with self._turn:\n            pass",
        "self._turn.acquire()",
        THREADS,
    ),
    Mutant(
        "arithmetic: flushed denormals and rounding modes of the caller",
        "arithmetic.py",
        "_set_environment(_DEFAULT)",
        "pass",
        ARITHMETIC,
    ),
    Mutant(
        "commit: an interrupt may come between two writes",
        "commit.py",
        "deque(starmap(setitem, writes), maxlen=0)",
        "for array, index, value in writes:\n        array[index] = value",
        COMMIT,
    ),
    Mutant(
        "commit: blocks are stored by index arrays",
        "cpu/blocks.py",
        "            blocks = map(getitem, repeat(bits(source)), at)\n"
        "            writes += zip(map(getitem, repeat(bits(destination)), to), repeat(...), blocks)\n"
        "    commit(writes)",
        "            bits(destination)[to] = bits(source)[at]\n    commit(writes)",
        COMMIT,
    ),
    Mutant(
        "prepared: layers with other options are alike",
        "operations/prepared.py",
        ", *options, *chosen, *map(type, chosen)",
        "",
        PREPARED,
        ci=True,
    ),
    Mutant(
        "prepared: whoever writes to the tables of a batch gets the old ones",
        "operations/prepared.py",
        "tables = [(x.shape, x.dtype, x.tobytes()) for x in where.values()]",
        "tables = [(x.shape, x.dtype) for x in where.values()]",
        PREPARED,
    ),
    Mutant(
        "prepared: a batch of another cache is known",
        "cache.py",
        "caches = self, None if self._alike else layer",
        "caches = None if self._alike else layer",
        PREPARED,
    ),
    Mutant(
        "own: small arrays are read where they are",
        "placement.py",
        "return x.copy() if x is not None and self.on_host else x",
        "return x",
        OWN,
        ci=True,
    ),
    Mutant(
        "own: what was checked is not what is read",
        "validation/attention.py",
        "block_tables, seq_lens, max_seq_len, query_starts, out, spec,",
        'block_tables, views["seq_lens"], max_seq_len, query_starts, out, spec,',
        OWN,
    ),
    Mutant(
        "arithmetic: numbers that are rounded on their way into a cache count as bits",
        "cpu/blocks.py",
        "call.rotation is None and call.k.dtype == dtype == call.v.dtype",
        "call.rotation is None",
        ARITHMETIC,
    ),
    Mutant(
        "arithmetic: a thread keeps the defaults",
        "arithmetic.py",
        "_set_environment(environment)",
        "pass",
        ARITHMETIC,
    ),
    Mutant(
        "arithmetic: the errstate of the caller",
        "arithmetic.py",
        "_quiet.copy().run(compute, *args, **kwargs)",
        "compute(*args, **kwargs)",
        ARITHMETIC,
    ),
]

"""What a caller relies on: after interrupts, beside threads that write to arguments, whatever the thread is set to."""

from .mutant import Mutant

THREADS = ("tests/cpu/test_threads.py",)
INTERRUPTS = ("tests/promises/test_interrupts.py::test_random_interrupts[300]",)
COMMIT = ("tests/test_commit.py",)
OWN = ("tests/validation/test_own_arrays.py",)
ARITHMETIC = ("tests/test_arithmetic.py",)

MUTANTS = [
    Mutant(
        "threads: workers go on after an interrupt",
        "cpu/threads.py",
        "counter[0] = num_items",
        "pass",
        THREADS,
    ),
    Mutant(
        "threads: what a worker raises is lost",
        "cpu/threads.py",
        "share.error = error",
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
        "threads: an interrupted caller waits for a share twice",
        "cpu/threads.py",
        "with self.done:  # and leave it free, for an interrupted caller waits again\n            pass",
        "self.done.acquire()",
        INTERRUPTS,
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
        "seq_lens=seq_lens,",
        'seq_lens=views["seq_lens"],',
        OWN,
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

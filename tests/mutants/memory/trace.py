"""Simulated memory, and the map of a pool."""

from ..mutant import Mutant

ALLOCATORS = ("tests/trace/test_allocators.py",)
LENGTHS = ("tests/trace/test_lengths.py",)
SIMULATE = ("tests/trace/test_simulate.py",)
COMMAND = ("tests/trace/test_command.py",)
POOL_MAP = ("tests/drawing/test_pool_map.py",)
SIZES = ("tests/memory/test_kv_bytes.py",)

MUTANTS = [
    Mutant(
        "first fit takes a hole that is too small",
        "trace/first_fit.py",
        "if room >= size:",
        "if room >= size - 1:",
        ALLOCATORS,
    ),
    Mutant(
        "first fit leaves touching holes apart",
        "trace/first_fit.py",
        "if i and sum(self.holes[i - 1]) == start:",
        "if i and sum(self.holes[i - 1]) > start:",
        ALLOCATORS,
    ),
    Mutant(
        "buddies do not merge",
        "trace/buddy.py",
        "        while start ^ (1 << k) in self.holes[k]:\n",
        "        while start ^ (1 << k) in self.holes[k] and k < 2:\n",
        ALLOCATORS,
    ),
    Mutant(
        "merged buddies begin where the last one did",
        "trace/buddy.py",
        "start &= ~(1 << k)",
        "start ^= 1 << k",
        ALLOCATORS,
    ),
    Mutant(
        "log-normal lengths are longer than asked for",
        "trace/lengths.py",
        "np.log(mean) - sigma**2 / 2",
        "np.log(mean)",
        LENGTHS,
    ),
    Mutant(
        "rows of a file with a length of 0 pass",
        "trace/lengths.py",
        "and 1 <= int(digits[:20])",
        "and 0 <= int(digits[:20])",
        LENGTHS,
    ),
    Mutant(
        "what nobody asks for counts as fragmentation",
        "trace/simulate.py",
        "manager.memory - allocated if queue else 0",
        "manager.memory - allocated",
        SIMULATE,
    ),
    Mutant(
        "slots for tokens to come count as never used",
        "trace/simulate.py",
        "int(np.minimum(held, ends).sum()) - used",
        "0",
        SIMULATE,
        ci=True,
    ),
    Mutant(
        "a preempted sequence goes to the end of the queue",
        "trace/simulate.py",
        "queue.appendleft(int(running[-1]))",
        "queue.append(int(running[-1]))",
        SIMULATE,
    ),
    Mutant(
        "the watermark is ignored",
        "trace/managers.py",
        "(self.kept_free if table.num_seqs else 0)",
        "0",
        SIMULATE,
    ),
    Mutant(
        "paging holds what its tokens need, not its blocks",
        "trace/managers.py",
        "return -(-self.table.seq_lens(seqs).astype(np.int64) // block_size) * block_size",
        "return self.table.seq_lens(seqs).astype(np.int64)",
        SIMULATE,
    ),
    Mutant(
        "series are sums of their stretches",
        "trace/command.py",
        "(sums / np.diff(at, append=len(series)))",
        "sums",
        COMMAND,
    ),
    Mutant(
        "a block of one sequence and one of another are the first one's",
        "drawing/pool_map.py",
        "alone = (first == last) & (last != NOBODY)",
        "alone = last != NOBODY",
        POOL_MAP,
    ),
    Mutant(
        "K without V",
        "memory/sizing.py",
        "return 2 * num_layers",
        "return num_layers",
        SIZES,
    ),
]

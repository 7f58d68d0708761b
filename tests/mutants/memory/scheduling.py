"""The scheduler."""

from ..mutant import Mutant

PLAIN = ("tests/scheduling/test_machine.py::TestPlainMachine",)
PREFIX = ("tests/scheduling/test_machine.py::TestPrefixMachine",)
CASES = ("tests/scheduling/test_scheduler.py",)
FILE = "scheduling/scheduler.py"
ADMISSION = "scheduling/admission.py"

MUTANTS = [
    Mutant(
        "the first of the running requests gives its blocks back",
        ADMISSION,
        "self._preempt(running.requests[running.lanes[-1]])",
        "self._preempt(running.requests[running.lanes[0]])",
        PLAIN,
        ci=True,
    ),
    Mutant(
        "a step has more tokens than the budget",
        ADMISSION,
        "np.maximum(self._budget - len(more) - before, 0)",
        "np.maximum(self._budget - before, 0)",
        PLAIN,
    ),
    Mutant(
        "a chunk is sampled before the prompt ends",
        FILE,
        "is_sampled = ends == running.lens[lanes]",
        "is_sampled = ends >= running.lens[lanes] - 1",
        PLAIN,
    ),
    Mutant(
        "a request that gave its blocks back is lost",
        ADMISSION,
        "        self._waiting.push(request)\n        self.num_preempted += 1\n",
        "        self.num_preempted += 1\n",
        PLAIN,
    ),
    Mutant(
        "priorities do not age",
        FILE,
        "return self._num_steps + priority * self._aging",
        "return priority * self._aging",
        CASES,
    ),
    Mutant(
        "a request starts beside others without room for its prompt",
        ADMISSION,
        "reserve = reserved + (self._watermark if len(running) else 0)",
        "reserve = self._watermark if len(running) else 0",
        PLAIN,
    ),
    Mutant(
        "a request starts without room for its prompt",
        "memory/rows.py",
        "            self.pool._require(self.num_taken(num_tokens, shared) + reserve, self.pool.num_free)\n",
        "",
        PLAIN,
    ),
    Mutant(
        "a step that is dropped keeps its slots",
        FILE,
        "            self._cache.truncate(running.seqs[lanes], running.num_computed[lanes])\n",
        "",
        PLAIN,
    ),
    Mutant(
        "the token of a request that was aborted goes to another one",
        FILE,
        "ids[alive[step._is_sampled]]",
        "ids[: np.count_nonzero(step._is_sampled & alive)]",
        PLAIN,
    ),
    Mutant(
        "the blocks of a request that was aborted are free while the step writes them",
        FILE,
        "if found.lane != NOT_RUNNING and self._step is not None:",
        "if False:",
        CASES,
    ),
    Mutant(
        "a sequence keeps what a failed step has appended",
        FILE,
        "            cache.truncate(seqs, starts)  #",
        "            #",
        CASES,
    ),
    Mutant(
        "a common beginning is computed by all at once",
        ADMISSION,
        "if request is None or self._is_being_computed(request):",
        "if request is None:",
        CASES,
    ),
    Mutant(
        "a chunk can be found before it is computed",
        FILE,
        "        self._cache.commit(running.seqs[lanes])\n",
        "",
        CASES,
    ),
]

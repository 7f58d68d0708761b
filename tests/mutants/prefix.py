"""The prefix cache."""

from .mutant import Mutant

MACHINE = ("tests/memory/prefix/test_machine.py::TestPrefixMachine",)
CASES = ("tests/memory/prefix/test_prefix_cache.py", "tests/memory/prefix/test_hooks.py")
COLLIDING = ("tests/memory/prefix/test_machine.py::TestCollidingMachine",)

MUTANTS = [
    Mutant(
        "a collision serves other tokens",
        "memory/prefix/cache.py",
        "self._rows()[blocks] == rows[: len(blocks)]",
        "blocks[:, None] == blocks[:, None]",
        COLLIDING,
        ci=True,
    ),
    Mutant(
        "a collision serves tokens behind others",
        "memory/prefix/cache.py",
        "            same[1:] &= self._parents[blocks[1:]] == self._serials[blocks[:-1]]\n",
        "",
        COLLIDING,
    ),
    Mutant(
        "salts share their blocks where digests collide",
        "memory/prefix/cache.py",
        "            same[0] &= self._parents[blocks[0]] == _root_numbers(_keys([root]))[0]\n",
        "",
        COLLIDING,
    ),
    Mutant(
        "a part of a block behind another one is found",
        "memory/prefix/cache.py",
        " or self._parents[behind] != self._serials[block]:",
        ":",
        CASES,
        ci=True,
    ),
    Mutant(
        "a part of a block is found that cannot be found any longer",
        "memory/prefix/cache.py",
        " or not self._serials[behind] or",
        " or",
        CASES,
    ),
    Mutant(
        "a block is evicted for its copy",
        "memory/rows.py",
        "stays = num_new <= self.pool._num_blank or self.pool._refs[block]",
        "stays = True",
        CASES,
    ),
    Mutant(
        "a last token that is found in part of a block is not computed",
        "memory/rows.py",
        "prompt.tokens[num_found:-1])",
        "prompt.tokens[num_found:])",
        CASES,
    ),
    Mutant(
        "a copy overwrites what can be found before the commit",
        "memory/rows.py",
        "findable = destinations[self.prefix_cache.is_findable(destinations)]",
        "findable = destinations[:0]",
        CASES,
    ),
    Mutant(
        "a block that can be found is written",
        "memory/copy_on_write.py",
        "        forgotten = forgotten[pool._prefix_cache.is_findable(forgotten)]\n",
        "        forgotten = forgotten[:0]\n",
        MACHINE,
        ci=True,
    ),
    Mutant(
        "blocks are found before the commit",
        "memory/rows.py",
        "first, full = chains.num_found[rows], chains.num_known[rows] // self.block_size",
        "first, full = chains.num_found[rows], -(-chains.num_known[rows] // self.block_size)",
        MACHINE,
    ),
    Mutant(
        "all of a prompt is found",
        "memory/rows.py",
        "        if num_found < prompt.num_tokens:\n",
        "        if num_found <= prompt.num_tokens:\n",
        MACHINE,
    ),
    Mutant(
        "the first block of a sequence is evicted first",
        "memory/prefix/cache.py",
        'np.argsort(-self._serials[blocks], kind="stable")',
        'np.argsort(self._serials[blocks], kind="stable")',
        MACHINE,
        ci=True,
    ),
    Mutant(
        "a block that is used again is evicted",
        "memory/prefix/eviction.py",
        "            others = ~self._tally.among(evicted, blocks)\n",
        "            others = np.full(len(evicted), True)\n",
        CASES,
    ),
    Mutant(
        "what was evicted is found",
        "memory/prefix/cache.py",
        "        writes: list[Write] = [(self._serials, removed, np.zeros(len(removed), np.int64))]\n",
        "        writes: list[Write] = []\n",
        MACHINE,
    ),
    Mutant(
        "a search ends where a block was removed",
        "memory/prefix/index.py",
        "np.full(len(removed), _REMOVED, np.int32)",
        "np.full(len(removed), NO_BLOCK, np.int32)",
        COLLIDING + MACHINE,
    ),
    Mutant(
        "identical blocks stay two",
        "memory/rows.py",
        "(self._entries, entries[other], stored.kept[other].astype(np.int32)),\n",
        "",
        MACHINE,
    ),
    Mutant(
        "unknown tokens are taken for those before them",
        "memory/rows.py",
        "np.where(known == lens, ends, known)",
        "ends",
        MACHINE,
    ),
    Mutant(
        "truncated sequences keep what they could be found by",
        "memory/prefix/chains.py",
        "np.minimum(self.num_found[rows], num_full)",
        "self.num_found[rows]",
        MACHINE,
    ),
    Mutant(
        "a copy has no tokens",
        "memory/rows.py",
        "                writes += self.prefix_cache.plan_copy(copies)\n",
        "                pass\n",
        CASES,
    ),
    Mutant(
        "after a reset old sequences are found",
        "memory/prefix/chains.py",
        "for state in (self.num_known, self.num_found)]",
        "for state in (self.num_found,)]",
        CASES,
    ),
]

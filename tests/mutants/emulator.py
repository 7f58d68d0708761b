"""The emulator: the order of accesses, races, barriers and copies."""

from .mutant import Mutant

WARPGROUP = "tests/emulator/machine/test_warpgroup.py::"
ORDER = "tests/emulator/state/test_order.py::"

MUTANTS = [
    Mutant(
        "emulator: a syncwarp of half a warp orders all of it",
        "        part = named != f.exists[lanes]\n",
        "        part = named != named\n",
        ORDER + "test_a_sync_of_half_a_warp_orders_the_lanes_that_it_names",
    ),
    Mutant(
        "emulator: a fence does not acquire",
        "            if what.acquire:\n",
        "            if what.acquire and not what.release:\n",
        ORDER + "test_barrier_fence_atomic_fence_barrier",
    ),
    Mutant(
        "emulator: a strong load acquires without a fence",
        "            clocks.find(lane, scope, flag)\n",
        "            clocks.known[lane], clocks.learned = joined(clocks.known[lane], flag[0]), True\n",
        ORDER + "test_flags_between_thread_blocks",
    ),
    Mutant(
        "emulator: only the last reader of a location counts",
        "            self.others[g[c]] = old[c]\n",
        "            pass\n",
        ORDER + "test_a_store_is_ordered_after_the_reads_of_two_thread_blocks",
    ),
    Mutant(
        "emulator: fence.acq_rel counts on the other side of a barrier",
        "(self.known, *self.sc_released, *self.sc_pending)",
        "(self.known, *self.released, *self.pending, *self.sc_released, *self.sc_pending)",
        ORDER + "test_fences_that_do_not",
    ),
    Mutant(
        "emulator: a strong store hides an earlier race",
        "            unordered[c] = ((last[c] & SEVERAL) != 0) | would_race(lanes[c], last[c])\n",
        "            unordered[c] = False\n",
        "tests/emulator/state/test_races.py::test_strong_stores_of_two_thread_blocks",
    ),
    Mutant(
        "emulator: cp.async does not read its source again when it ends",
        "            for copies in self.copies:\n",
        "            for copies in ():\n",
        "tests/emulator/machine/test_async_copy.py::test_a_store_to_the_source_of_a_copy_in_flight",
    ),
    Mutant(
        "emulator: syncwarps meet only at the same instruction",
        "            blocks[-1].sync, blocks[-1].at_any_barrier = kind, barrier\n",
        "            blocks[-1].sync = kind\n",
        "tests/emulator/machine/test_warp.py::test_a_full_sync_in_both_branches",
    ),
    Mutant(
        "emulator: a wgmma wait leaves nothing in flight",
        "if not x.age > keep}",
        "if False}",
        WARPGROUP + "test_a_group_that_was_not_waited_for_is_in_flight",
    ),
    Mutant(
        "emulator: a proxy fence covers the stores of other threads",
        "m[writer]",
        "np.ones(len(open_), np.bool_)",
        WARPGROUP + "test_stores_are_fenced_for_the_asynchronous_proxy",
    ),
]

"""The emulator: the order of accesses and races, warp barriers, copies, prints, traces; drawings of traces."""

from .mutant import Mutant

RACES = "tests/emulator/state/test_races.py::"
ORDERING = "tests/emulator/state/test_order.py::"
WARP = "tests/emulator/machine/test_warp.py::"
COPIES = "tests/emulator/machine/test_async_copy.py::"
MERGE = (ORDERING + "test_a_release_or_acquire_with_something_missing",)
MERGED = (ORDERING + "test_barrier_fence_atomic_fence_barrier",)
BETWEEN = (ORDERING + "test_flags_between_thread_blocks",)
INSIDE = (ORDERING + "test_flags_in_a_thread_block",)
HALVES = (ORDERING + "test_a_sync_of_half_a_warp_orders_the_lanes_that_it_names",)
BRANCHES = (WARP + "test_a_full_sync_in_both_branches",)
LOOPS = (WARP + "test_syncs_in_loops_that_the_halves_of_a_warp_run_apart",)
GRID = (ORDERING + "test_barriers_of_the_grid",)
READ_ONLY = (RACES + "test_a_store_after_a_read_only_load",)
READ_FIRST = (RACES + "test_a_plain_read_before_an_atomic",)
LARGE = ("tests/emulator/test_device.py::test_a_large_array_takes_memory_only_for_what_a_kernel_touches",)
HOST = ("tests/emulator/state/test_host_array.py",)
SIZES = ("tests/emulator/machine/test_launch.py::test_sizes_that_no_launch_has",)
PRINT = ("tests/emulator/machine/test_printing.py",)
TRACER = "tests/emulator/machine/test_tracer.py::"

ORDER, CLOCKS, DETECTORS = ("emulator/state/order.py", "emulator/state/clocks.py", "emulator/state/races.py")
UNORDERED = "emulator/state/unordered.py"

MUTANTS = [
    Mutant(
        "emulator: syncwarp orders the whole warp, whatever it names",
        ORDER,
        "        part = named != f.exists[lanes]\n",
        "        part = named != named\n",
        HALVES,
        ci=True,
    ),
    Mutant(
        "emulator: lanes that meet learn nothing but each other",
        ORDER,
        "            matrix[threads] = self.rows(lanes).max(0)\n",
        "            matrix[np.ix_(threads, threads)] = self.time[slot]\n",
        (ORDERING + "test_what_a_lane_learned_goes_on_with_the_next_sync",),
    ),
    Mutant(
        "emulator: a fence acquires nothing",
        ORDER,
        "            if what.acquire:\n",
        "            if what.acquire and not what.release:\n",
        MERGED,
    ),
    Mutant(
        "emulator: a strong load acquires without a fence",
        ORDER,
        "            clocks.find(lane, scope, flag)\n",
        "            clocks.known[lane], clocks.learned = joined(clocks.known[lane], flag[0]), True\n",
        BETWEEN,
        ci=True,
    ),
    Mutant(
        "emulator: a strong store releases without a fence",
        ORDER,
        "mine = now[lane // f.num_threads].clock_of(lane % f.num_threads) if op.release else None",
        "mine = self._snapshot(lane // f.num_threads).clock_of(lane % f.num_threads)",
        GRID,
    ),
    Mutant(
        "emulator: a fence of a thread block counts for the grid",
        ORDER,
        "(0, 1) if what.grid else (0,)",
        "(0, 1)",
        MERGE,
    ),
    Mutant(
        "emulator: a fence releases what the whole thread block did",
        CLOCKS,
        "        every = len(threads) == len(self.known)\n",
        "        every = True\n",
        MERGE,
    ),
    Mutant(
        "emulator: a barrier passes no clocks on",
        ORDER,
        "                self._share_clocks(self.frame.lanes[self._threads(slot)], [])\n",
        "                pass\n",
        MERGED,
    ),
    Mutant(
        "emulator: a compare-and-swap that fails releases",
        ORDER,
        " and (wrote is None or bool(wrote[i]))\n",
        "\n",
        (ORDERING + "test_a_compare_and_swap_that_fails_stores_nothing",),
    ),
    Mutant(
        "emulator: an atomic begins a new chain",
        ORDER,
        '            if op.kind == "store":  # begins',
        '            if op.kind != "load":  # begins',
        MERGED,
    ),
    Mutant(
        "emulator: flags in a thread block teach nothing",
        ORDER,
        "            if row is not None and (row > self.rows(mine)).any():\n",
        "            if row is None:\n",
        INSIDE,
    ),
    Mutant(
        "emulator: an atomic races with no read of another thread block",
        DETECTORS,
        '            self._check(op, off, lanes, block, read, strong_class, "read")\n',
        '            strong_class or self._check(op, off, lanes, block, read, strong_class, "read")\n',
        READ_FIRST,
    ),
    Mutant(
        "emulator: an atomic races with no read in its thread block",
        DETECTORS,
        "            self._check_readers(op, g, off, thread, floor, what)\n",
        "            strong_class or self._check_readers(op, g, off, thread, floor, what)\n",
        READ_FIRST,
    ),
    Mutant(
        "emulator: only the last reader of a location counts",
        DETECTORS,
        "            self.others[g[c]] = old[c]\n",
        "            pass\n",
        (ORDERING + "test_a_store_is_ordered_after_the_reads_of_two_thread_blocks",),
    ),
    Mutant(
        "emulator: a fence.acq_rel counts on the other side of a barrier",
        CLOCKS,
        "(self.known, *self.sc_released, *self.sc_pending)",
        "(self.known, *self.released, *self.pending, *self.sc_released, *self.sc_pending)",
        (ORDERING + "test_fences_that_do_not",),
        ci=True,
    ),
    Mutant(
        "emulator: a fence.sc does not",
        CLOCKS,
        "(self.known, *self.sc_released, *self.sc_pending)",
        "(self.known,)",
        (ORDERING + "test_fences_that_order_what_a_thread_block_wrote",),
    ),
    Mutant(
        "emulator: an acquire is one of all that was found before",
        ORDER,
        "        for pending in found:\n",
        "        for pending in (*found, *clocks.pending) if op.acquire else ():\n",
        (ORDERING + "test_an_acquire_is_of_its_own_location",),
    ),
    Mutant(
        "emulator: a reduction and a fence acquire",
        "emulator/translation/memory.py",
        ' and p[0] != "red"',
        "",
        (ORDERING + "test_a_reduction_acquires_nothing",),
    ),
    Mutant(
        "emulator: a fence of a proxy is one of memory",
        "emulator/translation/memory.py",
        "    if rest not in _FENCE_SCOPES:",
        "    if not rest:",
        (ORDERING + "test_fences_that_the_emulator_does_not_model",),
    ),
    Mutant(
        "emulator: the scope of a thread block is the grid's",
        DETECTORS,
        "        strong_class = op.strong_class if op.grid else 0\n",
        "        strong_class = op.strong_class\n",
        (RACES + "test_atomics_of_the_scope_of_a_thread_block",),
    ),
    Mutant(
        "emulator: strong accesses of different sizes do not race",
        "emulator/translation/mem_op.py",
        "self.strong_class = 1 + self.shift if",
        "self.strong_class = 1 if",
        (RACES + "test_strong_accesses_of_different_sizes",),
    ),
    Mutant(
        "emulator: a strong store replaces any other",
        UNORDERED,
        "            unordered[c] = ((last[c] & SEVERAL) != 0) | would_race(lanes[c], last[c])\n",
        "            unordered[c] = False\n",
        (RACES + "test_strong_stores_of_two_thread_blocks",),
    ),
    Mutant(
        "emulator: an atomic races with what it has replaced",
        DETECTORS,
        '            if strong_class and op.kind == "store":\n',
        "            if strong_class:\n",
        (RACES + "test_the_last_thread_block_resets_the_counter",),
    ),
    Mutant(
        "emulator: a store after a read-only load is one after any load",
        DETECTORS,
        "                self.reads[g] = mine | self._read_only\n",
        "                self._note_read(g, lanes, block, mine, strong_class)\n",
        READ_ONLY,
    ),
    Mutant(
        "emulator: another load hides a read-only one",
        DETECTORS,
        " if strong_class else old & self._read_only == 0\n",
        " if strong_class else old == old\n",
        READ_ONLY,
    ),
    Mutant(
        "emulator: atomics of one instruction run in another order than they are seen in",
        "emulator/machine/access.py",
        "            for j in range(len(element)):\n",
        "            for j in reversed(range(len(element))):\n",
        (RACES + "test_the_last_thread_block_resets_the_counter",),
    ),
    Mutant(
        "emulator: a cp.async reads when it is issued",
        "emulator/machine/access.py",
        "            for copies in self.copies:\n",
        "            for copies in ():\n",
        (COPIES + "test_a_store_to_the_source_of_a_copy_in_flight",),
    ),
    Mutant(
        "emulator: other thread blocks may store to the source of a cp.async in flight",
        "emulator/machine/async_copy.py",
        "                    self._read_again(ready, acc.global_races)\n",
        "                    pass\n",
        (COPIES + "test_another_thread_block_stores_to_the_source",),
    ),
    Mutant(
        "emulator: half a warp passes a barrier for all of it",
        "emulator/machine/barriers.py",
        "        if (counts < np.minimum(WARP_SIZE, f.num_threads - WARP_SIZE * each)).any():",
        "        if not len(counts):",
        (WARP + "test_a_named_barrier_of_half_warps",),
    ),
    Mutant(
        "emulator: a lane that has met runs on into the next barrier",
        "emulator/machine/warp_barriers.py",
        "            self.passed &= ~active\n",
        "",
        LOOPS,
    ),
    Mutant(
        "emulator: a lane may run what its own mask leaves out",
        "emulator/translation/warp.py",
        "    if mask not in FULL_MASKS:\n        t.emit",
        "    if not mask:\n        t.emit",
        (WARP + "test_a_lane_that_its_mask_leaves_out",),
    ),
    Mutant(
        "emulator: lanes that name different lanes meet",
        "emulator/machine/warp_barriers.py",
        "f.warp[lanes] << 32 | need[lanes]",
        "f.warp[lanes] << 32",
        BRANCHES,
    ),
    Mutant(
        "emulator: syncwarps meet at one instruction only",
        "emulator/ptx/program.py",
        "            blocks[-1].sync, blocks[-1].apart = kind, barrier\n",
        "            blocks[-1].sync = kind\n",
        BRANCHES,
        ci=True,
    ),
    Mutant(
        "emulator: two syncwarps in a row are one",
        "emulator/ptx/program.py",
        " or (barrier and blocks[-1].apart)):",
        "):",
        BRANCHES,
    ),
    Mutant(
        "emulator: an array is copied whole",
        "emulator/state/host_array.py",
        "PAGE_BYTES if nbytes > SMALL_BYTES else max(nbytes, 1)",
        "max(nbytes, 1)",
        LARGE,
    ),
    Mutant(
        "emulator: the gaps of a strided array can be read",
        "emulator/state/host_array.py",
        "            inside &= index < n\n",
        "",
        HOST,
    ),
    Mutant(
        "emulator: without the check of initialisation what is still on the host reads as zeros",
        "emulator/machine/access.py",
        "        if is_global and not (load and init_check):",
        "        if is_global and not load:",
        LARGE,
    ),
    Mutant(
        "emulator: negative shared memory",
        "emulator/machine/launch.py",
        'shared_bytes = _at_least(0, shared_bytes, "shared_bytes")',
        "shared_bytes = int(shared_bytes)",
        SIZES,
    ),
    Mutant(
        "emulator: every lane prints, whatever its branch",
        "emulator/machine/printing.py",
        "        lanes = f.lanes if m is None else np.flatnonzero(m)\n",
        "        lanes = f.lanes\n",
        PRINT,
    ),
    Mutant(
        "emulator: printed arguments stand one after the other",
        "emulator/machine/printing.py",
        "            offset = (offset + size - 1) // size * size\n",
        "",
        PRINT,
    ),
    Mutant(
        "emulator: a trace counts the lanes whose guard is false",
        "emulator/translation/steps.py",
        "{'m' if t.masked else 'None'},{t.mask})",
        "{'m' if t.masked else 'None'},{'m' if t.masked else 'None'})",
        (TRACER + "test_lanes_apart",),
        ci=True,
    ),
    Mutant(
        "emulator: a trace has the registers before the instruction",
        "emulator/translation/translate.py",
        "            self._instruction(t, ins)\n            if self._traced:\n                end_step(t, ins)\n",
        "            if self._traced:\n                end_step(t, ins)\n            self._instruction(t, ins)\n",
        (TRACER + "test_registers_lanes_and_bytes",),
    ),
    Mutant(
        "emulator: a traced warp is counted in the batch",
        "emulator/machine/tracer.py",
        "np.flatnonzero((frame.cta == cta) &",
        "np.flatnonzero((frame.cta_slot == cta) &",
        (TRACER + "test_whatever_batch_has_the_thread_block",),
    ),
    Mutant(
        "drawing: rows of bytes begin where the array does",
        "drawing/lane_map.py",
        "place = int(access.offsets[lane]) + phase, access.size",
        "place = int(access.offsets[lane]), access.size",
        ("tests/drawing/test_lane_map.py::test_rows_begin_where_the_device_s_do",),
    ),
    Mutant(
        "drawing: lanes that take one word conflict",
        "drawing/lane_map.py",
        "in_bank.setdefault(word % NUM_BANKS, []).append(word)",
        "in_bank.setdefault(word % NUM_BANKS, []).extend([word] * len(lanes_of[word]))",
        ("tests/drawing/test_lane_map.py::test_banks",),
    ),
]

"""wgmma: the emulator's rules, and the prefill kernel on warpgroups; its tests run in the emulator."""

from ..mutant import Mutant

WARPGROUP = "tests/emulator/machine/test_warpgroup.py::"
PROXY = (WARPGROUP + "test_stores_are_fenced_for_the_asynchronous_proxy",)
ASYNC = (WARPGROUP + "test_asynchronous_copies_are_fenced_too",)
GROUPS = (WARPGROUP + "test_a_group_that_was_not_waited_for_is_in_flight",)
STORES = (WARPGROUP + "test_operands_in_flight_are_not_overwritten",)

REGISTERS, RACES = "emulator/ptx/wgmma.py", "emulator/state/races.py"
PROXIES, OPERANDS = "emulator/state/proxies.py", "emulator/state/operands.py"
MACHINE = "emulator/machine/warpgroup.py"

PREFILL = "tests/kernels/prefill/test_wgmma.py::"
BOUND = (PREFILL + "test_every_form_meets_the_error_bound[emulator-64 dims]",)
TILES = (PREFILL + "test_a_prompt_of_several_tiles_of_rows_and_keys[emulator-64 dims]",)
PANELS = (PREFILL + "test_a_prompt_of_several_tiles_of_rows_and_keys[emulator-128 dims]",)
NEEDLE = (PREFILL + "test_a_needle_is_found_at_every_position_of_a_tile[emulator-64 dims]",)
PIVOTS = (PREFILL + "test_pivots_that_move_leave_other_rows_alone[emulator-64 dims]",)
CHOICE = (PREFILL + "test_the_kernel_is_chosen_by_device_and_config_alone[64 dims]",)
CODE = (PREFILL + "test_the_plain_loop_has_few_instructions_and_moves_nothing_between_products[128-float16]",)

LOOP, SHAPE = "kernels/prefill/tensor_cores/wgmma/loop.py", "kernels/prefill/tensor_cores/wgmma/shape.py"
PRODUCTS, CHAINS = "kernels/prefill/tensor_cores/wgmma/products.py", "kernels/device/intrinsics/warpgroup.py"

MUTANTS = [
    Mutant(
        "emulator, wgmma: a wait leaves nothing in flight",
        REGISTERS,
        "if not x.age > keep}",
        "if False}",
        GROUPS,
        ci=True,
    ),
    Mutant(
        "emulator, wgmma: a wait is for groups that are still open, too",
        REGISTERS,
        "if not x.age > keep}",
        "if not x.age >= keep}",
        GROUPS,
    ),
    Mutant(
        "emulator, wgmma: of two paths one decides what is touched",
        REGISTERS,
        "            self.touched.setdefault(name, ins)\n",
        "            pass\n",
        (WARPGROUP + "test_a_wgmma_fence_on_one_of_two_paths_is_not_enough",),
    ),
    Mutant(
        "emulator, wgmma: a fence of the proxy is for what other threads wrote",
        PROXIES,
        "m[writer]",
        "np.ones(len(open_), np.bool_)",
        PROXY,
    ),
    Mutant(
        "emulator, wgmma: a fence of the proxy behind the barrier counts for nobody",
        PROXIES,
        "            self._seen[slot, number] = order.seen[slot, number]\n",
        "            pass\n",
        PROXY,
    ),
    Mutant(
        "emulator, wgmma: what a cp.async has brought needs no fence",
        RACES,
        "self.reads[g] = -1\n            if self.fences is not None:",
        "self.reads[g] = -1\n            if False:",
        ASYNC,
    ),
    Mutant(
        "emulator, wgmma: operands are read at the beginning only",
        MACHINE,
        "            self._read(operands)  # as late as now\n",
        "            pass\n",
        STORES,
    ),
    Mutant(
        "emulator, wgmma: a group that is kept is done",
        OPERANDS,
        "(operands.groups < oldest_kept[operands.warps])",
        "(operands.groups < oldest_kept[operands.warps] + 2)",
        STORES,
    ),
    Mutant(
        "wgmma kernel: shared memory begins at any multiple of 128 bytes",
        "kernels/prefill/tensor_cores/wgmma/kernel.py",
        "make_attend(config, shape), GROUP,",
        "make_attend(config, shape), 128,",
        CODE,
    ),
    Mutant(
        "wgmma kernel: what was copied is not fenced for the products",
        LOOP,
        "        wait_all()\n        fence_proxy()\n        cuda.syncthreads()\n",
        "        wait_all()\n        cuda.syncthreads()\n",
        TILES,
        ci=True,
    ),
    Mutant(
        "wgmma kernel: fenced before it has come",
        LOOP,
        "        wait_all()\n        fence_proxy()\n        cuda.syncthreads()\n",
        "        fence_proxy()\n        wait_all()\n        cuda.syncthreads()\n",
        TILES,
    ),
    Mutant(
        "wgmma kernel: no barrier before a tile is used",
        LOOP,
        "        fence_proxy()\n        cuda.syncthreads()\n",
        "        fence_proxy()\n",
        TILES,
    ),
    Mutant(
        "wgmma kernel: products without a fence of registers",
        CHAINS,
        '    lines.append("wgmma.fence.sync.aligned;")\n',
        "",
        TILES,
    ),
    Mutant(
        "wgmma kernel: S is used while its product runs",
        PRODUCTS,
        "wait_for(shape.keys, 0), wait_for(shape.keys, 1)",
        "wait_for(shape.keys, 0), wait_for(shape.keys, 2)",
        TILES,
    ),
    Mutant(
        "wgmma kernel: O is rescaled while its product runs",
        PRODUCTS,
        "wait_for(config.head_dim, 0)",
        "wait_for(config.head_dim, 1)",
        TILES,
    ),
    Mutant(
        "wgmma kernel: P is rounded before the product that reads it has ended",
        LOOP,
        "            wait_values(registers.o)\n            if has_moved:\n                rescale(registers)\n"
        "            # Until here the product reads P.\n            round_p(registers)\n",
        "            round_p(registers)\n            wait_values(registers.o)\n            if has_moved:\n"
        "                rescale(registers)\n",
        CODE,
    ),
    Mutant(
        "wgmma kernel: the next V takes the place of the one that is read",
        LOOP,
        "copy_rows(uint32(v_place + stage), values",
        "copy_rows(uint32(uint32(v_place + TILE_BYTES) - stage), values",
        TILES,
    ),
    Mutant(
        "wgmma kernel: 8 rows of K and the next 8 are 512 bytes apart",
        PRODUCTS,
        "descriptor(descriptor_bits(UNIT, GROUP)), of_values",
        "descriptor(descriptor_bits(UNIT, GROUP // 2)), of_values",
        TILES,
    ),
    Mutant(
        "wgmma kernel: the next 64 dims of V are where the first ones are",
        PRODUCTS,
        "descriptor_bits(shape.panel_bytes, GROUP)",
        "descriptor_bits(GROUP, GROUP)",
        PANELS,
    ),
    Mutant(
        "wgmma kernel: products of Q stay in its first panel",
        SHAPE,
        "return panel * panel_bytes + step * 2 * CHUNK",
        "return step * 2 * CHUNK",
        PANELS,
    ),
    Mutant(
        "wgmma kernel: both warpgroups have the first one's rows",
        LOOP,
        "warp // uint32(WARPS)",
        "warp // uint32(2 * WARPS)",
        TILES,
    ),
    Mutant(
        "wgmma kernel: steps of V are 8 tokens",
        SHAPE,
        "2 * GROUP * i for i",
        "GROUP * i for i",
        NEEDLE,
    ),
    Mutant(
        "wgmma kernel: V is not transposed",
        CHAINS,
        "b, yes, 1, 1, 1",
        "b, yes, 1, 1, 0",
        NEEDLE,
    ),
    Mutant(
        "wgmma kernel: S is added to that of the tile before",
        CHAINS,
        "{'yes' if i else 'no'}",
        "{'yes'}",
        TILES,
    ),
    Mutant(
        "wgmma kernel: O is not rescaled",
        LOOP,
        "            if has_moved:\n                rescale(registers)\n",
        "",
        PIVOTS,
    ),
    Mutant(
        "wgmma kernel: chosen for every device",
        "cuda/plans/prefill.py",
        "return capability == (9, 0) and is_on(WGMMA)",
        "return is_on(WGMMA)",
        CHOICE,
    ),
    Mutant(
        "wgmma kernel: a setting changes no plan that is kept",
        "cuda/plans/cache.py",
        '_SETTINGS = ("PAGEDKV_CHECK", WGMMA)',
        '_SETTINGS = ("PAGEDKV_CHECK",)',
        ("tests/cuda/plans/test_cache.py::test_the_kernel_on_warpgroups_is_asked_for_by_the_environment",),
    ),
]

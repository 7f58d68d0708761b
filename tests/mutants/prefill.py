"""The prefill kernels; the tests run in the emulator."""

from .mutant import Mutant

USUAL, FEW_ROWS = "[emulator-prefill-tensor cores]", "[emulator-prefill-few rows, tensor cores]"
DRAWN = "tests/attention/test_oracle.py::test_drawn_problems_meet_the_error_bound"
PIVOTS = "tests/attention/test_same_bits.py::test_a_row_has_the_same_bits_in_any_chunk" + USUAL
WGMMA_STAGES = "tests/kernels/prefill/test_wgmma.py::test_stages_are_used_again[emulator-wgmma-128 dims]"
WGMMA_ITEMS = (
    "tests/kernels/prefill/test_wgmma.py::"
    "test_the_thread_block_that_takes_an_item_changes_no_bits[emulator-wgmma-128 dims]"
)
SPLIT_NEEDLE = "tests/attention/test_needles.py::test_a_needle_brings_exactly_its_own_value" + FEW_ROWS
STRETCHED_ALONE = (
    "tests/kernels/prefill/test_stretches.py::"
    "test_a_row_has_the_same_bits_whoever_computes_its_stretches[emulator-prefill-stretches-one column]"
)

MUTANTS = [
    Mutant(
        "prefill: no barrier before a tile is used",
        "            wait_all()\n            cuda.syncthreads()\n            is_followed",
        "            wait_all()\n            is_followed",
        DRAWN + USUAL,
    ),
    Mutant(
        "prefill: nobody waits for the copies of a tile",
        "            wait_all()\n            cuda.syncthreads()\n            is_followed",
        "            cuda.syncthreads()\n            is_followed",
        DRAWN + USUAL,
    ),
    Mutant(
        "prefill: no barrier after fp8 rows are converted",
        "lane, warp)\n                cuda.syncthreads()\n            elif",
        "lane, warp)\n            elif",
        DRAWN + "[emulator-prefill-fp8]",
    ),
    Mutant(
        "prefill: the pivot of a row moves with its neighbour's",
        "        new = multiply_and_add(float32(-largest), unit, BIAS) if is_above else old\n",
        "        new = multiply_and_add(float32(-largest), unit, BIAS)\n",
        PIVOTS,
    ),
    Mutant(
        "prefill: the output is not rescaled when the pivot moves",
        "            rescale(registers)\n\n    return update_pivots\n",
        "\n    return update_pivots\n",
        PIVOTS,
    ),
    Mutant(
        "prefill: the window is one key too wide",
        "int32(position) - int32(visible.before)",
        "int32(position) - int32(visible.before) - int32(1)",
        "tests/attention/test_lengths.py::test_windows_at_the_boundaries[emulator-prefill-CUDA cores]",
    ),
    Mutant(
        "prefill: causal attention sees one later key",
        "uint32(position + uint32(visible.after))",
        "uint32(position + uint32(visible.after) + uint32(1))",
        DRAWN + "[emulator-prefill-CUDA cores]",
    ),
    Mutant(
        "prefill: lengths out of range are not checked",
        "is_valid = length <= uint32(max_seq_len) and query_len <= length",
        "is_valid = True",
        "tests/attention/test_wrong_entries.py::"
        "test_a_wrong_length_that_nobody_checks_counts_as_0_and_harms_no_later_call" + USUAL,
    ),
    Mutant(
        "prefill split: K is used before other lanes have copied it",
        "            sync_lanes(warp)\n            multiply_keys",
        "            multiply_keys",
        DRAWN + FEW_ROWS,
    ),
    Mutant(
        "prefill split: the second piece of a tile is the first one again",
        "uint32(first + PIECE * i)",
        "first",
        SPLIT_NEEDLE,
    ),
    Mutant(
        "prefill split: states are merged without their pivots",
        "            weight = weight_of(pivot, maximum)\n",
        "            weight = float32(1)\n",
        SPLIT_NEEDLE,
    ),
    Mutant(
        "prefill stretches: a thread block begins the next stretch while others use the last tile of this one",
        "            cuda.syncthreads()  # the stretch before has read what is in shared memory\n",
        "",
        STRETCHED_ALONE,
    ),
    Mutant(
        "prefill stretches: states are folded without their pivots",
        "return both, exp2(float32(both - before)), exp2(float32(both - shift))",
        "return both, float32(1), float32(1)",
        STRETCHED_ALONE,
    ),
    Mutant(
        "prefill stretches: they begin at the first key that rows of the tile see",
        "key = uint32(uint32(first + number) * uint32(stretch))",
        "key = uint32(low + number * uint32(stretch))",
        STRETCHED_ALONE,
    ),
    Mutant(
        "prefill stretches: a workspace has room for the states of this call alone",
        "    return max(num_tiles, min(num_tiles * most, MOST_STATES))\n",
        "    return num_tiles * columns_and_states(num_tiles, most)[1]\n",
        "tests/kernels/prefill/test_stretches.py::test_a_workspace_has_room_for_every_state",
    ),
    Mutant(
        "wgmma: copies are not fenced before the products",
        "        wait_all()\n        fence_proxy()\n        full.tell(mine)\n",
        "        wait_all()\n        full.tell(mine)\n",
        WGMMA_STAGES,
    ),
    Mutant(
        "wgmma: products do not wait for what the other warpgroup copies",
        "            full.wait(mine)\n            turn.wait",
        "            full.tell(uint32(mine ^ 1))\n            turn.wait",
        WGMMA_STAGES,
    ),
    Mutant(
        "wgmma: copies do not wait until the other warpgroup has read a stage",
        "            free.wait(mine)\n            copy_ahead",
        "            free.tell(uint32(mine ^ 1))\n            copy_ahead",
        WGMMA_STAGES,
    ),
    Mutant(
        "wgmma: a warpgroup does not wait for its turn",
        "            turn.wait(group)\n            multiply_keys",
        "            multiply_keys",
        WGMMA_STAGES,
    ),
    Mutant(
        "wgmma: a thread block takes an item before all have read the last one",
        "            cuda.syncthreads()\n            item, kv_head = load(where, batch)\n",
        "            item, kv_head = load(where, batch)\n",
        WGMMA_STAGES,
    ),
    Mutant(
        "wgmma: the counter of items does not end a launch at 0",
        "uint32(num_items - 1))\n                        number",
        "uint32(num_items))\n                        number",
        WGMMA_ITEMS,
    ),
    Mutant(
        "wgmma: a lane loads chunks of a row before others have stored their words",
        "        sync_warp()\n        for_each(store_chunk",
        "        for_each(store_chunk",
        WGMMA_STAGES,
    ),
    Mutant(
        "wgmma: ptxas moves the wait for products up among the exponentials",
        "            softmax.finish_exponentials(registers)\n",
        "",
        "tests/kernels/prefill/test_wgmma.py::"
        "test_the_plain_loop_has_few_instructions_and_moves_nothing_between_products[256-float16]",
    ),
]

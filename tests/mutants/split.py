"""Kernel split: fragments, splits and their merge; the tests run in the emulator."""

from .mutant import Mutant

SPLIT = "tests/kernels/split/test_split.py::"
ATTENTION = "tests/attention/"
USUAL = "[emulator-split-D64-G4-P16-float16-float16]"
NEEDLE = ATTENTION + "test_needles.py::test_a_needle_brings_exactly_its_own_value" + USUAL
LENGTHS = ATTENTION + "test_lengths.py::test_lengths_at_the_boundaries" + USUAL
CUDA_CORES = ATTENTION + "test_lengths.py::test_lengths_at_the_boundaries[emulator-split-D64-G3-P16-float32-float32]"
COUNTERS = SPLIT + "test_counters_are_ready_for_the_next_launch" + USUAL
UNITS = SPLIT + "test_the_thread_block_that_computes_a_unit_changes_no_bits" + USUAL
STAGES = (
    "tests/kernels/split/test_many.py::test_the_last_stage_may_have_any_number_of_tokens"
    "[emulator-split-D64-G17-P16-float16-float16]"
)

MUTANTS = [
    Mutant(
        "split: dims of V are in the wrong rows of a fragment",
        "return permute(v0, v1, 0x5410), permute(v0, v1, 0x7632), ",
        "return permute(v0, v1, 0x7632), permute(v0, v1, 0x5410), ",
        NEEDLE,
    ),
    Mutant(
        "split: lanes take K tokens in the order of lanes",
        "return uint32((uint32(g >> 1) << 2) + (g & 1))",
        "return uint32(g << 1)",
        NEEDLE,
    ),
    Mutant(
        "split: the second K token is the wrong one",
        "uint32(token + TILE * i + 2)",
        "uint32(token + TILE * i + 1)",
        NEEDLE,
    ),
    Mutant(
        "split: the sum of weights is not rescaled when the maximum grows",
        "            sums[h] = float32(sums[h] * factor)\n",
        "",
        SPLIT + "test_logits_that_rise_slowly_overflow_nothing_and_leave_other_heads_alone"
        "[emulator-split-D64-G8-P16-float16-fp8_e4m3-modified]",
    ),
    Mutant(
        "split: tokens past the end are not masked",
        "        if valid != ALL:\n            softmax.mask(registers.s, uint32(valid >> uint32(t << 2)))\n",
        "",
        LENGTHS,
    ),
    Mutant(
        "split: pivots do not follow the scales of int8 values",
        "exponents[i] = min(larger(log2(abs(scales[i])), LEAST_EXPONENT), MOST_EXPONENT)",
        "exponents[i] = float32(0)",
        ATTENTION + "test_options.py::test_scales_of_rows_from_a_ten_thousandth_to_ten_thousand"
        "[emulator-split-D64-G8-P16-float16-int8]",
    ),
    Mutant(
        "split: pivots follow the scale of another int8 value",
        "multiply_and_add(y, units[h], exponents[2 * n + 1])",
        "multiply_and_add(y, units[h], exponents[2 * n])",
        ATTENTION + "test_options.py::test_a_value_counts_by_its_weight_times_its_scale"
        "[emulator-split-D64-G8-P16-float16-int8]",
    ),
    Mutant(
        "split: tokens past the end are not masked on CUDA cores",
        "            scores.mask(s, values, valid, group)\n            update(",
        "            update(",
        CUDA_CORES,
    ),
    Mutant(
        "split: the output is not rescaled on CUDA cores",
        "o[h * ELEMENTS + j] = float32(o[h * ELEMENTS + j] * factor)",
        "o[h * ELEMENTS + j] = float32(o[h * ELEMENTS + j])",
        CUDA_CORES,
    ),
    Mutant(
        "split: the sums of a warp replace Q, which others still read",
        "q_shared, token = uint32(shared.address + SUMS_BYTES + lane * 16)",
        "q_shared, token = uint32(shared.address + lane * 16)",
        LENGTHS,
    ),
    Mutant(
        "split: no barrier before the sums of warps are added",
        "                cuda.syncthreads()\n                output = output_of(",
        "                output = output_of(",
        LENGTHS,
    ),
    Mutant(
        "split: a split takes the first token of the next one",
        "min(uint32(first + size - 1), ",
        "min(uint32(first + size), ",
        LENGTHS,
    ),
    Mutant(
        "split: the window is one key too wide",
        "first_key_of_last(length, visible)",
        "first_key_of_last(uint32(length - 1), visible)",
        ATTENTION + "test_lengths.py::test_windows_at_the_boundaries" + USUAL,
    ),
    Mutant(
        "split: tiles of heads overlap",
        "kv_head * GROUP_SIZE + tile * NUM_HEADS",
        "kv_head * GROUP_SIZE + tile * (NUM_HEADS - 1)",
        ATTENTION + "test_oracle.py::test_drawn_problems_meet_the_error_bound"
        "[emulator-split-D64-G71-P1-float16-fp8_e4m3-modified]",
    ),
    Mutant(
        "split: no fence before a thread block counts itself done",
        "    if thread == 0:\n        fence()\n",
        "",
        COUNTERS,
    ),
    Mutant(
        "split: the thread block that merges does not acquire what others have published",
        "store_shared_word(count_word, count_up_and_acquire(counter, last))",
        "store_shared_word(count_word, count_up(counter, last))",
        COUNTERS,
    ),
    Mutant(
        "split: a thread block counts itself done before its last stores",
        "    cuda.syncthreads()\n    if thread == 0:\n",
        "    if thread == 0:\n",
        COUNTERS,
    ),
    Mutant(
        "split: the counter ends at a number that depends on the length",
        "uint32(most_splits - 1)\n",
        "uint32(num_splits - 1)\n",
        ATTENTION
        + "test_wrong_entries.py::test_a_wrong_length_that_nobody_checks_counts_as_0_and_harms_no_later_call"
        + USUAL,
    ),
    Mutant(
        "split: the last partial result is left out of the merge",
        "while i < count:\n            for_each(load_state, 1,",
        "while i + 1 < count:\n            for_each(load_state, 1,",
        LENGTHS,
    ),
    Mutant(
        "split: entries are prefetched past the end of the block table",
        "prefetch_l2(table + int64(min(entry, last_entry)) * 4)",
        "prefetch_l2(table + int64(entry) * 4)",
        SPLIT + "test_a_thread_block_prefetches_the_entries_of_its_split_beside_the_length",
    ),
    Mutant(
        "split: no barrier before shared memory is used for the next unit",
        "            if PERSISTENT:\n                cuda.syncthreads()",
        "            if PERSISTENT:\n                pass",
        UNITS,
    ),
    Mutant(
        "split: lengths are read once",
        "if turn % NUM_LENGTHS == 0:",
        "if turn == 0:",
        SPLIT + "test_a_thread_block_reads_lengths_again_when_it_has_used_all",
    ),
    Mutant(
        "split: the entries of the next unit are those of a sequence of the greatest length",
        "prefetch_entries(thread, number, lengths[turn % NUM_LENGTHS], places)",
        "prefetch_entries(thread, number, uint32(max_seq_len), places)",
        SPLIT + "test_a_thread_block_prefetches_the_entries_of_its_split_beside_the_length",
    ),
    Mutant(
        "split: a thread block takes the same columns again",
        "uint32(number + uint32(cuda.gridDim.x)) if",
        "uint32(number + uint32(num_columns)) if",
        UNITS,
    ),
    Mutant(
        "split: one sequence alone fills half a GPU",
        "FULL_GRID = 128 ",
        "FULL_GRID = 64 ",
        "tests/kernels/split/test_split_plan.py::test_splits_keep_half_of_a_large_gpu_busy_where_there_is_work",
    ),
    Mutant(
        "split: no barrier before a stage is used",
        "            wait_for_oldest()\n            cuda.syncthreads()\n",
        "            wait_for_oldest()\n",
        STAGES,
    ),
    Mutant(
        "split: tokens of the last stage past the end are not masked",
        "            if valid != ALL:\n                softmax.mask(registers.s, uint32(valid >> uint32(t << 2)))\n",
        "",
        STAGES,
    ),
]

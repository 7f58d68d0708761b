"""Mutants of kernel split; the tests run in the emulator."""

from .mutant import Mutant

SPLIT = "tests/kernels/split/test_split.py::"
LENGTHS = (SPLIT + "test_lengths_at_the_boundaries[emulator-tensor cores]",)
CORES_LENGTHS = (SPLIT + "test_lengths_at_the_boundaries[emulator-CUDA cores]",)
LONG = (SPLIT + "test_long_sequences_have_longer_splits_and_never_more_than_a_warp_merges[emulator-2048-tensor cores]",)
NEEDLE = (SPLIT + "test_a_needle_is_found_at_every_position_of_a_step[emulator-D64-G4-P16-float16-float16]",)
FP8_NEEDLE = (SPLIT + "test_a_needle_is_found_at_every_position_of_a_step[emulator-D64-G8-P16-float16-fp8_e4m3]",)
COUNTERS = (SPLIT + "test_counters_are_ready_for_the_next_launch[emulator-tensor cores]",)
WINDOWS = (SPLIT + "test_windows_over_the_edges_of_splits[emulator-tensor cores]",)
EXACT = (SPLIT + "test_float32_queries_lose_nothing_to_16_bit_operands[emulator-float16]",)
CODES = (SPLIT + "test_every_fp8_code_is_its_value[emulator-fp8_e4m3-capability0]",)
NEGATIVE = (SPLIT + "test_caches_whose_strides_are_negative[emulator-tensor cores]",)
BAD_BLOCK = (SPLIT + "test_a_bad_block_id_is_skipped_and_recorded[emulator-1000000-tensor cores]",)
BAD_LENGTH = (SPLIT + "test_a_bad_length_is_skipped_and_recorded[emulator-1000000-tensor cores]",)
LARGE = (SPLIT + "test_caches_of_more_than_4_gib[D64-G4-P16-float16-float16]",)
BOUND = SPLIT + "test_every_variant_meets_the_error_bound[emulator-"
TWO_HEAD_TILES = (BOUND + "D128-G16-P16-bfloat16-bfloat16]",)
NO_POSITIVE_SCALE = (SPLIT + "test_scales_that_are_not_positive[emulator-D64-G4-P16-float16-float16]",)
NO_POSITIVE_SCALE_OF_TERMS = (SPLIT + "test_scales_that_are_not_positive[emulator-D256-G12-P16-float32-float16]",)
PAST_THE_END = "test_score_mod_sees_no_position_past_the_end_and_no_head_that_does_not_exist"
NOTHING_PAST_THE_END = (SPLIT + PAST_THE_END + "[emulator-D264-G71-P16-float16-float16]",)
FULL = (BOUND + "D256-G12-P16-float32-float16]",)
SIDE_BY_SIDE = (BOUND + "D64-G71-P1-float16-fp8_e4m3-modified]",)
THROUGH_SHARED = (BOUND + "D128-G16-P16-float16-float16-modified-cc8.0]",)
MANY = "tests/kernels/split/test_many.py::"
TAILS = (MANY + "test_the_last_stage_may_have_any_number_of_tokens[emulator-D64-G17-P16-float16-float16]",)
STAGE_NEEDLE = (MANY + "test_a_needle_is_found_at_every_position_of_a_stage[emulator-D64-G17-P16-float16-float16]",)
HEADS_OF_WARPS = (MANY + "test_the_heads_of_every_warp[emulator-17]",)
BANKS = (MANY + "test_lanes_keep_out_of_each_others_banks[D64-G17-P16-float16-float16]",)
SLOWLY = "test_logits_that_rise_slowly_overflow_nothing_and_leave_other_heads_alone"
RISING = (SPLIT + SLOWLY + "[emulator-D64-G4-P16-float16-float16]",)
STRIDED = (SPLIT + "test_k_and_v_have_strides_of_their_own[emulator-tensor cores]",)

FRAGMENTS, SOFTMAX, SUMS = "kernels/split/fragments.py", "kernels/split/softmax.py", "kernels/split/sums.py"
TENSOR, CORES, MERGE = "kernels/split/tensor.py", "kernels/split/cuda_cores.py", "kernels/split/merge.py"
KERNEL, LANES, QUERY = "kernels/split/kernel.py", "kernels/split/lanes.py", "kernels/split/query.py"
MANY_HEADS, STAGES, PLAN = "kernels/split/many.py", "kernels/split/stages.py", "cuda/plans/split.py"

MUTANTS = [
    Mutant(
        "split: dims of V in the wrong rows of a fragment",
        FRAGMENTS,
        "return permute(v0, v1, 0x5410), permute(v0, v1, 0x7632), ",
        "return permute(v0, v1, 0x7632), permute(v0, v1, 0x5410), ",
        NEEDLE,
    ),
    Mutant(
        "split: lanes take their K tokens in the order of lanes",
        FRAGMENTS,
        "return uint32(uint32(uint32(g >> 1) << uint32(2)) + uint32(g & 1))",
        "return uint32(g << 1)",
        NEEDLE,
    ),
    Mutant(
        "split: rescaling leaves out the sum of exponentials",
        SOFTMAX,
        "            sums[h] = float32(sums[h] * factor)\n",
        "",
        RISING,
    ),
    Mutant(
        "split: tokens past the end are not selected away",
        TENSOR,
        "        if valid != ALL:\n            mask(s, valid, t)\n",
        "",
        LENGTHS,
    ),
    Mutant(
        "split: no barrier before warps are added up",
        KERNEL,
        "        cuda.syncthreads()\n\n        if IS_FULL:",
        "\n        if IS_FULL:",
        LENGTHS,
    ),
    Mutant(
        "split: no fence after a partial result",
        MERGE,
        "        fence()\n        cuda.syncthreads()\n",
        "        cuda.syncthreads()\n",
        COUNTERS,
    ),
    Mutant(
        "split: the counter is not reset",
        MERGE,
        "count_up(counter, uint32(num_splits - uint32(1)))",
        "count_up(counter, uint32(0xFFFFFFFF))",
        COUNTERS,
    ),
    Mutant(
        "split: a split takes the next one's first token, too",
        KERNEL,
        "min(uint32(first + uint32(size - uint32(1))), ",
        "min(uint32(first + size), ",
        LENGTHS,
    ),
    Mutant(
        "split: a window of one token more",
        KERNEL,
        "visible = min(length, uint32(window))",
        "visible = min(length, uint32(uint32(window) + uint32(1)))",
        WINDOWS,
    ),
    Mutant(
        "split: tiles of heads overlap",
        KERNEL,
        "uint32(kv_head * uint32(GROUP_SIZE)) + uint32(tile * uint32(NUM_HEADS))",
        "uint32(kv_head * uint32(GROUP_SIZE)) + uint32(tile * uint32(NUM_HEADS - 1))",
        SIDE_BY_SIDE,
    ),
]

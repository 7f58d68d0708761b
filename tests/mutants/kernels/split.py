"""Kernel split, from a warp's operands to its sums; the tests run in the emulator."""

from ..mutant import Mutant

ALIKE = "tests/kernels/test_decode.py::"
SPLIT = "tests/kernels/split/test_split.py::"
LENGTHS = (SPLIT + "test_lengths_at_the_boundaries[emulator-tensor cores]",)
CORES_LENGTHS = (SPLIT + "test_lengths_at_the_boundaries[emulator-CUDA cores]",)
LONG = (
    SPLIT + "test_long_sequences_have_longer_splits_and_never_more_than_a_warp_merges[emulator-800-64-tensor cores]",
)
NEEDLE = (SPLIT + "test_a_needle_is_found_at_every_position_of_a_step[emulator-split-D64-G4-P16-float16-float16]",)
FP8_NEEDLE = (SPLIT + "test_a_needle_is_found_at_every_position_of_a_step[emulator-split-D64-G8-P16-float16-fp8_e4m3]",)
EXACT = (SPLIT + "test_float32_queries_lose_nothing_to_16_bit_operands[emulator-split-D128-G5-P24-float32-float16]",)
CODES = (SPLIT + "test_every_fp8_code_is_its_value[emulator-split-D72-G8-P16-float16-fp8_e4m3-cc8.0]",)
BOUND = SPLIT + "test_every_variant_meets_the_error_bound[emulator-split-"
TWO_HEAD_TILES = (BOUND + "D128-G12-P16-bfloat16-fp8_e4m3]",)
NO_POSITIVE_SCALE = (SPLIT + "test_scales_that_are_not_positive[emulator-split-D64-G4-P16-float16-float16]",)
NO_POSITIVE_SCALE_OF_TERMS = (
    SPLIT + "test_scales_that_are_not_positive[emulator-split-D256-G12-P16-float32-bfloat16]",
)
SEEN = "test_score_mod_sees_what_exists_and_may_mask_every_key"
NOTHING_PAST_THE_END = (SPLIT + SEEN + "[emulator-split-D64-G4-P16-float16-float16-seeing]",)
THROUGH_SHARED = (BOUND + "D256-G8-P16-float16-float16-modified-cc8.0]",)
SLOWLY = "test_logits_that_rise_slowly_overflow_nothing_and_leave_other_heads_alone"
RISING = (SPLIT + SLOWLY + "[emulator-split-D64-G8-P16-float16-fp8_e4m3]",)

HALVES = "kernels/device/halves.py"
FRAGMENTS = "kernels/split/tensor_cores/fragments.py"
SOFTMAX = "kernels/split/tensor_cores/softmax.py"
SUMS = "kernels/split/sums.py"
TENSOR = "kernels/split/tensor_cores/few_heads.py"
CORES = "kernels/split/cuda_cores.py"
LANES = "kernels/split/lanes.py"
QUERY = "kernels/split/tensor_cores/query.py"

MUTANTS = [
    Mutant(
        "split: the second term of q is the first one again",
        QUERY,
        "        rest[at], rest[at + 1] = float32(rest[at] - low), float32(rest[at + 1] - high)\n",
        "",
        EXACT,
    ),
    Mutant(
        "split: fragments of q have the sign of q where the scale is negative",
        QUERY,
        "uint32(SIGNS) if is_negative else uint32(0), rows",
        "uint32(0), rows",
        NO_POSITIVE_SCALE,
    ),
    Mutant(
        "split: terms of q have the sign of q where the scale is negative",
        QUERY,
        "side = float32(-1) if is_negative else float32(1)",
        "side = float32(1)",
        NO_POSITIVE_SCALE_OF_TERMS,
    ),
    Mutant(
        "split: dims of V in the wrong rows of a fragment",
        FRAGMENTS,
        "return permute(v0, v1, 0x5410), permute(v0, v1, 0x7632), ",
        "return permute(v0, v1, 0x7632), permute(v0, v1, 0x5410), ",
        NEEDLE,
        ci=True,
    ),
    Mutant(
        "split: lanes take their K tokens in the order of lanes",
        FRAGMENTS,
        "return uint32((uint32(g >> 1) << 2) + (g & 1))",
        "return uint32(g << 1)",
        NEEDLE,
        ci=True,
    ),
    Mutant(
        "split: pairs of fp8 of V exchanged",
        FRAGMENTS,
        "uint32(0x7362) if z else uint32(0x5140)",
        "uint32(0x5140) if z else uint32(0x7362)",
        FP8_NEEDLE,
    ),
    Mutant(
        "split: halves of a k16 step of K exchanged",
        FRAGMENTS,
        "return words[at + 2 * step], words[at + 2 * step + 1]",
        "return words[at + 2 * step + 1], words[at + 2 * step]",
        LENGTHS,
    ),
    Mutant(
        "split: the second K token is the next one",
        FRAGMENTS,
        "uint32(token + TILE * i + 2)",
        "uint32(token + TILE * i + 1)",
        NEEDLE,
    ),
    Mutant(
        "split: e4m3 without the instruction knows no NaN",
        HALVES,
        "magnitude + 0x01000100",
        "magnitude + 0x00000000",
        CODES,
    ),
    Mutant(
        "split: the second term of P is left out",
        FRAGMENTS,
        "        mma(o, into, a, p_rest[b], p_rest[b + 1])\n",
        "",
        EXACT,
    ),
    Mutant(
        "split: O is rescaled by another head's factor",
        LANES,
        "return shuffle_float(x, even), shuffle_float(x, odd)",
        "return shuffle_float(x, odd), shuffle_float(x, even)",
        RISING,
    ),
    Mutant(
        "split: no barrier of the warp before its lanes read from each other",
        LANES,
        "    store_shared_word(where, x)\n    warps.sync_warp()\n",
        "    store_shared_word(where, x)\n",
        THROUGH_SHARED,
    ),
    Mutant(
        "split: no barrier of the warp before what lanes have read is replaced",
        LANES,
        "    warps.sync_warp()  # every lane has read what was there\n",
        "",
        THROUGH_SHARED,
    ),
    Mutant(
        "split: rescaling leaves out the sum of exponentials",
        SOFTMAX,
        "            sums[h] = float32(sums[h] * factor)\n",
        "",
        RISING,
        ci=True,
    ),
    Mutant(
        "split: odd steps of folded fragments read from the wrong rows",
        SOFTMAX,
        "raw[8 * n + k] + raw[8 * n + 6 + k]",
        "raw[8 * n + k] + raw[8 * n + 4 + k]",
        LENGTHS,
    ),
    Mutant(
        "split: a scale of 0 leaves masked logits NaN",
        SOFTMAX,
        "positive(LOG2E if MODIFIED else float32(factors[h] * LOG2E))",
        "LOG2E if MODIFIED else float32(factors[h] * LOG2E)",
        NO_POSITIVE_SCALE,
    ),
    Mutant(
        "split: O is rescaled, and the pivot stays",
        SOFTMAX,
        "            shifts[h] = shift\n",
        "",
        LENGTHS,
    ),
    Mutant(
        "split: the maximum may be exceeded by more than float16 has",
        SOFTMAX,
        "MOST_EXCESS = 3",
        "MOST_EXCESS = 6",
        RISING,
    ),
    Mutant(
        "split: the pivot of a head moves when that of another one does",
        SOFTMAX,
        "new if multiply_and_add(largest[h], units[h], shifts[h]) > SLACK else shifts[h]",
        "new",
        RISING,
    ),
    Mutant(
        "split: a warp without tokens sees the last one",
        SOFTMAX,
        "uint32(last - base + 1) if base <= last else uint32(0)",
        "uint32(last - base + 1)",
        LENGTHS,
    ),
    Mutant(
        "split: score_mod sees positions past the end",
        SOFTMAX,
        "min(uint32(position + TILE * (n // 2) + 2 * (n % 2) + k), options.q_pos)",
        "uint32(position + TILE * (n // 2) + 2 * (n % 2) + k)",
        NOTHING_PAST_THE_END,
    ),
    Mutant(
        "split: score_mod sees heads that do not exist",
        SOFTMAX,
        "uint32(query.head + mine) if mine < query.num_heads else query.head",
        "uint32(query.head + mine)",
        NOTHING_PAST_THE_END,
    ),
    Mutant(
        "split: tokens past the end are not selected away",
        TENSOR,
        "        if valid != ALL:\n            softmax.mask(registers.s, uint32(valid >> uint32(t << 2)))\n",
        "",
        LENGTHS,
        ci=True,
    ),
    Mutant(
        "split: no barrier after Q is in shared memory",
        TENSOR,
        "options.scale)\n        cuda.syncthreads()\n",
        "options.scale)\n",
        TWO_HEAD_TILES,
    ),
    Mutant(
        "split: no barrier before the sums take the place of Q",
        TENSOR,
        "        cuda.syncthreads()  # the sums replace Q\n",
        "        pass\n",
        TWO_HEAD_TILES,
    ),
    Mutant(
        "split: tokens are looked up one step ahead instead of two",
        TENSOR,
        "uint32(base + mine + 2 * TURN)",
        "uint32(base + mine + TURN)",
        LONG,
    ),
    Mutant(
        "split: CUDA cores do not select tokens past the end away",
        CORES,
        "            scores.mask(s, values, valid, group)\n            update(",
        "            update(",
        CORES_LENGTHS,
    ),
    Mutant(
        "split: CUDA cores do not rescale O",
        CORES,
        "o[h * ELEMENTS + j] = float32(o[h * ELEMENTS + j] * factor)",
        "o[h * ELEMENTS + j] = float32(o[h * ELEMENTS + j])",
        CORES_LENGTHS,
    ),
    Mutant(
        "split: the last step of adding up groups of lanes is left out",
        CORES,
        "        for b in range(FIRST, 5):\n            x = ",
        "        for b in range(FIRST, 4):\n            x = ",
        CORES_LENGTHS,
    ),
    Mutant(
        "split: lanes that add up warps meet in banks",
        SUMS,
        "(upper * 3)",
        "(upper << 1)",
        ("tests/machine_code/test_run.py::test_split_is_within_its_targets",),
    ),
    Mutant(
        "device: what is or-ed over a warp is and-ed",
        "kernels/device/intrinsics/warp.py",
        "redux.sync.or.b32",
        "redux.sync.and.b32",
        ("tests/kernels/device/test_warp.py::test_or_of_warp_is_of_all_lanes_of_the_own_warp",),
    ),
    Mutant(
        "split: rows of the table are max_blocks apart",
        "cuda/plans/split.py",
        "call.block_tables.strides[0], *call.q",
        "call.block_tables.shape[1] * 4, *call.q",
        (ALIKE + "test_tables_have_strides_of_their_own[emulator-tensor cores]",),
    ),
]

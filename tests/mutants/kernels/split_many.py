"""Kernel split with many query heads for a KV head; the tests run in the emulator."""

from ..mutant import Mutant

ALIKE = "tests/kernels/test_decode.py::"
SPLIT = "tests/kernels/split/test_split.py::"
SEEN = "test_score_mod_sees_what_exists_and_may_mask_every_key"
BOUND = SPLIT + "test_every_variant_meets_the_error_bound[emulator-split-"
MANY = "tests/kernels/split/test_many.py::"
TAILS = (MANY + "test_the_last_stage_may_have_any_number_of_tokens[emulator-split-D64-G17-P16-float16-float16]",)
HEADS_OF_WARPS = (MANY + "test_the_heads_of_every_warp[emulator-17]",)
BANKS = (MANY + "test_lanes_keep_out_of_each_others_banks[split-D64-G17-P16-float16-float16]",)

SUMS = "kernels/split/sums.py"
MANY_HEADS = "kernels/split/tensor_cores/many_heads.py"
STAGES = "kernels/split/tensor_cores/stages.py"

MUTANTS = [
    Mutant(
        "split: warps of a team leave sums of heads that do not exist",
        SUMS,
        "(IS_EVEN or uint32(first_head + head) < uint32(NUM_HEADS))",
        "True",
        HEADS_OF_WARPS,
    ),
    Mutant(
        "split: what pads a row in shared memory is anything",
        STAGES,
        "        if IS_PADDED:\n",
        "        if IS_PADDED and shared == 1:\n",
        (BOUND + "D72-G48-P16-float32-fp8_e5m2]",),
    ),
    Mutant(
        "split: rows of K in the same banks",
        STAGES,
        "return (self.shape.k_vectors | 1) * K_VECTOR",
        "return self.shape.k_vectors * K_VECTOR",
        BANKS,
    ),
    Mutant(
        "split: rows of V in the same banks",
        STAGES,
        "return 4 * self.v_stride + (BANKS_BYTES // 4 - 4 * self.v_stride) % BANKS_BYTES",
        "return 4 * self.v_stride",
        BANKS,
    ),
    Mutant(
        "split: a stage is used before all threads have its rows",
        MANY_HEADS,
        "            wait_for_oldest()\n            cuda.syncthreads()\n",
        "            wait_for_oldest()\n",
        TAILS,
    ),
    Mutant(
        "split: a stage is used before its copies are there",
        MANY_HEADS,
        "wait_but(AHEAD - 1), wait_but(0)",
        "wait_but(AHEAD), wait_but(0)",
        TAILS,
    ),
    Mutant(
        "split: the sums do not wait for the last copies",
        MANY_HEADS,
        "        wait_for_all()\n",
        "",
        TAILS,
    ),
    Mutant(
        "split: copies overwrite the stage in use",
        MANY_HEADS,
        "copy_rows(youngest, found",
        "copy_rows(oldest, found",
        TAILS,
    ),
    Mutant(
        "split: the ring of stages has no end",
        MANY_HEADS,
        "            oldest = ring if oldest == ring_end else oldest\n",
        "",
        TAILS,
    ),
    Mutant(
        "split: tokens of a stage past the end are not masked",
        MANY_HEADS,
        "            if valid != ALL:\n                softmax.mask(registers.s, uint32(valid >> uint32(t << 2)))\n",
        "",
        TAILS,
    ),
    Mutant(
        "split: warps of a team share a head",
        MANY_HEADS,
        "min(uint32(warp * NUM_HEADS), query.num_heads)",
        "min(uint32(warp * (NUM_HEADS - 1)), query.num_heads)",
        HEADS_OF_WARPS,
    ),
    Mutant(
        "split: score_mod is told the heads of the team's first warp",
        MANY_HEADS,
        "uint32(query.head + first_head)",
        "query.head",
        (SPLIT + SEEN + "[emulator-split-D112-G18-P16-float16-float16-seeing]",),
    ),
]

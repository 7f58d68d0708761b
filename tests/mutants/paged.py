"""Kernels v1 and v2; the tests run in the emulator."""

from .mutant import Mutant

ATTENTION = "tests/attention/"
V1 = "[emulator-v1-D64-P16-float32-float32]"
LENGTHS = ATTENTION + "test_lengths.py::test_lengths_at_the_boundaries" + V1
V2_LENGTHS = ATTENTION + "test_lengths.py::test_lengths_at_the_boundaries[emulator-v2-D64-P8-float16-float16]"

MUTANTS = [
    Mutant(
        "v1: no barrier after q is copied to shared memory",
        "cuda.threadIdx.x)\n        cuda.syncthreads()\n",
        "cuda.threadIdx.x)\n",
        LENGTHS,
    ),
    Mutant(
        "v1: the token after the last one is visible",
        "token_idx < last_token\n            qk",
        "token_idx <= last_token\n            qk",
        LENGTHS,
    ),
    Mutant(
        "v1: offsets of K have 32 bits",
        "k = address(k_cache) + physical_block_number * k_block_stride",
        "k = address(k_cache) + int64(int32(physical_block_number * k_block_stride))",
        ATTENTION + "test_strides.py::test_caches_of_more_than_4_gib[v1-D64-P16-float32-float32]",
    ),
    Mutant(
        "v2: a partition ends one token early",
        "min(seq_len, start + PARTITION_SIZE)",
        "min(seq_len, start + PARTITION_SIZE - 1)",
        V2_LENGTHS,
    ),
    Mutant(
        "v1: the window is one key too wide",
        "int64(first_key_of_last(uint32(seq_len), visible)), seq_len",
        "int64(first_key_of_last(uint32(seq_len - 1), visible)), seq_len",
        ATTENTION + "test_lengths.py::test_windows_at_the_boundaries" + V1,
    ),
    Mutant(
        "v1: no barrier between warps in the block's maximum and sum",
        "        cuda.syncthreads()\n        value = red_smem[lane % NUM_WARPS]\n",
        "        value = red_smem[lane % NUM_WARPS]\n",
        LENGTHS,
    ),
    Mutant(
        "v1: the sum of weights is their maximum",
        "_make_over_block(larger), _make_over_block(_plus)",
        "_make_over_block(larger), _make_over_block(larger)",
        LENGTHS,
    ),
    Mutant(
        "v1: the sink is left out",
        "block_sum(red_smem, exp_sum) + exp_minus(sink, qk_max)",
        "block_sum(red_smem, exp_sum)",
        ATTENTION + "test_options.py::test_each_option_alone_and_all_of_them" + V1,
    ),
    Mutant(
        "v1: no barrier before the sums of other warps are overwritten",
        "            cuda.syncthreads()\n            mid //= 2",
        "            mid //= 2",
        LENGTHS,
    ),
    Mutant(
        "v1: values past the end are multiplied by 0",
        "select(load_vec(v + row_idx * v_row_stride), masks)",
        "load_vec(v + row_idx * v_row_stride)",
        LENGTHS,
    ),
    Mutant(
        "v2: no barrier before the reduction reads its weights",
        "            weights[thread_idx] = weight\n            cuda.syncthreads()\n",
        "            weights[thread_idx] = weight\n",
        V2_LENGTHS,
    ),
]

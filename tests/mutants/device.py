"""Mutants of the CUDA kernels and of their planning; the tests run in the emulator."""

from .mutant import Mutant

V1_V2 = "tests/kernels/paged/test_v1_v2.py::"
OPTIONS = "tests/kernels/paged/test_v1_v2_options.py::"
LENGTHS = (V1_V2 + "test_lengths_at_the_boundaries[emulator-v1-D64-P16-float32-float32]",)
V2_LENGTHS = (V1_V2 + "test_lengths_at_the_boundaries[emulator-v2-D64-P8-float16-float16]",)
NEEDLE = (V1_V2 + "test_a_needle_is_found_wherever_it_lies[emulator-v1-D64-P16-float32-float32]",)
LARGE = (V1_V2 + "test_caches_of_more_than_4_gib[v1-D64-P16-float32-float32]",)
LONG_BLOCKS = (V1_V2 + "test_every_variant_meets_the_error_bound[emulator-v1-D8-P64-bfloat16-bfloat16]",)
STRIDED = (V1_V2 + "test_every_variant_meets_the_error_bound[emulator-v1-D24-P8-float32-float32-strided]",)
BAD_BLOCK = (V1_V2 + "test_a_bad_block_id_is_skipped_and_recorded[emulator--1-v1-D64-P16-float32-float32]",)
BAD_LENGTH = (V1_V2 + "test_a_bad_length_is_skipped_and_recorded[emulator-1000000-v2-D64-P8-float16-float16]",)
EACH_OPTION = (OPTIONS + "test_each_option_alone_and_all_of_them[emulator-v1]",)
V2_EACH_OPTION = (OPTIONS + "test_each_option_alone_and_all_of_them[emulator-v2]",)
WINDOWS = (OPTIONS + "test_windows_over_the_edges_of_chunks_and_partitions[emulator-v1]",)
V2_WINDOWS = (OPTIONS + "test_windows_over_the_edges_of_chunks_and_partitions[emulator-v2]",)
STRIDES = (OPTIONS + "test_q_and_out_have_strides_of_their_own[emulator-v1]",)
SCALES = (OPTIONS + "test_scales_of_fp8[emulator-v1]",)
PARTITIONS = (OPTIONS + "test_more_partitions_than_the_reduction_has_threads[emulator]",)
WRITE = "tests/kernels/blocks/test_write_kv.py::"
SKIPPED_SLOT = (WRITE + "test_a_slot_that_is_not_there_is_skipped_and_reported_once[emulator]",)
LARGE_WRITE = (WRITE + "test_slots_past_2_31_elements[HND]",)
HEADS = (WRITE + "test_more_heads_than_a_grid_has_rows[emulator-NHD]",)
FP8_CODES = (WRITE + "test_fp8_codes_of_every_16_bit_pattern[emulator-fp8_e4m3-bfloat16-cc8.0]",)
HALVES = (WRITE + "test_float32_is_rounded_to_nearest_even[emulator-bfloat16]",)
COPY = ("tests/kernels/blocks/test_copy_blocks.py::test_many_layers_take_few_launches[emulator]",)
GATHER = "tests/kernels/blocks/test_gather_kv.py::"
FP8_GATHER = (GATHER + "test_every_fp8_code[emulator-fp8_e4m3-cc9.0]",)
SKIPPED_BLOCK = (GATHER + "test_a_block_that_is_not_there_is_skipped_and_reported[emulator-4]",)
NO_KEYS = ("tests/kernels/test_merge_states.py::test_states_without_keys[emulator-2]",)
MANY_STATES = ("tests/kernels/test_merge_states.py::test_states_without_keys[emulator-9]",)

MUTANTS = [
    # ---- barriers
    Mutant(
        "v1: no barrier after q is in shared memory",
        "kernels/paged/attention.py",
        "cuda.threadIdx.x)\n        cuda.syncthreads()\n",
        "cuda.threadIdx.x)\n",
        LENGTHS,
    ),
    Mutant(
        "v1: no barrier in the maximum, after the logits, and in the sum",
        "kernels/paged/softmax.py",
        "        cuda.syncthreads()\n        value = red_smem[lane % NUM_WARPS]\n",
        "        value = red_smem[lane % NUM_WARPS]\n",
        LENGTHS,
    ),
    Mutant(
        "v1: the sum is the maximum",
        "kernels/paged/softmax.py",
        "_make_over_block(larger), _make_over_block(_plus)",
        "_make_over_block(larger), _make_over_block(larger)",
        LENGTHS,
    ),
    Mutant(
        "v1: no barrier after the softmax",
        "kernels/paged/softmax.py",
        "    cuda.syncthreads()\n    return exp_sum",
        "    return exp_sum",
        LENGTHS,
    ),
    Mutant(
        "v1: sum and maximum in the same shared memory",
        "kernels/paged/attention.py",
        "sink, red_smem[NUM_WARPS:])",
        "sink, red_smem)",
        LENGTHS,
    ),
    Mutant(
        "v1: outputs overwrite logits that others still read",
        "kernels/paged/values.py",
        "        cuda.syncthreads()  # every warp has read its logits\n",
        "",
        LENGTHS,
    ),
    Mutant(
        "v1: no barrier before the sums of other warps are read",
        "kernels/paged/values.py",
        "            cuda.syncthreads()\n            if warp_idx < mid and is_first:",
        "            if warp_idx < mid and is_first:",
        LENGTHS,
    ),
    Mutant(
        "v1: no barrier before the sums of other warps are overwritten",
        "kernels/paged/values.py",
        "            cuda.syncthreads()\n            mid //= 2",
        "            mid //= 2",
        LENGTHS,
    ),
    Mutant(
        "v2: the reduction has no barrier before its weights are read",
        "kernels/paged/reduction.py",
        "            weights[thread_idx] = weight\n            cuda.syncthreads()\n",
        "            weights[thread_idx] = weight\n",
        V2_LENGTHS,
    ),
    Mutant(
        "v2: the reduction has no barrier before its weights are overwritten",
        "kernels/paged/reduction.py",
        "            cuda.syncthreads()\n        exp_sum = ",
        "        exp_sum = ",
        PARTITIONS,
    ),
    # ---- q . k
    Mutant(
        "v1: one token past the end is visible",
        "kernels/paged/attention.py",
        "token_idx < last_token and physical_block_number >= 0\n            qk",
        "token_idx <= last_token and physical_block_number >= 0\n            qk",
        LENGTHS,
    ),
    Mutant(
        "v1: KV head of the wrong group",
        "kernels/paged/attention.py",
        "uint32(head_idx) // uint32(group_size)",
        "uint32(head_idx) % uint32(group_size)",
        NEEDLE,
    ),
    Mutant(
        "v1: offsets of K in 32 bits",
        "kernels/paged/attention.py",
        "k = address(k_cache) + physical_block_number * k_block_stride",
        "k = address(k_cache) + int64(int32(physical_block_number * k_block_stride))",
        LARGE,
    ),
    Mutant(
        "v1: the first shuffle of a thread group is left out",
        "kernels/paged/keys.py",
        "mask = THREAD_GROUP_SIZE // 2",
        "mask = THREAD_GROUP_SIZE // 4",
        STRIDED,
    ),
    Mutant(
        "v1: a window of one key less",
        "kernels/paged/tables.py",
        "max(seq_len - window, 0), seq_len",
        "max(seq_len - window + 1, 0), seq_len",
        WINDOWS,
    ),
    Mutant(
        "v1: the sink is left out of the denominator",
        "kernels/paged/softmax.py",
        "block_sum(red_smem, exp_sum) + exp_minus(sink, qk_max)",
        "block_sum(red_smem, exp_sum)",
        EACH_OPTION,
    ),
    Mutant(
        "v1: no logit at all is not a number",
        "kernels/paged/softmax.py",
        "float32(0) if maximum == NONE else maximum",
        "maximum",
        LENGTHS,
    ),
    Mutant(
        "v1: values past the end are multiplied by 0",
        "kernels/paged/values.py",
        "select(load_vec(v + row_idx * v_row_stride), masks)",
        "load_vec(v + row_idx * v_row_stride)",
        LENGTHS,
    ),
    Mutant(
        "v2: a partition ends one token early",
        "kernels/paged/tables.py",
        "min(seq_len, start + PARTITION_SIZE)",
        "min(seq_len, start + PARTITION_SIZE - 1)",
        V2_LENGTHS,
    ),
    Mutant(
        "v2: partitions weigh their sums, whatever their maximum",
        "kernels/paged/reduction.py",
        "exp_sums[partition] * exp_minus(max_logits[partition], qk_max)",
        "exp_sums[partition]",
        V2_LENGTHS,
    ),
    Mutant(
        "v1: negative block ids pass",
        "kernels/paged/tables.py",
        "(block < 0 or block >= num_blocks)",
        "block >= num_blocks",
        BAD_BLOCK,
    ),
    Mutant(
        "write_kv: a negative slot is written",
        "kernels/blocks/write_kv.py",
        "if slot < 0:\n            return\n",
        "slot = max(slot, 0)\n",
        SKIPPED_SLOT,
    ),
    Mutant(
        "write_kv: offsets in 32 bits",
        "kernels/blocks/write_kv.py",
        "target = address(k_cache) + block * k_block_stride",
        "target = address(k_cache) + int64(types.int32(block * k_block_stride))",
        LARGE_WRITE,
    ),
    Mutant(
        "write_kv: values that are too large for fp8 become NaN",
        "kernels/device/conversions.py",
        '            builder.fcmp_ordered("<", size, ir.Constant(F32, largest)), size, ir.Constant(F32, largest)\n',
        '            builder.fcmp_ordered("<", size, ir.Constant(F32, largest)), size, ir.Constant(F32, 480.0)\n',
        FP8_CODES,
    ),
    Mutant(
        "copy_blocks: the last vector is left out",
        "kernels/blocks/copy_blocks.py",
        "if first + i * num_threads < num_vectors:",
        "if first + i * num_threads < num_vectors - 1:",
        COPY,
    ),
    Mutant(
        "gather_kv: fp8 codes without their scale",
        "kernels/blocks/gather_kv.py",
        "float_bits(float32(d * scale))",
        "float_bits(float32(d))",
        FP8_GATHER,
    ),
    Mutant(
        "merge_states: outputs of states without keys are multiplied by 0",
        "kernels/merge_states.py",
        "if weight != float32(0):",
        "if weight >= float32(0):",
        NO_KEYS,
    ),
]

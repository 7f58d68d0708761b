"""Kernels v1 and v2 and their plans; the tests run in the emulator."""

from ..mutant import Mutant

ALIKE = "tests/kernels/test_decode.py::"
V1_V2 = "tests/kernels/paged/test_v1_v2.py::"
OPTIONS = "tests/kernels/paged/test_v1_v2_options.py::"
LENGTHS = (V1_V2 + "test_lengths_at_the_boundaries[emulator-v1-D64-P16-float32-float32]",)
V2_LENGTHS = (V1_V2 + "test_lengths_at_the_boundaries[emulator-v2-D64-P8-float16-float16]",)
NEEDLE = (V1_V2 + "test_a_needle_is_found_wherever_it_lies[emulator-v1-D64-P16-float32-float32]",)
LARGE = (ALIKE + "test_caches_of_more_than_4_gib[v1]",)
LONG_BLOCKS = (V1_V2 + "test_every_variant_meets_the_error_bound[emulator-v1-D8-P64-bfloat16-bfloat16]",)
STRIDED = (V1_V2 + "test_every_variant_meets_the_error_bound[emulator-v1-D24-P8-float32-float32-strided]",)
BAD_LENGTH = (ALIKE + "test_a_bad_length_is_skipped_and_recorded[emulator-1000000-v2]",)
EACH_OPTION = (OPTIONS + "test_each_option_alone_and_all_of_them[emulator-v1]",)
V2_EACH_OPTION = (OPTIONS + "test_each_option_alone_and_all_of_them[emulator-v2]",)
WINDOWS = (OPTIONS + "test_windows_over_the_edges_of_chunks_and_partitions[emulator-v1]",)
V2_WINDOWS = (OPTIONS + "test_windows_over_the_edges_of_chunks_and_partitions[emulator-v2]",)
STRIDES = (ALIKE + "test_q_and_out_have_strides_of_their_own[emulator-v1]",)
TABLES = (ALIKE + "test_tables_have_strides_of_their_own[emulator-v1]",)
SCALES = (OPTIONS + "test_scales_of_fp8[emulator-v1-D112-P256-float32-fp8_e5m2-cc10.0]",)
PARTITIONS = (OPTIONS + "test_more_partitions_than_the_reduction_has_threads[emulator]",)

MUTANTS = [
    Mutant(
        "v1: no barrier after q is in shared memory",
        "kernels/paged/attention.py",
        "cuda.threadIdx.x)\n        cuda.syncthreads()\n",
        "cuda.threadIdx.x)\n",
        LENGTHS,
        ci=True,
    ),
    Mutant(
        "v1: sum and maximum in the same shared memory",
        "kernels/paged/attention.py",
        "sink, red_smem[NUM_WARPS:])",
        "sink, red_smem)",
        LENGTHS,
    ),
    Mutant(
        "v1: one token past the end is visible",
        "kernels/paged/attention.py",
        "token_idx < last_token\n            qk",
        "token_idx <= last_token\n            qk",
        LENGTHS,
        ci=True,
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
        ci=True,
    ),
    Mutant(
        "v1: all tokens of the last block are visible",
        "kernels/paged/attention.py",
        "first_token <= token_idx and token_idx < last_token\n            qk",
        "first_token <= token_idx\n            qk",
        LENGTHS,
    ),
    Mutant(
        "v1: offsets of V in 32 bits",
        "kernels/paged/attention.py",
        "v = address(v_cache) + physical_block_number * v_block_stride",
        "v = address(v_cache) + int64(int32(physical_block_number * v_block_stride))",
        LARGE,
    ),
    Mutant(
        "v1: rows of q with the strides of out",
        "kernels/paged/attention.py",
        "seq_idx * q_seq_stride + head_idx * q_head_stride",
        "seq_idx * out_seq_stride + head_idx * out_head_stride",
        STRIDES,
    ),
    Mutant(
        "v1: positions in a long block start again in every chunk",
        "kernels/paged/attention.py",
        "k += token_idx % BLOCK_SIZE * k_token_stride",
        "k += token_idx % CHUNK_SIZE * k_token_stride",
        LONG_BLOCKS,
    ),
    Mutant(
        "v1: the scale of K is left out",
        "kernels/paged/attention.py",
        "float32(float32(scale) * k_factor)",
        "float32(float32(scale) * float32(k_number))",
        SCALES,
    ),
    Mutant(
        "v2: every partition counts the sink",
        "kernels/paged/attention.py",
        "if not PARTITION_SIZE and address(sinks) != 0 and seq_len > 0:",
        "if address(sinks) != 0 and seq_len > 0:",
        V2_EACH_OPTION,
    ),
    Mutant(
        "v1: the LSE in base 2",
        "kernels/paged/attention.py",
        "qk_max + math.log(exp_sum)",
        "qk_max + math.log2(exp_sum)",
        LENGTHS,
    ),
    Mutant(
        "v1: a window of one key less",
        "kernels/paged/tables.py",
        "max(seq_len - window, 0), seq_len",
        "max(seq_len - window + 1, 0), seq_len",
        WINDOWS,
    ),
    Mutant(
        "v2: a partition ends one token early",
        "kernels/paged/tables.py",
        "min(seq_len, start + PARTITION_SIZE)",
        "min(seq_len, start + PARTITION_SIZE - 1)",
        V2_LENGTHS,
        ci=True,
    ),
    Mutant(
        "v1: a window of one key more",
        "kernels/paged/tables.py",
        "max(seq_len - window, 0), seq_len",
        "max(seq_len - window - 1, 0), seq_len",
        WINDOWS,
    ),
    Mutant(
        "v1: the first shuffle of a thread group is left out",
        "kernels/paged/keys.py",
        "mask = THREAD_GROUP_SIZE // 2",
        "mask = THREAD_GROUP_SIZE // 4",
        STRIDED,
    ),
    Mutant(
        "v1: the last shuffle of a thread group is left out",
        "kernels/paged/keys.py",
        "while mask >= 1:",
        "while mask > 1:",
        LENGTHS,
    ),
    Mutant(
        "v1: ALiBi counts from behind the query",
        "kernels/device/logits.py",
        "distance(k_pos - q_pos)",
        "distance(k_pos - q_pos - 1)",
        EACH_OPTION,
    ),
    Mutant(
        "v1: a softcap that does not grow again",
        "kernels/device/logits.py",
        "float32(softcap * float32(math.tanh(divide(score, softcap))))",
        "float32(math.tanh(divide(score, softcap)))",
        EACH_OPTION,
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
        ci=True,
    ),
    Mutant(
        "v1: no barrier after the softmax",
        "kernels/paged/softmax.py",
        "    cuda.syncthreads()\n    return exp_sum",
        "    return exp_sum",
        LENGTHS,
    ),
    Mutant(
        "v1: the sink is left out of the denominator",
        "kernels/paged/softmax.py",
        "block_sum(red_smem, exp_sum) + exp_minus(sink, qk_max)",
        "block_sum(red_smem, exp_sum)",
        EACH_OPTION,
        ci=True,
    ),
    Mutant(
        "v1: no logit at all is not a number",
        "kernels/paged/softmax.py",
        "float32(0) if maximum == NONE else maximum",
        "maximum",
        LENGTHS,
    ),
    Mutant(
        "v1: the maximum and the sum of half of each warp",
        "kernels/paged/softmax.py",
        "        mask = WARP_SIZE // 2\n",
        "        mask = WARP_SIZE // 4\n",
        NEEDLE,
    ),
    Mutant(
        "v1: the maximum and the sum of two warps for each two",
        "kernels/paged/softmax.py",
        "        mask = NUM_WARPS // 2\n",
        "        mask = NUM_WARPS // 4\n",
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
        "v1: values past the end are multiplied by 0",
        "kernels/paged/values.py",
        "select(load_vec(v + row_idx * v_row_stride), masks)",
        "load_vec(v + row_idx * v_row_stride)",
        LENGTHS,
    ),
    Mutant(
        "v1: values before the window are selected",
        "kernels/paged/values.py",
        "make_masks(first * BITS, last * BITS)",
        "make_masks(last * 0, last * BITS)",
        WINDOWS,
    ),
    Mutant(
        "v1: the first shuffle over the lanes of a row is left out",
        "kernels/paged/values.py",
        "mask = NUM_V_VECS_PER_ROW // 2",
        "mask = NUM_V_VECS_PER_ROW // 4",
        LENGTHS,
    ),
    Mutant(
        "v1: rows past the head dimension are handed on",
        "kernels/paged/values.py",
        "if row_idx < HEAD_DIM:\n            out_smem",
        "if row_idx >= 0:\n            out_smem",
        STRIDED,
    ),
    Mutant(
        "v1: the scale of V is left out",
        "kernels/paged/values.py",
        "float32(accs[i] * v_scale)",
        "float32(accs[i])",
        SCALES,
    ),
    Mutant(
        "v2: the reduction has no barrier before its weights are read",
        "kernels/paged/reduction.py",
        "            weights[thread_idx] = weight\n            cuda.syncthreads()\n",
        "            weights[thread_idx] = weight\n",
        V2_LENGTHS,
        ci=True,
    ),
    Mutant(
        "v2: the reduction has no barrier before its weights are overwritten",
        "kernels/paged/reduction.py",
        "            cuda.syncthreads()\n        exp_sum = ",
        "        exp_sum = ",
        PARTITIONS,
    ),
    Mutant(
        "v2: partitions weigh their sums, whatever their maximum",
        "kernels/paged/reduction.py",
        "exp_sums[partition] * exp_minus(max_logits[partition], qk_max)",
        "exp_sums[partition]",
        V2_LENGTHS,
    ),
    Mutant(
        "v2: a full last partition counts as one more",
        "kernels/paged/reduction.py",
        "(seq_len + PARTITION_SIZE - 1) // PARTITION_SIZE - ",
        "(seq_len // PARTITION_SIZE + 1) - ",
        V2_LENGTHS,
    ),
    Mutant(
        "v2: the first partitions come again after 128",
        "kernels/paged/reduction.py",
        "tmp_out[(first_partition + first + j) * HEAD_DIM",
        "tmp_out[(first_partition + j) * HEAD_DIM",
        PARTITIONS,
    ),
    Mutant(
        "v2: the reduction believes any length",
        "kernels/paged/reduction.py",
        "if seq_len < 0 or seq_len > max_seq_len:",
        "if seq_len < 0:",
        BAD_LENGTH,
    ),
    Mutant(
        "v1: shared memory for a window that begins with a chunk",
        "cuda/plans/attention.py",
        "((window + chunk - 2) // chunk + 1) * chunk",
        "((window + chunk - 1) // chunk) * chunk",
        WINDOWS,
    ),
    Mutant(
        "v2: partitions for a window that begins with one",
        "cuda/plans/attention.py",
        "(window + PARTITION_SIZE - 2) // PARTITION_SIZE + 1)",
        "(window + PARTITION_SIZE - 1) // PARTITION_SIZE)",
        V2_WINDOWS,
    ),
    Mutant(
        "v1: rows of the table are max_blocks apart",
        "cuda/plans/attention.py",
        "call.block_tables.strides[0] // call.block_tables.itemsize",
        "call.block_tables.shape[1]",
        TABLES,
    ),
    Mutant(
        "v1: every cache is contiguous inside of a head",
        "cuda/plans/attention.py",
        "packed=(*call.k_cache.strides[2:4], call.v_cache.strides[2]) == inner",
        "packed=inner is not None",
        STRIDED,
    ),
]

"""Mutants of kernel split and of its planning; the tests run in the emulator."""

from mutant import Mutant

SPLIT = "tests/kernels/test_split.py::"
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
SIDE_BY_SIDE = (BOUND + "D40-G48-P1-float32-float16]",)
THROUGH_SHARED = (BOUND + "D128-G16-P16-float16-float16-modified-cc8.0]",)
STRIDED = (SPLIT + "test_k_and_v_have_strides_of_their_own[emulator-tensor cores]",)

FRAGMENTS, SOFTMAX, SUMS = "kernels/split_fragments.py", "kernels/split_softmax.py", "kernels/split_sums.py"
TENSOR, CORES, MERGE = "kernels/split_tensor.py", "kernels/split_cuda_cores.py", "kernels/split_merge.py"
KERNEL, LANES, QUERY = "kernels/decode_split.py", "kernels/split_lanes.py", "kernels/split_query.py"
PLAN = "cuda/split.py"

MUTANTS = [
    # ---- fragments and lanes
    Mutant(
        "split: dims of V in the wrong rows of a fragment",
        FRAGMENTS,
        "return permute(v0, v1, 0x5410), permute(v0, v1, 0x7632), ",
        "return permute(v0, v1, 0x7632), permute(v0, v1, 0x5410), ",
        NEEDLE,
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
        "split: lanes take their K tokens in the order of lanes",
        FRAGMENTS,
        "token = uint32(uint32(uint32(g >> 1) << uint32(2)) + uint32(g & 1))",
        "token = uint32(g << 1)",
        NEEDLE,
    ),
    Mutant(
        "split: the second K token is the next one",
        FRAGMENTS,
        "uint32(token + uint32(TILE * i + 2))",
        "uint32(token + uint32(TILE * i + 1))",
        NEEDLE,
    ),
    Mutant(
        "split: odd steps of folded fragments read from the wrong rows",
        SOFTMAX,
        "raw[8 * n + k] + raw[8 * n + 6 + k]",
        "raw[8 * n + k] + raw[8 * n + 4 + k]",
        LENGTHS,
    ),
    Mutant(
        "split: O is rescaled by another head's factor",
        LANES,
        "return shuffle_float(x, even), shuffle_float(x, odd)",
        "return shuffle_float(x, odd), shuffle_float(x, even)",
        LENGTHS,
    ),
    Mutant(
        "split: e4m3 without the instruction knows no NaN",
        FRAGMENTS,
        "uint32(magnitude + uint32(0x01000100))",
        "uint32(magnitude + uint32(0x00000000))",
        CODES,
    ),
    # ---- precision
    Mutant(
        "split: the second term of P is left out",
        FRAGMENTS,
        "                    accumulate(o, into, a, p_rest[b], p_rest[b + 1])\n",
        "",
        EXACT,
    ),
    Mutant(
        "split: the second term of q is the first one again",
        QUERY,
        "x, y = float32(x - low), float32(y - high)",
        "x, y = float32(low), float32(high)",
        EXACT,
    ),
    Mutant(
        "split: the bias of P stays in the maximum",
        SUMS,
        "float32(maxima[h] - BIAS), total",
        "maxima[h], total",
        LENGTHS,
    ),
    # ---- softmax
    Mutant(
        "split: rescaling leaves out the sum of exponentials",
        SOFTMAX,
        "            sums[h] = float32(sums[h] * factor)\n",
        "",
        LENGTHS,
    ),
    Mutant(
        "split: O is rescaled, and the maximum stays",
        SOFTMAX,
        "            maxima[h] = new[h]\n",
        "",
        LENGTHS,
    ),
    Mutant(
        "split: tokens past the end are not selected away",
        TENSOR,
        "            mask(s, valid, t)\n            soften(",
        "            soften(",
        LENGTHS,
    ),
    Mutant(
        "split: CUDA cores do not select tokens past the end away",
        CORES,
        "            mask(s, values, valid, group)\n            update(",
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
    # ---- barriers, fences, counters
    Mutant(
        "split: no barrier before warps are added up",
        KERNEL,
        "        cuda.syncthreads()\n\n        v_factor",
        "\n        v_factor",
        LENGTHS,
    ),
    Mutant(
        "split: no barrier after Q is in shared memory",
        TENSOR,
        "        if Q_IN_SHARED:\n            cuda.syncthreads()\n\n",
        "\n",
        TWO_HEAD_TILES,
    ),
    Mutant(
        "split: no barrier before the sums take the place of Q",
        TENSOR,
        "            cuda.syncthreads()  # the sums take the place of Q\n",
        "            pass\n",
        TWO_HEAD_TILES,
    ),
    Mutant(
        "split: no barrier of the warp before its lanes read from each other",
        LANES,
        "    store_shared_word(where, x)\n    sync_warp()\n",
        "    store_shared_word(where, x)\n",
        THROUGH_SHARED,
    ),
    Mutant(
        "split: no barrier of the warp before what lanes have read is replaced",
        LANES,
        "    sync_warp()  # what was there has been read\n",
        "",
        THROUGH_SHARED,
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
        "split: the last but one to finish merges",
        MERGE,
        "if last[0] != uint32(num_splits - uint32(1)):",
        "if last[0] != uint32(num_splits - uint32(2)):",
        COUNTERS,
    ),
    Mutant(
        "split: the last partial result is left out",
        MERGE,
        "            while split < num_splits:",
        "            while split + 1 < num_splits:",
        LENGTHS,
    ),
    Mutant(
        "split: sequences of several splits have no sink",
        MERGE,
        "            sink = sink_of(sinks, head + h)\n",
        "            sink = NONE\n",
        LONG,
    ),
    # ---- tokens, heads, addresses
    Mutant(
        "split: a split takes the next one's first token, too",
        KERNEL,
        "min(uint32(first + uint32(size - uint32(1))), ",
        "min(uint32(first + size), ",
        LENGTHS,
    ),
    Mutant(
        "split: splits of long sequences begin as if they were short",
        KERNEL,
        "start = uint32(uint32(cuda.blockIdx.y) * size)",
        "start = uint32(uint32(cuda.blockIdx.y) * uint32(SHORTEST_SPLIT))",
        LONG,
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
    Mutant(
        "split: tokens are looked up one step ahead instead of two",
        TENSOR,
        "token = uint32(uint32(base + mine) + uint32(2 * NUM_TEAMS * STEP))",
        "token = uint32(uint32(base + mine) + uint32(NUM_TEAMS * STEP))",
        LONG,
    ),
    Mutant(
        "split: values are read with the head stride of K",
        KERNEL,
        "address(v_cache) + int64(kv_head) * v_head_stride",
        "address(v_cache) + int64(kv_head) * k_head_stride",
        STRIDED,
    ),
    Mutant(
        "split: offsets are never wide",
        PLAN,
        "return min(block, token) < 0 or last // vector >= 2**32",
        "return False",
        NEGATIVE,
    ),
    Mutant(
        "split: the vectors of a row are counted in 31 bits",
        "kernels/split_pages.py",
        "return base + int64(fetch(offset, lane, 0)) * VECTOR_BYTES",
        "return base + int64(uint32(fetch(offset, lane, 0) << uint32(4)))",
        LARGE,
    ),
    # ---- check=True
    Mutant(
        "split: tokens of a bad block are seen",
        TENSOR,
        "                if CHECKED and valid != ALL:\n                    mask(s, valid, t)\n",
        "",
        BAD_BLOCK,
    ),
    Mutant(
        "split: a bad length is not looked at",
        KERNEL,
        "if seq_len < 0 or seq_len > max_blocks * BLOCK_SIZE:",
        "if seq_len < 0:",
        BAD_LENGTH,
    ),
]

"""Kernel split, from a sequence to its splits and back; the tests run in the emulator."""

from ..mutant import Mutant

ALIKE = "tests/kernels/test_decode.py::"
SPLIT = "tests/kernels/split/test_split.py::"
LENGTHS = (SPLIT + "test_lengths_at_the_boundaries[emulator-tensor cores]",)
LONG = (
    SPLIT + "test_long_sequences_have_longer_splits_and_never_more_than_a_warp_merges[emulator-800-64-tensor cores]",
)
COUNTERS = (SPLIT + "test_counters_are_ready_for_the_next_launch[emulator-tensor cores]",)
UNCHECKED_LENGTH = (ALIKE + "test_a_bad_length_that_is_not_looked_at_harms_no_later_call[emulator-tensor cores]",)
CHANGING = (SPLIT + "test_lengths_that_change_under_a_running_call_harm_no_later_one[0-tensor cores]",)
FENCES = (SPLIT + "test_one_thread_of_a_block_fences_and_only_where_splits_are_merged",)
WINDOWS = (SPLIT + "test_windows_over_the_edges_of_splits[emulator-tensor cores]",)
NEGATIVE = (SPLIT + "test_caches_whose_strides_are_negative[emulator-tensor cores]",)
LARGE = (ALIKE + "test_caches_of_more_than_4_gib[tensor cores]",)
BOUND = SPLIT + "test_every_variant_meets_the_error_bound[emulator-split-"
SIDE_BY_SIDE = (BOUND + "D64-G71-P1-float16-fp8_e4m3-modified]",)
STRIDED = (SPLIT + "test_k_and_v_have_strides_of_their_own[emulator-tensor cores]",)

IDLE = ("tests/kernels/split/test_split_plan.py::test_splits_keep_half_of_a_large_gpu_busy_where_there_is_work",)
PARTIALS = ("tests/kernels/split/test_split_plan.py::test_partial_results_stay_small_beside_keys_and_values",)
AS_THE_HOST = (SPLIT + "test_a_sequence_leaves_as_many_partial_results_as_the_host_says[800-64]",)

MERGE = "kernels/split/merge.py"
KERNEL = "kernels/split/kernel.py"
LAST_BLOCK = "kernels/device/last_block.py"

MUTANTS = [
    Mutant(
        "split: ptxas does not know that all lanes agree on the number of splits",
        KERNEL,
        "        if num_splits == 0 and split_index == 0:\n",
        "        num_splits = uint32(0)\n"
        "        if visible > 0:\n"
        "            num_splits = uint32(uint32(uint32(visible - 1) // size) + 1)\n"
        "        elif split_index == 0:\n",
        ("tests/kernels/split/test_split_plan.py::test_loops_on_cuda_cores_have_no_code_for_lanes_that_diverge",),
    ),
    Mutant(
        "split: no barrier before warps are added up",
        KERNEL,
        "            cuda.syncthreads()\n            output = output_of(",
        "            output = output_of(",
        LENGTHS,
        ci=True,
    ),
    Mutant(
        "split: a split takes the next one's first token, too",
        KERNEL,
        "min(uint32(first + size - 1), ",
        "min(uint32(first + size), ",
        LENGTHS,
        ci=True,
    ),
    Mutant(
        "split: a window of one token more",
        KERNEL,
        "visible = min(length, uint32(window))",
        "visible = min(length, uint32(uint32(window) + uint32(1)))",
        WINDOWS,
        ci=True,
    ),
    Mutant(
        "split: tiles of heads overlap",
        KERNEL,
        "kv_head * GROUP_SIZE + tile * NUM_HEADS",
        "kv_head * GROUP_SIZE + tile * (NUM_HEADS - 1)",
        SIDE_BY_SIDE,
        ci=True,
    ),
    Mutant(
        "split: splits of long sequences begin as if they were short",
        KERNEL,
        "first, q_pos = uint32(length - visible + split_index * size)",
        "first, q_pos = uint32(length - visible + split_index * uint32(SHORTEST_SPLIT))",
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
        "split: a bad length is not looked at",
        KERNEL,
        "0 if seq_len < 0 or seq_len > max_seq_len else",
        "0 if seq_len < 0 else",
        UNCHECKED_LENGTH,
    ),
    Mutant(
        "split: the vectors of a row are counted in 31 bits",
        "kernels/split/pages.py",
        "return address_at(base, fetch(offset, lane, 0))",
        "return base + int64(uint32(fetch(offset, lane, 0) << uint32(4)))",
        LARGE,
    ),
    Mutant(
        "split: no fence before a thread block counts",
        LAST_BLOCK,
        "    if thread == 0:\n        fence()\n",
        "",
        COUNTERS,
        ci=True,
    ),
    Mutant(
        "split: no fence after a thread block has counted",
        LAST_BLOCK,
        "        if count == last:\n            fence()\n",
        "",
        COUNTERS,
    ),
    Mutant(
        "split: every thread of a block fences",
        LAST_BLOCK,
        "    if thread == 0:\n        fence()\n",
        "    fence()\n",
        FENCES,
    ),
    Mutant(
        "split: a thread block without a split fences",
        KERNEL,
        "            if num_splits > 1:\n                publish(thread)\n",
        "        if num_splits > 1:\n            publish(thread)\n",
        FENCES,
    ),
    Mutant(
        "split: every thread asks for its length",
        KERNEL,
        "        length = agreed[0]\n",
        "        length = length_of(seq_lens, seq, max_seq_len)\n",
        CHANGING,
    ),
    Mutant(
        "split: a thread block counts before its last stores",
        LAST_BLOCK,
        "    cuda.syncthreads()\n    if thread == 0:\n",
        "    if thread == 0:\n",
        COUNTERS,
    ),
    Mutant(
        "split: what a counter reaches depends on the length",
        LAST_BLOCK,
        "uint32(most_splits - 1)\n",
        "uint32(num_splits - 1)\n",
        UNCHECKED_LENGTH,
        ci=True,
    ),
    Mutant(
        "split: the last but one to finish merges",
        LAST_BLOCK,
        "return load_shared_word(told) == last",
        "return load_shared_word(told) == uint32(last - 1)",
        COUNTERS,
    ),
    Mutant(
        "split: the last partial result is left out",
        MERGE,
        "        while split < num_splits:",
        "        while split + 1 < num_splits:",
        LENGTHS,
    ),
    Mutant(
        "split: of threads that share dims, only the first adds its splits",
        MERGE,
        "                for n in range(SHARES - 1):",
        "                for n in range(SHARES - 2):",
        LENGTHS,
    ),
    Mutant(
        "split: threads that share dims do not wait for each other",
        MERGE,
        "        if SHARES > 1:\n            cuda.syncthreads()\n",
        "        if SHARES > 1:\n",
        LENGTHS,
    ),
    Mutant(
        "split: a sequence alone makes half a grid",
        "kernels/split/config.py",
        "FULL_GRID = 128 ",
        "FULL_GRID = 64 ",
        IDLE,
        ci=True,
    ),
    Mutant(
        "split: short splits have partial results twice as large",
        "kernels/split/config.py",
        "SHORT_SHARE, LONG_SHARE = 0.13, 0.04",
        "SHORT_SHARE, LONG_SHARE = 0.26, 0.04",
        PARTIALS,
    ),
    Mutant(
        "split: long splits have partial results twice as large",
        "kernels/split/config.py",
        "SHORT_SHARE, LONG_SHARE = 0.13, 0.04",
        "SHORT_SHARE, LONG_SHARE = 0.13, 0.08",
        PARTIALS,
    ),
    Mutant(
        "split: the kernel has other splits than the host",
        KERNEL,
        "32 - FULL_GRID.bit_length()",
        "33 - FULL_GRID.bit_length()",
        AS_THE_HOST,
    ),
    Mutant(
        "split: sequences of several splits have no sink",
        MERGE,
        "            sink = sink_of(output.sinks, output.head + h)\n",
        "            sink = NONE\n",
        LONG,
    ),
    Mutant(
        "split: offsets are never wide",
        "cuda/plans/plan.py",
        "return min(block, token) < 0 or last // vector >= 2**32",
        "return False",
        NEGATIVE,
    ),
]

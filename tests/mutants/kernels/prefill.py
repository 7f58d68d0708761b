"""The prefill kernels; the tests run in the emulator."""

from ..mutant import Mutant

PREFILL = "tests/kernels/prefill/test_prefill.py::"
INVARIANCE = "tests/kernels/prefill/test_invariance.py::"
TABLES = "tests/kernels/prefill/test_tables.py::"
BOUND = PREFILL + "test_every_form_meets_the_error_bound[emulator-"
TENSOR, OPTIONS, ONE_STAGE, FP8 = ((BOUND + f"{form}]",) for form in ("tensor cores", "options", "one stage", "fp8"))
CORES, VLLM = ((BOUND + f"{form}]",) for form in ("CUDA cores", "vllm"))
PIVOTS = (INVARIANCE + "test_pivots_that_move_leave_other_rows_alone[emulator-tensor cores]",)
MANY = (PREFILL + "test_many_sequences_find_their_rows[emulator-tensor cores]",)
NEEDLE = (PREFILL + "test_a_needle_is_found_at_every_position_of_a_tile[emulator-tensor cores]",)
READS = (TABLES + "test_keys_that_no_row_sees_are_not_read[tensor cores]",)
SINKS = (PREFILL + "test_sinks_far_above_and_below_all_logits[emulator-tensor cores]",)
CHECK = (TABLES + "test_what_check_refuses_is_recorded_and_harms_nobody_else[emulator-tensor cores]",)
LENGTH = (TABLES + "test_a_length_that_is_not_looked_at_harms_nobody[emulator-tensor cores]",)
MASKED = (PREFILL + "test_score_mod_sees_positions_heads_and_sequences_and_may_mask_every_key[emulator-CUDA cores]",)

LOOP = "kernels/prefill/tensor_cores/loop.py"
COPIES = "kernels/prefill/tensor_cores/copies.py"
TILE = "kernels/prefill/tensor_cores/tile.py"
PRODUCTS = "kernels/prefill/tensor_cores/products.py"
SOFTMAX = "kernels/prefill/tensor_cores/softmax.py"
ITEMS = "kernels/prefill/items.py"
PROLOGUE = "kernels/prefill/tensor_cores/prologue.py"
CUDA_CORES = "kernels/prefill/cuda_cores/kernel.py"
CORES_ROWS = "kernels/prefill/cuda_cores/rows.py"

MUTANTS = [
    Mutant(
        "prefill kernel: no barrier before a tile is used",
        LOOP,
        "            wait_all()\n            cuda.syncthreads()\n            is_followed",
        "            wait_all()\n            is_followed",
        TENSOR,
        ci=True,
    ),
    Mutant(
        "prefill kernel: nobody waits for the copies of a tile",
        LOOP,
        "            wait_all()\n            cuda.syncthreads()\n            is_followed",
        "            cuda.syncthreads()\n            is_followed",
        TENSOR,
    ),
    Mutant(
        "prefill kernel: V of one stage is used before it is there",
        LOOP,
        "                wait_all()\n                cuda.syncthreads()\n                if is_followed:",
        "                if is_followed:",
        ONE_STAGE,
    ),
    Mutant(
        "prefill kernel: converted rows are used before all are there",
        LOOP,
        "lane, warp)\n                cuda.syncthreads()\n            elif",
        "lane, warp)\n            elif",
        FP8,
    ),
    Mutant(
        "prefill kernel: gaps of rows are not cleared",
        LOOP,
        "        clear_gaps(shared, thread)\n",
        "",
        OPTIONS,
    ),
    Mutant(
        "prefill kernel: Q has its sign where the scale is negative",
        COPIES,
        "        if query.is_negative:",
        "        if False:",
        TENSOR,
    ),
    Mutant(
        "prefill kernel: chunks do not change their places from row to row",
        COPIES,
        "uint32((AT_ONCE * i) % 8 << 4)",
        "uint32(0)",
        ONE_STAGE,
    ),
    Mutant(
        "prefill kernel: a tile looks up one token late",
        COPIES,
        "token = min(max(uint32(first + row), pages.first), pages.last)",
        "token = min(max(uint32(first + row + 1), pages.first), pages.last)",
        NEEDLE,
    ),
    Mutant(
        "prefill kernel: tokens past the last one are looked up",
        COPIES,
        "token = min(max(uint32(first + row), pages.first), pages.last)",
        "token = max(uint32(first + row), pages.first)",
        TENSOR,
    ),
    Mutant(
        "prefill kernel: tokens before the windows are looked up",
        COPIES,
        "token = min(max(uint32(first + row), pages.first), pages.last)",
        "token = min(uint32(first + row), pages.last)",
        (TABLES + "test_nothing_before_the_windows_is_looked_up_or_counts[emulator-tensor cores]",),
    ),
    Mutant(
        "prefill kernel: rows far below zero have no keys",
        "kernels/device/logits.py",
        "UNSEEN = float32(3.4028235e38)",
        "UNSEEN = float32(1e30)",
        (PREFILL + "test_rows_whose_logits_are_all_far_below_zero_have_keys[emulator]",),
    ),
    Mutant(
        "prefill kernel: K as V is: rows and chunks of ldmatrix exchanged",
        PRODUCTS,
        "k = uint32(uint32(uint32(row + uint32(c << 3)) * ROW_BYTES) + uint32(uint32(b ^ row) << 4))",
        "k = q_and_v",
        NEEDLE,
    ),
    Mutant(
        "prefill kernel: V is not transposed",
        PRODUCTS,
        "load_transposed(uint32(where",
        "load_matrices(uint32(where",
        NEEDLE,
    ),
    Mutant(
        "prefill kernel: the pivot of a row follows its neighbours",
        SOFTMAX,
        "        new = multiply_and_add(float32(-largest), unit, BIAS) if is_above else old\n",
        "        new = multiply_and_add(float32(-largest), unit, BIAS)\n",
        PIVOTS,
        ci=True,
    ),
    Mutant(
        "prefill kernel: maxima of two of four lanes",
        "kernels/device/reductions.py",
        "return larger(x, exchange(x, 2))",
        "return x",
        PIVOTS,
    ),
    Mutant(
        "prefill kernel: O is not rescaled",
        SOFTMAX,
        "            rescale(registers)\n\n    return settle\n",
        "\n    return settle\n",
        PIVOTS,
    ),
    Mutant(
        "prefill kernel: a row sees the key after it",
        SOFTMAX,
        "uint32(last - low)))",
        "uint32(last - low + 1)))",
        TENSOR,
    ),
    Mutant(
        "prefill kernel: a window is one key too wide",
        SOFTMAX,
        "int32(visible.window - 1)",
        "int32(visible.window)",
        TENSOR,
    ),
    Mutant(
        "prefill kernel: a sink that exceeds all logits overflows",
        "kernels/prefill/output.py",
        "        pivot = larger(pivot, logit)\n",
        "",
        SINKS,
    ),
    Mutant(
        "prefill kernel: masks begin a tile late",
        PROLOGUE,
        "uint32(uint32(everyone + 1) // uint32(KEYS))",
        "uint32(uint32(everyone + KEYS) // uint32(KEYS))",
        TENSOR,
    ),
    Mutant(
        "prefill kernel: tiles before the window are read",
        PROLOGUE,
        "Span(uint32(uint32(low // uint32(KEYS)) * uint32(KEYS)),",
        "Span(uint32(0),",
        READS,
    ),
    Mutant(
        "prefill kernel: a sequence has one tile less",
        ITEMS,
        "uint32(uint32(item.num_rows + (ROWS - 1)) // uint32(ROWS))",
        "uint32(item.num_rows // uint32(ROWS))",
        MANY,
    ),
    Mutant(
        "prefill kernel: the search stops after 32 candidates",
        ITEMS,
        "left = min(step, uint32(left - skipped))",
        "left = uint32(1)",
        MANY,
    ),
    Mutant(
        "prefill kernel: lengths out of range are believed",
        ITEMS,
        "is_valid = length <= uint32(max_seq_len) and query_len <= length",
        "is_valid = True",
        LENGTH,
    ),
    Mutant(
        "prefill kernel: a check leaves the length of what it refuses",
        "kernels/check.py",
        "int32(-1) if is_bad else int32(length)",
        "int32(length)",
        CHECK,
    ),
    Mutant(
        "prefill kernel, CUDA cores: V takes the place of K too early",
        CUDA_CORES,
        "            cuda.syncthreads()\n            load_values(",
        "            load_values(",
        CORES,
    ),
    Mutant(
        "prefill kernel, CUDA cores: a score_mod that masks all makes NaN",
        CUDA_CORES,
        "pivot = float32(0) if maximum == NONE else maximum",
        "pivot = maximum",
        MASKED,
    ),
    Mutant(
        "prefill kernel, CUDA cores: dims of V in vllm are neighbours",
        CORES_ROWS,
        "IS_STRIDED = 16 // (VECTOR * KV_BYTES), config.is_vllm and not is_keys",
        "IS_STRIDED = 16 // (VECTOR * KV_BYTES), False",
        VLLM,
    ),
    Mutant(
        "prefill kernel: four of eight warps copy as if they were all",
        TILE,
        "        return self.num_threads\n\n    @property\n    def all_rows",
        "        return 128\n\n    @property\n    def all_rows",
        (PREFILL + "test_eight_warps_have_the_bits_of_four",),
    ),
    Mutant(
        "prefill kernel: eight threads store pieces of one row of fp8",
        COPIES,
        "        if IN_PAIRS:\n            piece =",
        "        if False:\n            piece =",
        (PREFILL + "test_lanes_that_store_and_load_together_meet_different_banks[fp8]",),
    ),
    Mutant(
        "prefill kernel: both chunks of 16 codes go to one place",
        COPIES,
        "chunk_place(uint32(place ^ CHUNK), i)",
        "chunk_place(place, i)",
        FP8,
    ),
    Mutant(
        "prefill kernel: fp8 of bfloat16 queries in the wrong half",
        COPIES,
        "return pack_bfloat16(a, b), pack_bfloat16(c, d)",
        "return pack_bfloat16(c, d), pack_bfloat16(a, b)",
        FP8,
    ),
    Mutant(
        "prefill: rows of the table are max_blocks apart",
        "cuda/plans/prefill.py",
        "(call.block_tables.strides[0], *call.q",
        "(call.block_tables.shape[1] * 4, *call.q",
        (TABLES + "test_tables_have_strides_of_their_own[emulator-tensor cores-False]",),
    ),
    Mutant(
        "prefill: the rows of a table that is checked are max_blocks apart",
        "cuda/plans/check.py",
        "window or NO_WINDOW, call.block_tables.strides[0])",
        "window or NO_WINDOW, call.block_tables.shape[1] * 4)",
        (TABLES + "test_tables_have_strides_of_their_own[emulator-tensor cores-True]",),
    ),
]

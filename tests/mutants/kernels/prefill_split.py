"""Prefill of few rows, whose keys are split; the tests run in the emulator."""

from ..mutant import Mutant

SPLIT = "tests/kernels/prefill/test_split.py::"
BOUND = SPLIT + "test_every_form_meets_the_error_bound[emulator-"
TENSOR, FP8 = ((BOUND + f"{form}]",) for form in ("tensor cores", "fp8"))
LATE = (SPLIT + "test_a_pivot_moves_by_what_its_own_row_sees_late[emulator]",)
ONE_WARP = (SPLIT + "test_rows_that_see_keys_of_one_warp_have_the_bits_of_long_chunks[emulator-tensor cores]",)
NEEDLE = (SPLIT + "test_a_needle_is_found_at_the_ends_of_tiles_parts_and_splits[emulator-tensor cores]",)
CHANGING = (SPLIT + "test_lengths_that_change_under_a_running_call_harm_no_later_one",)
LAUNCHED = (SPLIT + "test_what_is_launched_follows_from_shapes_bounds_and_options",)
ONE_KERNEL = (SPLIT + "test_each_sequence_is_for_one_kernel",)
READ = (SPLIT + "test_keys_that_no_row_sees_are_not_read",)
GRID = (SPLIT + "test_a_grid_has_every_part",)
BEFORE_9 = (SPLIT + "test_before_9_0_warps_meet_at_barriers_of_their_own",)
ALONE = (SPLIT + "test_few_tokens_of_short_and_empty_sequences_take_the_split_kernel_alone[emulator]",)

LOOP = "kernels/prefill/tensor_cores/split/loop.py"
SOFTMAX = "kernels/prefill/tensor_cores/softmax.py"
MERGE = "kernels/prefill/tensor_cores/split/merge.py"
KERNEL = "kernels/prefill/tensor_cores/split/kernel.py"
SHAPE = "kernels/prefill/tensor_cores/split/shape.py"
STATES = "kernels/prefill/tensor_cores/split/states.py"
PLAN = "cuda/plans/prefill.py"

MUTANTS = [
    Mutant(
        "prefill split: Q is used before it is there",
        LOOP,
        "        cuda.syncthreads()  # Q is there for all\n",
        "",
        TENSOR,
    ),
    Mutant(
        "prefill split: K is used before other lanes have copied it",
        LOOP,
        "            meet(warp)\n            multiply_keys",
        "            multiply_keys",
        TENSOR,
        ci=True,
    ),
    Mutant(
        "prefill split: K of the next tile is copied over K",
        LOOP,
        "            if SHARES or not IS_FP8:\n                meet(warp)\n            if is_followed:\n"
        "                for_each(rows.copy, PIECES, (k_copies",
        "            if is_followed:\n                for_each(rows.copy, PIECES, (k_copies",
        TENSOR,
    ),
    Mutant(
        "prefill split: fp8 V is put over slots that others still read",
        LOOP,
        "                meet(warp)  # V takes the place of the slots\n",
        "                pass\n",
        BEFORE_9,
    ),
    Mutant(
        "prefill split: slots are put over fp8 V that others still use",
        LOOP,
        "                meet(warp)  # slots take the place of V\n",
        "                pass\n",
        BEFORE_9,
    ),
    Mutant(
        "prefill split: slots are put before other warps have cleared gaps there",
        LOOP,
        "            cuda.syncthreads()  # slots take",
        "            pass  # slots take",
        BEFORE_9,
    ),
    Mutant(
        "prefill split: all warps meet at one barrier before 9.0",
        LOOP,
        "barrier_of_warp(uint32(warp + 1))",
        "barrier_of_warp(uint32(1))",
        BEFORE_9,
    ),
    Mutant(
        "prefill split: all warps share one room for offsets",
        LOOP,
        "uint32(warp * SLOTS_BYTES)",
        "uint32(0)",
        BEFORE_9,
    ),
    Mutant(
        "prefill split: offsets of 64 bits have other upper words",
        "kernels/prefill/tensor_cores/split/rows.py",
        "uint32(offset >> 32)",
        "uint32(1)",
        BEFORE_9,
    ),
    Mutant(
        "prefill split: the rows of a piece are copied in another order",
        "kernels/prefill/tensor_cores/split/rows.py",
        "uint32(lane << 2)",
        "uint32(uint32(lane ^ 1) << 2)",
        BEFORE_9,
    ),
    Mutant(
        "prefill split: nobody waits for V",
        LOOP,
        "            soften(registers, excess, unit)\n            wait_one()\n",
        "            soften(registers, excess, unit)\n",
        TENSOR,
    ),
    Mutant(
        "prefill split: codes of V are converted before they are there",
        LOOP,
        "            soften(registers, excess, unit)\n            wait_one()\n",
        "            soften(registers, excess, unit)\n",
        FP8,
    ),
    Mutant(
        "prefill split: sums that have grown too much for P are not seen",
        SOFTMAX,
        "float32(0.999 * 2.0**TOP)",
        "float32(2.0 * 2.0**TOP)",
        LATE,
    ),
    Mutant(
        "prefill split: what is weighed again is added again",
        SOFTMAX,
        "                for_each(copy_sum, OF_ROWS, (registers.sums, before))\n",
        "",
        LATE,
    ),
    Mutant(
        "prefill split: the second piece of a tile is the first one",
        LOOP,
        "uint32(first + PIECE * i)",
        "first",
        NEEDLE,
    ),
    Mutant(
        "prefill split: states are added as if they had the same pivot",
        MERGE,
        "            weight = exp2(float32(bits_float(pivot) - maximum))\n",
        "            weight = float32(1)\n",
        NEEDLE,
    ),
    Mutant(
        "prefill split: every thread asks for its lengths",
        KERNEL,
        "        item, visible = kept(shared), Visible(is_causal != 0, uint32(window))\n",
        "        seq, number = divmod_32(tile, TILES)\n        lengths = (query_starts, seq_lens)\n"
        "        item = steps.item_here(uint32(number * ROWS), seq, lengths, num_tokens, max_seq_len, least_keys)\n"
        "        visible = Visible(is_causal != 0, uint32(window))\n",
        CHANGING,
    ),
    Mutant(
        "prefill split: a part ends a key late",
        KERNEL,
        "uint32(uint32(uint32(1) << parts.bits) - 1)",
        "uint32(uint32(1) << parts.bits)",
        TENSOR,
    ),
    Mutant(
        "prefill split: tiles before the window are read",
        KERNEL,
        "Span(max(part, span.first), ",
        "Span(part, ",
        READ,
    ),
    Mutant(
        "prefill split: parts are half as long",
        STATES,
        "PART_BITS, LONGEST_BITS = config.group_size, PART.bit_length() - 1,",
        "PART_BITS, LONGEST_BITS = config.group_size, PART.bit_length() - 2,",
        ONE_WARP,
    ),
    Mutant(
        "prefill split: both kernels take a sequence of few rows and keys",
        STATES,
        "        if not is_here or item.seq_len < uint32(least_keys):\n",
        "        if not is_here:\n",
        ONE_KERNEL,
    ),
    Mutant(
        "prefill split: no kernel takes a sequence of PART keys",
        "kernels/prefill/items.py",
        "item.seq_len > uint32(PART)",
        "item.seq_len >= uint32(PART)",
        ONE_KERNEL,
    ),
    Mutant(
        "prefill split: rows of empty sequences are not written",
        MERGE,
        "        if row >= item.num_rows:\n",
        "        if row >= item.num_rows or item.seq_len == 0:\n",
        ALONE,
    ),
    Mutant(
        "prefill split: a window needs a part less",
        SHAPE,
        "(seen - 1) // PART + 2",
        "(seen - 1) // PART + 1",
        GRID,
    ),
    Mutant(
        "prefill split: exact calls are split",
        PLAN,
        "config.can_split and not call.exact and",
        "config.can_split and",
        LAUNCHED,
    ),
]

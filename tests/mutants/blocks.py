"""Kernels that write, copy, gather, merge and rotate; the tests run in the emulator."""

from .mutant import Mutant

WRITE_KV = "tests/kernels/blocks/test_write_kv.py::"
MERGE_STATES = "tests/kernels/test_merge_states.py::"
SLOTS = WRITE_KV + "test_a_slot_that_is_not_there_is_skipped_and_reported_once[emulator]"
FP8_CODES = WRITE_KV + "test_fp8_codes_of_every_16_bit_pattern[emulator-fp8_e4m3-bfloat16-cc8.0]"

MUTANTS = [
    Mutant(
        "write_kv: half of the lanes of an int8 row find its largest element",
        "for b in range(STEPS):\n            largest = max(",
        "for b in range(STEPS - 1):\n            largest = max(",
        "tests/kernels/blocks/test_write_kv.py::test_rows_of_int8_have_the_codes_and_scales_of_the_cpu"
        "[vllm-64-16-float32-False]",
    ),
    Mutant(
        "write_kv: a negative slot is written",
        "if slot < 0:\n            return\n",
        "slot = max(slot, 0)\n",
        SLOTS,
    ),
    Mutant(
        "write_kv: offsets have 32 bits",
        "target = address(k_cache) + block * k_block_stride",
        "target = address(k_cache) + int64(types.int32(block * k_block_stride))",
        WRITE_KV + "test_slots_past_2_31_elements[HND]",
    ),
    Mutant(
        "write_kv: one slot too many is valid",
        "if checked and slot >= num_slots:",
        "if checked and slot > num_slots:",
        SLOTS,
    ),
    Mutant(
        "write_kv: values too large for fp8 become NaN",
        '            builder.fcmp_ordered("<", size, ir.Constant(F32, largest)), size, ir.Constant(F32, largest)\n',
        '            builder.fcmp_ordered("<", size, ir.Constant(F32, largest)), size, ir.Constant(F32, 480.0)\n',
        FP8_CODES,
    ),
    Mutant(
        "write_kv: fp8 rounds halves up instead of to even",
        "odd = builder.and_(builder.lshr(bits, I32(shift)), I32(1))",
        "odd = I32(1)",
        FP8_CODES,
    ),
    Mutant(
        "copy_blocks: the last vector is left out",
        "if first + i * num_threads < num_vectors:",
        "if first + i * num_threads < num_vectors - 1:",
        "tests/kernels/blocks/test_copy_blocks.py::test_many_layers_take_few_launches[emulator]",
    ),
    Mutant(
        "gather_kv: fp8 codes are not multiplied by their scale",
        "float_bits(float32(d * scale))",
        "float_bits(float32(d))",
        "tests/kernels/blocks/test_gather_kv.py::test_every_fp8_code[emulator-fp8_e4m3-cc9.0]",
    ),
    Mutant(
        "merge_states: the output of a state without keys is multiplied by 0",
        "if ALL_COUNT or weight != float32(0):",
        "if ALL_COUNT or weight >= float32(0):",
        MERGE_STATES + "test_states_without_keys[emulator-2]",
    ),
    Mutant(
        "merge_states: a second launch leaves out the result of the first",
        "states = [target, *states]",
        "states = [states[0], *states]",
        MERGE_STATES + "test_states_without_keys[emulator-9]",
    ),
]

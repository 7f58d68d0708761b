"""Kernels write_kv, copy_blocks and gather_kv; the tests run in the emulator."""

from ..mutant import Mutant

WRITE = "tests/kernels/blocks/test_write_kv.py::"
ROTATED = "tests/kernels/blocks/test_rotated_keys.py::"
ROTATED_BITS = (ROTATED + "test_the_bits_of_both_operations[emulator]",)
SKIPPED_SLOT = (WRITE + "test_a_slot_that_is_not_there_is_skipped_and_reported_once[emulator]",)
LARGE_WRITE = (WRITE + "test_slots_past_2_31_elements[HND]",)
HEADS = (WRITE + "test_more_heads_than_a_grid_has_rows[emulator-NHD]",)
FP8_CODES = (WRITE + "test_fp8_codes_of_every_16_bit_pattern[emulator-fp8_e4m3-bfloat16-cc8.0]",)
HALVES = (WRITE + "test_float32_is_rounded_to_nearest_even[emulator-bfloat16]",)
COPY = ("tests/kernels/blocks/test_copy_blocks.py::test_many_layers_take_few_launches[emulator]",)
GATHER = "tests/kernels/blocks/test_gather_kv.py::"
FP8_GATHER = (GATHER + "test_every_fp8_code[emulator-fp8_e4m3-cc9.0]",)
SKIPPED_BLOCK = (GATHER + "test_a_block_that_is_not_there_is_skipped_and_reported[emulator-4]",)

MUTANTS = [
    Mutant(
        "write_kv: a negative slot is written",
        "kernels/blocks/write_kv.py",
        "if slot < 0:\n            return\n",
        "slot = max(slot, 0)\n",
        SKIPPED_SLOT,
        ci=True,
    ),
    Mutant(
        "write_kv: offsets in 32 bits",
        "kernels/blocks/write_kv.py",
        "target = address(k_cache) + block * k_block_stride",
        "target = address(k_cache) + int64(types.int32(block * k_block_stride))",
        LARGE_WRITE,
        ci=True,
    ),
    Mutant(
        "write_kv: slots of 31 bits",
        "kernels/blocks/write_kv.py",
        "slot = slots[token]\n",
        "slot = slots[token] & 0x7FFFFFFF\n",
        SKIPPED_SLOT,
    ),
    Mutant(
        "write_kv: one slot too many passes",
        "kernels/blocks/write_kv.py",
        "if checked and slot >= num_slots:",
        "if checked and slot > num_slots:",
        SKIPPED_SLOT,
    ),
    Mutant(
        "write_kv: V's heads as far apart as K's columns",
        "kernels/blocks/write_kv.py",
        "position * v_position_stride + head * v_cache_head_stride",
        "position * v_position_stride + head * k_column_stride",
        HEADS,
    ),
    Mutant(
        "write_kv: values that are too large for fp8 become NaN",
        "kernels/device/conversions.py",
        '            builder.fcmp_ordered("<", size, ir.Constant(F32, largest)), size, ir.Constant(F32, largest)\n',
        '            builder.fcmp_ordered("<", size, ir.Constant(F32, largest)), size, ir.Constant(F32, 480.0)\n',
        FP8_CODES,
        ci=True,
    ),
    Mutant(
        "write_kv: fp8 is rounded to the next one up from halfway",
        "kernels/device/conversions.py",
        "odd = builder.and_(builder.lshr(bits, I32(shift)), I32(1))",
        "odd = I32(1)",
        FP8_CODES,
    ),
    Mutant(
        "write_kv: bfloat16 is cut off",
        "kernels/device/conversions.py",
        "cvt.rn.bf16.f32",
        "cvt.rz.bf16.f32",
        HALVES,
    ),
    Mutant(
        "write_kv: rotated keys are not rounded to their own dtype before fp8",
        "kernels/blocks/rotated_keys.py",
        "convert(widen(bits)[0], scale)",
        "convert(x, scale)",
        ROTATED_BITS,
    ),
    Mutant(
        "write_kv: the second dims of pairs are rotated like the first",
        "kernels/blocks/rotated_keys.py",
        "sine = float32(-s[j]) if is_first else s[j]",
        "sine = float32(-s[j])",
        ROTATED_BITS,
    ),
    Mutant(
        "write_kv: a vector that is rotated in part is not written where it is not",
        "kernels/blocks/write_kv.py",
        "if uint32(first + uint32(num_elements)) > rotary_dim:",
        "if first >= rotary_dim:",
        ROTATED_BITS,
    ),
    Mutant(
        "write_kv: offsets into tables in 32 bits",
        "kernels/blocks/write_kv.py",
        "address(sin) + table_row * sin_stride",
        "address(sin) + int64(types.int32(table_row * sin_stride))",
        (ROTATED + "test_rows_of_tables_past_2_31_elements",),
    ),
    Mutant(
        "write_kv: positions of skipped tokens must be valid",
        "validation/caches.py",
        "values.positions(positions, len(cos), slots >= 0)",
        "values.positions(positions, len(cos))",
        ("tests/cpu/test_blocks.py::test_keys_are_rotated_on_their_way",),
    ),
    Mutant(
        "copy_blocks: the last vector is left out",
        "kernels/blocks/copy_blocks.py",
        "if first + i * num_threads < num_vectors:",
        "if first + i * num_threads < num_vectors - 1:",
        COPY,
        ci=True,
    ),
    Mutant(
        "gather_kv: fp8 codes without their scale",
        "kernels/blocks/gather_kv.py",
        "float_bits(float32(d * scale))",
        "float_bits(float32(d))",
        FP8_GATHER,
        ci=True,
    ),
    Mutant(
        "gather_kv: block num_blocks passes",
        "kernels/blocks/gather_kv.py",
        "(block < 0 or block >= num_blocks)",
        "(block < 0 or block > num_blocks)",
        SKIPPED_BLOCK,
    ),
]

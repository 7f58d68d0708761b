"""The rotary embedding on the CPU, its kernel and its plan; the tests of the kernel run in the emulator."""

from ..mutant import Mutant

KERNEL = ("tests/kernels/test_rotary.py::test_the_bits_of_the_cpu[emulator]",)
ORACLE = ("tests/operations/test_rotary.py::test_oracle",)
SKIPPED = ("tests/kernels/test_rotary.py::test_a_position_without_a_row_is_skipped_and_reported_once[emulator]",)

MUTANTS = [
    Mutant(
        "apply_rotary: products are fused with sums",
        "kernels/device/rotation.py",
        "float32(multiply(x, cosine) + multiply(other, sine))",
        "float32(x * cosine + other * sine)",
        ("tests/kernels/test_rotary.py::test_no_product_is_fused_with_a_sum_in_machine_code[cc9.0]",),
        ci=True,
    ),
    Mutant(
        "apply_rotary: offsets into tables in 32 bits",
        "kernels/rotary.py",
        "load_table(sines, address(sin) + position * sin_stride, vector)",
        "load_table(sines, address(sin) + (position * sin_stride & 0xFFFFFFFF), vector)",
        ("tests/kernels/test_rotary.py::test_rows_of_tables_past_2_31_elements",),
    ),
    Mutant(
        "apply_rotary: the second dims of pairs where those of a whole head are",
        "kernels/rotary.py",
        "config.rotary_dim // 2 * itemsize\n",
        "config.head_dim // 2 * itemsize\n",
        KERNEL,
    ),
    Mutant(
        "apply_rotary: dims that are not rotated are copied only where q is not in place",
        "cuda/plans/rotary.py",
        "(q_from, k_from) != (q_to, k_to)",
        "q_from != q_to",
        KERNEL,
    ),
    Mutant(
        "apply_rotary: one position too many passes",
        "kernels/rotary.py",
        "position < 0 or position >= max_positions",
        "position < 0 or position > max_positions",
        SKIPPED,
    ),
    Mutant(
        "apply_rotary: rotated the other way round",
        "cpu/rotary.py",
        "b * c + a * s",
        "b * c - a * s",
        ORACLE,
    ),
    Mutant(
        "apply_rotary: q is rotated in place before k is computed",
        "cpu/rotary.py",
        "            writes.append((bits(out), ..., bits(result)))\n",
        "            commit([(bits(out), ..., bits(result))])\n",
        ("tests/operations/test_rotary.py::test_if_k_cannot_be_computed_q_is_as_before",),
    ),
]

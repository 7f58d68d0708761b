"""The arithmetic of attention on the CPU: tiles, and steps on vectors."""

from ..mutant import Mutant

ORACLE = ("tests/cpu/attention/test_decode.py::test_oracle[float32-64]",)
WINDOW = ("tests/cpu/attention/test_decode.py::test_windows_begin_at_their_first_key[64-NHD-float32]",)
NEEDLE = ("tests/cpu/attention/test_decode.py::test_a_needle_brings_exactly_its_own_value[1101-NHD-float32]",)
PREFILL_ORACLE = ("tests/cpu/attention/test_prefill.py::test_oracle[float32-64]",)
STEPS = ("tests/cpu/attention/steps/test_attention.py",)
ENDS = ("tests/cpu/attention/steps/test_ends.py",)

MUTANTS = [
    Mutant(
        "decode: keys and values of the first KV head for all",
        "cpu/attention/steps/course.py",
        "builder.add(sweep.offset, builder.mul(head, sweep.head_stride))",
        "sweep.offset",
        NEEDLE,
    ),
    Mutant(
        "flash: tiles that a row sees a part of are not masked",
        "cpu/attention/flash.py",
        "masked |= first < start or first + TILE > stop",
        "masked |= first + TILE > stop",
        WINDOW,
    ),
    Mutant(
        "flash: what the first row sees is not masked for the others",
        "cpu/attention/flash.py",
        "masked = False\n            for row in range(r, r + R):",
        "masked = False\n            for row in range(r, r + 1):",
        ("tests/cpu/attention/test_prefill.py::test_a_window_begins_between_the_rows_of_a_group[NHD-float32_0]",),
    ),
    Mutant(
        "flash: groups that see a part of a tile are left out",
        "cpu/attention/flash.py",
        "((begin + 1) * R - 1) * FLOAT_BYTES) <= start:",
        "(begin * R) * FLOAT_BYTES) <= start:",
        PREFILL_ORACLE,
    ),
    Mutant(
        "flash: a row sees one token less than it should",
        "cpu/attention/flash.py",
        "get_int32(scratch.stops + row * FLOAT_BYTES) - start)",
        "get_int32(scratch.stops + row * FLOAT_BYTES) - start - 1)",
        PREFILL_ORACLE,
    ),
    Mutant(
        "flash: the values of a tile are staged up to the first share",
        "cpu/attention/flash.py",
        "first, until = turn * share, min(turn * share + share, count)",
        "first, until = turn * share, min(share, count)",
        PREFILL_ORACLE,
    ),
    Mutant(
        "flash: accumulators are not rescaled",
        "cpu/attention/flash.py",
        "if get_float(factor) != ONE:",
        "if False:",
        ORACLE,
    ),
    Mutant(
        "steps: the group that is left over after pairs is dropped",
        "cpu/attention/steps/sweep.py",
        "if count > 1:",
        "if count > 2:",
        ("tests/cpu/attention/test_decode.py::test_group_sizes[4-NHD-float32]",),
    ),
    Mutant(
        "steps: the first head's rows are prefetched for all",
        "cpu/attention/steps/course.py",
        "builder.add(sweep.next_offset, builder.mul(head, sweep.next_head_stride))",
        "sweep.next_offset",
        ("tests/cpu/attention/steps/test_sweep.py::test_each_line_of_the_next_rows_is_prefetched[bfloat16-1]",),
    ),
    Mutant(
        "steps: the last step of a tile prefetches the next one's rows for heads of its own",
        "cpu/attention/steps/course.py",
        "builder.select(place.past, x, y)",
        "y",
        ("tests/cpu/attention/steps/test_sweep.py::test_of_large_rows_heads_further_on_are_prefetched",),
    ),
    Mutant(
        "steps: the last run of a tile is as long as the others",
        "cpu/attention/steps/course.py",
        "self._code.smaller(self._longest, self._code.builder.sub(self._steps, begin))",
        "self._longest",
        ("tests/cpu/attention/steps/test_course.py::test_steps_come_in_the_order_of_memory[2-3-2]",),
    ),
    Mutant(
        "steps: rows that are widened a step ahead are not prefetched before",
        "cpu/attention/steps/sweep.py",
        "2 if beside else 1",
        "1",
        (
            "tests/cpu/attention/steps/test_sweep.py"
            "::test_rows_that_are_widened_a_step_ahead_are_prefetched_before[make_score]",
        ),
    ),
    Mutant(
        "steps: as much is prefetched into L1 as if nothing else was there",
        "cpu/attention/steps/sweep.py",
        "builder.sub(INT64(L1_BYTES), builder.mul(sweep.num_heads, step_bytes))",
        "INT64(L1_BYTES)",
        ("tests/cpu/attention/steps/test_sweep.py::test_of_large_rows_heads_further_on_are_prefetched",),
    ),
    Mutant(
        "steps: keys are not prefetched where few of them are taken at once",
        "cpu/attention/steps/course.py",
        "count = max(1, count // turns)",
        "count //= turns",
        ("tests/cpu/attention/steps/test_sweep.py::test_lines_are_prefetched_with_any_number_of_registers[4]",),
    ),
    Mutant(
        "steps: later rows of the same head are prefetched",
        "cpu/attention/steps/sweep.py",
        "L2_REACH = 32 * 1024 - 1",
        "L2_REACH = 32 * 1024",
        ("tests/cpu/attention/steps/test_sweep.py::test_another_head_s_rows_are_prefetched_into_l2[8]",),
    ),
    Mutant(
        "steps: the next step is widened over this one's rows",
        "cpu/attention/steps/sweep.py",
        "half(code.plus(number, 1))",
        "half(number)",
        ("tests/cpu/attention/steps/test_sweep.py::test_every_way_to_read_rows[fp8_e4m3-4-True]",),
    ),
    Mutant(
        "steps: with few registers, rows past those of a turn are widened",
        "cpu/attention/steps/widen.py",
        "if count < self.of_chunk:",
        "if False:",
        ("tests/cpu/attention/steps/test_sweep.py::test_every_number_of_registers[fp8_e4m3-4]",),
    ),
    Mutant(
        "steps: rows of the next step beside which there is no token are not widened",
        "cpu/attention/steps/values.py",
        "following.widen_rows(code, count, num_vectors)",
        "pass",
        ("tests/cpu/attention/steps/test_sweep.py::test_every_way_to_read_rows[fp8_e4m3-4-True]",),
    ),
    Mutant(
        "steps: vectors that are left over read the first values again",
        "cpu/attention/steps/values.py",
        "columns(builder.add(done, code.times(i, width)), width)",
        "columns(code.times(i, width), width)",
        ("tests/cpu/attention/steps/test_attention.py::test_values_are_added_token_after_token",),
    ),
    Mutant(
        "steps: the places of a vector are added from the last one on",
        "cpu/attention/steps/dots.py",
        "for n in own:",
        "for n in reversed(own):",
        STEPS,
        ci=True,
    ),
    Mutant(
        "steps: what was before is not rescaled",
        "cpu/attention/steps/softmax.py",
        "code.store(rescale, factor)",
        "code.store(code.constant(1.0, group_rows), factor)",
        STEPS,
    ),
    Mutant(
        "steps: the sum is not rescaled",
        "cpu/attention/steps/softmax.py",
        "builder.fmul(code.load(total, vector(group_rows)), rescale)",
        "code.load(total, vector(group_rows))",
        STEPS,
    ),
    Mutant(
        "steps: the weights of one row are added in the order of its lanes",
        "cpu/attention/steps/softmax.py",
        "four = builder.fadd(builder.fadd(fours[0], fours[1]), builder.fadd(fours[2], fours[3]))",
        "four = builder.fadd(builder.fadd(fours[0], fours[2 if group_rows == 1 else 1]), "
        "builder.fadd(fours[1 if group_rows == 1 else 2], fours[3]))",
        STEPS,
    ),
    Mutant(
        "steps: the running state is weighed by the other's weight",
        "cpu/attention/steps/softmax.py",
        "for lane in (0, 1))",
        "for lane in (1, 0))",
        STEPS,
    ),
    Mutant(
        "steps: even and odd codes of fp8 change places",
        "cpu/attention/steps/widen.py",
        "for codes in (even, odd)]",
        "for codes in (odd, even)]",
        ("tests/cpu/attention/steps/test_widen.py",),
    ),
    Mutant(
        "steps: NaN of e4m3 is a number",
        "cpu/attention/steps/widen.py",
        "bits = builder.select(is_nan, code.constant(0x7E00, lanes, SHORT), bits)",
        "bits = builder.select(is_nan, bits, bits)",
        ("tests/cpu/attention/steps/test_widen.py",),
    ),
    Mutant(
        "steps: float16 without instructions is rounded up from a tie",
        "cpu/attention/steps/halves.py",
        "builder.add(odd, number((1",
        "builder.add(number(1), number((1",
        ("tests/cpu/attention/steps/test_halves.py",),
    ),
    Mutant(
        "steps: a result in bfloat16 is cut off",
        "cpu/attention/steps/ends.py",
        "builder.add(odd, number(0x7FFF))",
        "number(0)",
        ENDS,
    ),
    Mutant(
        "steps: a row of q keeps its even dims alone",
        "cpu/attention/steps/ends.py",
        "zip((dims[:HALF_UNIT], dims[HALF_UNIT:])",
        "zip((dims[:HALF_UNIT], dims[:HALF_UNIT])",
        ENDS,
    ),
    Mutant(
        "decode: a step past the end multiplies the last value again",
        "cpu/attention/steps/sweep.py",
        "code.smaller(left, INT64(step_tokens))",
        "INT64(step_tokens)",
        ("tests/cpu/attention/test_decode.py::test_an_infinite_last_value_stays_infinite[NHD-float32]",),
    ),
    Mutant(
        "tiles: rows past the end are those behind the last one",
        "cpu/attention/tiles.py",
        "for t in range(stop - start, TILE):\n",
        "for t in range(stop - start, TILE):\n        row += strides[2]\n",
        ("tests/cpu/attention/test_decode.py::test_no_byte_outside_the_arrays_is_read",),
    ),
]

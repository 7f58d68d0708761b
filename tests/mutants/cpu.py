"""Attention, blocks and merges on the CPU."""

from .mutant import Mutant

ATTENTION = "tests/attention/"
ORACLE = ATTENTION + "test_oracle.py::test_drawn_problems_meet_the_error_bound"
DECODE_ORACLE, PREFILL_ORACLE = ORACLE + "[cpu-decode-float32-64]", ORACLE + "[cpu-prefill-float32-64]"
FP8_ORACLE = ORACLE + "[cpu-decode-fp8_e4m3-32]"
DECODE, PREFILL = "[cpu-decode-NHD-float32-D64]", "[cpu-prefill-NHD-float32-D64]"
EMPTY = ATTENTION + "test_lengths.py::test_empty_sequences_stand_between_others"
INT8_ROWS = "tests/operations/test_caches.py::test_a_row_of_int8_has_its_largest_number_as_127"
ALONE = "tests/cpu/attention/test_attention.py::"
STEPS = "tests/cpu/attention/steps/test_attention.py"

MUTANTS = [
    Mutant(
        "write_kv: int8 codes are cut off instead of rounded",
        "np.rint(codes, out=codes)",
        "np.trunc(codes, out=codes)",
        INT8_ROWS,
    ),
    Mutant(
        "write_kv: an int8 row with an infinity has an infinite scale",
        "scales[np.isinf(scales)] = np.nan",
        "pass",
        INT8_ROWS,
    ),
    Mutant(
        "write_kv: int8 codes of a denormal scale wrap around",
        "np.clip(codes, -INT8_MAX, INT8_MAX, out=codes)",
        "pass",
        INT8_ROWS,
    ),
    Mutant(
        "decode: queries of some heads read another head's keys",
        "head, position = (first_kv_head + h) * group_size + g, length - num_tokens + token",
        "head, position = first_kv_head + h * group_size + g, length - num_tokens + token",
        DECODE_ORACLE,
    ),
    Mutant(
        "decode: values take the v_scale of the first heads",
        "v_scale[first_kv_head + h]",
        "v_scale[h]",
        FP8_ORACLE,
    ),
    Mutant(
        "decode: rows without keys keep what was in `out`",
        "result[self.empty], lses[self.empty] = 0, -np.inf",
        "lses[self.empty] = -np.inf",
        EMPTY + DECODE,
    ),
    Mutant(
        "decode: the LSE of a row without keys is 0",
        "result[self.empty], lses[self.empty] = 0, -np.inf",
        "result[self.empty], lses[self.empty] = 0, 0",
        EMPTY + DECODE,
    ),
    Mutant(
        "decode: splits are merged from the last to the first",
        "for s in range(splits.first[seq], splits.first[seq + 1]):",
        "for s in range(splits.first[seq + 1] - 1, splits.first[seq] - 1, -1):",
        "tests/cpu/attention/test_invariance.py::test_a_verification_of_drafts_behind_a_long_context",
    ),
    Mutant(
        "decode: the last token is left out",
        "min(begin + SPLIT, length)",
        "min(begin + SPLIT, length - 1)",
        DECODE_ORACLE,
    ),
    Mutant(
        "decode: values are read with the strides of K",
        "        k,\n        v,\n        call.spec.block_size,",
        "        k,\n        k,\n        call.spec.block_size,",
        DECODE_ORACLE,
    ),
    Mutant(
        "decode: keys take the k_scale of another head",
        "factors = (options.scale * call.k_scale).repeat(num_heads // spec.num_kv_heads)",
        "factors = np.tile(options.scale * call.k_scale, num_heads // spec.num_kv_heads)",
        FP8_ORACLE,
    ),
    Mutant(
        "the window is one key too wide",
        "max(padding, position - before)",
        "max(padding, position - before - 1)",
        ATTENTION + "test_lengths.py::test_windows_at_the_boundaries" + DECODE,
    ),
    Mutant(
        "causal attention sees one later key",
        "position + after + 1",
        "position + after + 2",
        PREFILL_ORACLE,
    ),
    Mutant(
        "a mask is read at the bit of another key",
        "byte >> (key + t & (1 << shift) - 1) & 1 == 0",
        "byte >> (key + t + 1 & (1 << shift) - 1) & 1 == 0",
        "tests/operations/test_visible_keys.py::test_rows_see_the_keys_that_options_leave[cpu-bits, of all keys]",
    ),
    Mutant(
        "the first key behind the padding is hidden",
        "padding = np.int64(get_int32(options.leftpad + seq * 4)) if",
        "padding = np.int64(get_int32(options.leftpad + seq * 4)) + 1 if",
        "tests/operations/test_visible_keys.py::test_rows_see_the_keys_that_options_leave[cpu-padding]",
    ),
    Mutant(
        "a sequence of padding alone has no split",
        "- oldest, seq_lens > 0)",
        "- oldest, 0)",
        "tests/operations/test_visible_keys.py::test_a_sequence_of_padding_alone_gives_zeros[cpu]",
    ),
    Mutant(
        "the sink is left out",
        "ONE if sink > NOTHING else ZERO",
        "ZERO",
        DECODE_ORACLE,
    ),
    Mutant(
        "the LSE is to base 2",
        "np.float32(np.log(total))",
        "np.float32(np.log2(total))",
        DECODE_ORACLE,
    ),
    Mutant(
        "dims of the output are out of order",
        "code.shuffle(unit, [dims.index(dim) for dim in range(UNIT)])",
        "unit",
        FP8_ORACLE,
    ),
    Mutant(
        "prefill: the tokens of a chunk have the positions of its heads",
        "start_row(scratch, r, seq, of_sequence, first_position + token, head",
        "start_row(scratch, r, seq, of_sequence, first_position + r % group_size, head",
        PREFILL_ORACLE,
    ),
    Mutant(
        "ALiBi has the wrong sign",
        "score -= slope * np.float32(abs(",
        "score += slope * np.float32(abs(",
        DECODE_ORACLE,
    ),
    Mutant(
        "the softcap is not multiplied by its limit",
        "score = softcap * np.float32(math.tanh(score / softcap))",
        "score = np.float32(math.tanh(score / softcap))",
        DECODE_ORACLE,
    ),
    Mutant(
        "an NHD cache is read with the strides of HND",
        'if layout == "NHD":\n        return Strides(',
        'if layout == "":\n        return Strides(',
        ALONE + "test_any_group_size_is_right" + DECODE,
    ),
    Mutant(
        "prefill: queries are one position too early",
        "first_position = length - query_starts[seq + 1] + first_token",
        "first_position = length - query_starts[seq + 1] + first_token - 1",
        PREFILL_ORACLE,
    ),
    Mutant(
        "prefill: the last token of a chunk is left out",
        "num_tokens = min(tokens_per_item, query_starts[seq + 1] - first_token)",
        "num_tokens = min(tokens_per_item, query_starts[seq + 1] - first_token - 1)",
        ALONE + "test_a_mixed_batch_of_prompts_chunks_decodes_and_nothing" + PREFILL,
    ),
    Mutant(
        "prefill: the last visible tile is left out",
        "get_int32(scratch.stops + (num_rows - 1) * FLOAT_BYTES)",
        "get_int32(scratch.stops + (num_rows - 1) * FLOAT_BYTES) - 1",
        PREFILL_ORACLE,
    ),
    Mutant(
        "prefill: rows past the last query are written",
        "bits(rows), ..., bits(result)",
        "bits(out), ..., np.resize(bits(result), out.shape)",
        EMPTY + PREFILL,
    ),
    Mutant(
        "decode: all heads read the first KV head",
        "builder.add(given.offset, builder.mul(head, given.head_stride))",
        "given.offset",
        ATTENTION + "test_needles.py::test_a_needle_brings_exactly_its_own_value" + DECODE,
    ),
    Mutant(
        "each row sees one token too few",
        "get_int32(scratch.stops + row * FLOAT_BYTES) - start)",
        "get_int32(scratch.stops + row * FLOAT_BYTES) - start - 1)",
        PREFILL_ORACLE,
    ),
    Mutant(
        "the output is not rescaled when the maximum grows",
        "if get_float(factor) != ONE:",
        "if False:",
        DECODE_ORACLE,
    ),
    Mutant(
        "the products of a vector are added from last to first",
        "for n in own:",
        "for n in reversed(own):",
        STEPS,
    ),
    Mutant(
        "the sum of weights is not rescaled when the maximum grows",
        "builder.fmul(code.load(total, vector(group_rows)), rescale)",
        "code.load(total, vector(group_rows))",
        STEPS,
    ),
    Mutant(
        "int8: the scale of a value that a row does not see reaches it",
        "products.append(seen(i, n, builder.fmul(weight, spread), 0.0))",
        "products.append(builder.fmul(weight, spread))",
        STEPS + "::test_weights_of_int8_values_are_rounded_with_their_scales",
    ),
    Mutant(
        "int8: keys of all heads take the scales of the first one",
        "of_keys = builder.add(code.times(head, TILE), t)",
        "of_keys = t",
        "tests/cpu/attention/steps/test_tile_pass.py::"
        "test_whole_numbers_are_added_exactly_in_every_way_to_read_int8[1-True-16]",
    ),
    Mutant(
        "int8: the scales of V are read with the strides of K",
        "v_scale_strides=scale_strides(call.v_scales.strides, layout)",
        "v_scale_strides=scale_strides(call.k_scales.strides, layout)",
        ATTENTION + "test_lengths.py::test_lengths_at_the_boundaries[cpu-decode-NHD-int8-D96]",
    ),
    Mutant(
        "int8: a query that is not finite has a finite factor",
        "builder.fadd(from_short, nothing)",
        "from_short",
        "tests/cpu/attention/steps/test_query_rows.py::test_a_row_of_q_is_rounded_to_int16[float32]",
    ),
    Mutant(
        "even and odd fp8 codes change places",
        "for codes in (even, odd)]",
        "for codes in (odd, even)]",
        "tests/cpu/attention/steps/test_widen.py",
    ),
    Mutant(
        "products and sums are rounded twice on processors without FMA",
        """return self.call(f"llvm.fma.v{x.type.count}f32", x.type, [x, y, z])""",
        """return self.call(f"llvm.{'fma' if _has('fma') else 'fmuladd'}.v{x.type.count}f32", x.type, [x, y, z])""",
        "tests/cpu/attention/test_invariance.py::test_code_for_other_processors[generic]",
    ),
    Mutant(
        "write: fp8 rounding ignores the low 16 bits of float32",
        "    low += np.uint32(0xFFFF)\n",
        "",
        "tests/operations/test_caches.py::test_fp8_rounding_of_every_16_bit_pattern",
    ),
    Mutant(
        "merge: the output of a state without keys is multiplied by 0",
        "term if weight.all() else np.where(weight[..., None] != 0, term, np.float32(0))",
        "term",
        "tests/operations/test_merge.py::test_a_state_without_keys_may_hold_anything",
    ),
]

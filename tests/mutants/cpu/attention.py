"""Decode and prefill on the CPU: what they read, see and fold."""

from ..mutant import Mutant

ORACLE = ("tests/cpu/attention/test_decode.py::test_oracle[float32-64]",)
FP8_ORACLE = ("tests/cpu/attention/test_decode.py::test_oracle[fp8_e4m3-32]",)
PREFILL_ORACLE = ("tests/cpu/attention/test_prefill.py::test_oracle[float32-64]",)
GROUPS = ("tests/cpu/attention/test_decode.py::test_group_sizes[1-NHD-float32]",)
EMPTY = ("tests/cpu/attention/test_decode.py::test_empty_sequences_between_others[NHD-float32]",)
WINDOW = ("tests/cpu/attention/test_decode.py::test_windows_begin_at_their_first_key[64-NHD-float32]",)
NEEDLE = ("tests/cpu/attention/test_decode.py::test_a_needle_brings_exactly_its_own_value[1101-NHD-float32]",)
MASKED = ("tests/cpu/attention/test_decode.py::test_score_mod_may_mask_every_key",)
LARGE = ("tests/cpu/attention/test_decode.py::test_caches_of_more_than_2_31_elements[NHD]",)
MIXED = (
    "tests/cpu/attention/test_prefill.py::test_a_mixed_batch_of_prompts_chunks_decodes_and_nothing[NHD-float32_0]",
)
SEES = ("tests/cpu/attention/test_prefill.py::test_score_mods_see_positions_heads_and_sequences",)
SAME_BITS = ("tests/cpu/attention/test_same_bits.py",)
DRAFTS = ("tests/cpu/attention/test_same_bits.py::test_a_verification_of_drafts_behind_a_long_context",)

MUTANTS = [
    Mutant(
        "decode: queries of the wrong heads",
        "cpu/attention/decode.py",
        "head, position = (first_kv_head + h) * group_size + g, length - num_tokens + token",
        "head, position = first_kv_head + h * group_size + g, length - num_tokens + token",
        ORACLE,
    ),
    Mutant(
        "decode: a window's first tile begins with it",
        "cpu/attention/decode.py",
        "max(begin, first // TILE * TILE)",
        "max(begin, first)",
        SAME_BITS,
    ),
    Mutant(
        "decode: the first split to finish folds",
        "cpu/attention/decode.py",
        "(seq * groups + group) * INT_BYTES) < count - 1:",
        "(seq * groups + group) * INT_BYTES) > 0:",
        ORACLE,
    ),
    Mutant(
        "decode: v_scale of the wrong heads",
        "cpu/attention/decode.py",
        "v_scale[first_kv_head + h]",
        "v_scale[h]",
        FP8_ORACLE,
    ),
    Mutant(
        "decode: empty rows keep what was there",
        "cpu/attention/prepared.py",
        "result[self.empty], lse[self.empty] = 0, -np.inf",
        "lse[self.empty] = -np.inf",
        EMPTY,
    ),
    Mutant(
        "decode: the LSE of an empty row is 0",
        "cpu/attention/prepared.py",
        "result[self.empty], lse[self.empty] = 0, -np.inf",
        "result[self.empty], lse[self.empty] = 0, 0",
        EMPTY,
    ),
    Mutant(
        "decode: sequences inside the window lose their first split",
        "cpu/attention/decode.py",
        "np.maximum(seq_lens - query_lens + 1 - window, 0)",
        "np.maximum(seq_lens - query_lens + SPLIT - window, 0)",
        ORACLE,
    ),
    Mutant(
        "decode: the window of the last query token for all",
        "cpu/attention/decode.py",
        "np.maximum(seq_lens - query_lens + 1 - window, 0)",
        "np.maximum(seq_lens - window, 0)",
        DRAFTS,
    ),
    Mutant(
        "decode: splits are folded from the last one on",
        "cpu/attention/decode.py",
        "for s in range(splits.first[seq], splits.first[seq + 1]):",
        "for s in range(splits.first[seq + 1] - 1, splits.first[seq] - 1, -1):",
        DRAFTS,
        ci=True,
    ),
    Mutant(
        "decode: query tokens share the states of the first one",
        "cpu/attention/decode.py",
        "state, mine = splits.state[split] + token * num_heads + head, h * head_rows + r",
        "state, mine = splits.state[split] + head, h * head_rows + r",
        DRAFTS,
    ),
    Mutant(
        "prefill: splits are not folded where they end",
        "cpu/attention/flash.py",
        "after >= stop or after % SPLIT == 0",
        "after >= stop",
        DRAFTS,
    ),
    Mutant(
        "scratch: a window of one key more",
        "cpu/attention/scratch.py",
        "position - options.window + 1)",
        "position - options.window)",
        WINDOW,
    ),
    Mutant(
        "scratch: causal leaves out the query's own key",
        "cpu/attention/scratch.py",
        "position + 1 if options.causal else length",
        "position if options.causal else length",
        PREFILL_ORACLE,
    ),
    Mutant(
        "scratch: causal lets one later key in",
        "cpu/attention/scratch.py",
        "position + 1 if options.causal else length",
        "position + 2 if options.causal else length",
        PREFILL_ORACLE,
    ),
    Mutant(
        "scratch: without the sink",
        "cpu/attention/scratch.py",
        "ONE if sink > NOTHING else ZERO",
        "ZERO",
        ORACLE,
    ),
    Mutant(
        "scratch: the LSE to base 2",
        "cpu/attention/scratch.py",
        "np.float32(np.log(total))",
        "np.float32(np.log2(total))",
        ORACLE,
    ),
    Mutant(
        "scratch: v_scale in the LSE",
        "cpu/attention/scratch.py",
        "np.float32(np.log(total))",
        "np.float32(np.log(total * v_scale))",
        FP8_ORACLE,
    ),
    Mutant(
        "dims come out in the order in which they were widened",
        "cpu/attention/steps/ends.py",
        "code.shuffle(unit, [dims.index(dim) for dim in range(UNIT)])",
        "unit",
        FP8_ORACLE,
    ),
    Mutant(
        "flash: masked rows lose their sink",
        "cpu/attention/scratch.py",
        "    if total == ZERO:",
        "    if get_float(scratch.sum + row * FLOAT_BYTES) == ZERO:",
        MASKED,
    ),
    Mutant(
        "tiles: block offsets of 31 bits",
        "cpu/attention/tiles.py",
        "base + block * strides[0]",
        "base + (block * strides[0] & 0x7FFFFFFF)",
        LARGE,
    ),
    Mutant(
        "tiles: the next block comes one token late",
        "cpu/attention/tiles.py",
        "offset = first - logical * block_size",
        "offset = max(first - logical * block_size - 1, np.int64(0))",
        ("tests/cpu/attention/test_invariance.py::test_block_size[float32-decode-3]",),
    ),
    Mutant(
        "prefill: the tokens of a chunk at the positions of its heads",
        "cpu/attention/prefill.py",
        "start_row(scratch, r, first_position + token, head",
        "start_row(scratch, r, first_position + r % group_size, head",
        PREFILL_ORACLE,
    ),
    Mutant(
        "decode: a split ends one token early",
        "cpu/attention/decode.py",
        "min(begin + SPLIT, length)",
        "min(begin + SPLIT - 1, length)",
        NEEDLE,
    ),
    Mutant(
        "decode: the last token is left out",
        "cpu/attention/decode.py",
        "min(begin + SPLIT, length)",
        "min(begin + SPLIT, length - 1)",
        ORACLE,
    ),
    Mutant(
        "decode: values are read with the strides of K",
        "cpu/attention/arguments.py",
        "        k,\n        v,\n        call.spec.block_size,",
        "        k,\n        k,\n        call.spec.block_size,",
        ORACLE,
    ),
    Mutant(
        "decode: k_scale of the wrong heads",
        "cpu/attention/arguments.py",
        "factors = (options.scale * call.k_scale).repeat(num_heads // spec.num_kv_heads)",
        "factors = np.tile(options.scale * call.k_scale, num_heads // spec.num_kv_heads)",
        FP8_ORACLE,
    ),
    Mutant(
        "logits: ALiBi with the other sign",
        "cpu/attention/logits.py",
        "slope * np.float32(first + t - position)",
        "slope * np.float32(position - first - t)",
        ORACLE,
    ),
    Mutant(
        "logits: softcap without its factor",
        "cpu/attention/logits.py",
        "score = softcap * np.float32(math.tanh(score / softcap))",
        "score = np.float32(math.tanh(score / softcap))",
        ORACLE,
    ),
    Mutant(
        "logits: keys count from the tile",
        "cpu/attention/logits.py",
        "np.int32(first + t), np.int32(head)",
        "np.int32(t), np.int32(head)",
        SEES,
    ),
    Mutant(
        "logits: head and sequence change places",
        "cpu/attention/logits.py",
        "np.int32(head), np.int32(seq)",
        "np.int32(seq), np.int32(head)",
        SEES,
    ),
    Mutant(
        "logits: scale after the softcap",
        "cpu/attention/arguments.py",
        "np.float32(options.softcap or 0),",
        "np.float32((options.softcap or 0) * options.scale),",
        ORACLE,
    ),
    Mutant(
        "tiles: NHD with the strides of HND",
        "cpu/attention/tiles.py",
        'if layout == "NHD":',
        'if layout == "":',
        GROUPS,
    ),
    Mutant(
        "prefill: queries one position early",
        "cpu/attention/prefill.py",
        "first_position = length - query_starts[seq + 1] + first_token",
        "first_position = length - query_starts[seq + 1] + first_token - 1",
        PREFILL_ORACLE,
    ),
    Mutant(
        "prefill: a chunk leaves its last token out",
        "cpu/attention/prefill.py",
        "num_tokens = min(tokens_per_item, query_starts[seq + 1] - first_token)",
        "num_tokens = min(tokens_per_item, query_starts[seq + 1] - first_token - 1)",
        MIXED,
    ),
    Mutant(
        "prefill: the last visible tile is skipped",
        "cpu/attention/prefill.py",
        "stop = min(length, first_position + num_tokens) if options.causal else length",
        "stop = min(length, first_position + num_tokens - 1) if options.causal else length",
        PREFILL_ORACLE,
    ),
    Mutant(
        "prefill: rows past the last query are written",
        "cpu/attention/prepared.py",
        "bits(rows), ..., bits(result)",
        "bits(out), ..., np.resize(bits(result), out.shape)",
        ("tests/cpu/attention/test_prefill.py::test_rows_past_the_last_query_are_not_written[NHD-float32_0]",),
    ),
]

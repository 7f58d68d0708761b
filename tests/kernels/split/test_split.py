"""The split kernel in the emulator, with all of its checks on, against the oracle."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pagedkv import reference
from pagedkv.cuda.plans import attention
from pagedkv.cuda.plans.split import split_config
from pagedkv.emulator.state.order import Order
from pagedkv.kernels.split.config import FEW_SPLITS, FULL_GRID, SHORTEST_SPLIT

from ...support.problems import assert_close, build, expect
from ...support.strategies import each_of, long
from ..decode_cases import (
    CUDA_CORES,
    MANY_HEADS,
    TENSOR,
    Variant,
    after_changing_lengths,
    assert_same_bits,
    checked_call,
    decode,
    emulator,
)
from .variants import CODES, FOUR_BLOCKS, MORE_VARIANTS, VARIANTS, config_of, specs

LOOPS = {"tensor cores": TENSOR, "CUDA cores": CUDA_CORES, "many heads": MANY_HEADS}
ALL = each_of("variant", LOOPS)
# Many heads have the steps of the other loop on tensor cores for masks and sums.
ALL_BUT_MANY_HEADS = each_of("variant", LOOPS, "tensor cores", "CUDA cores")
TENSOR_12 = Variant("split", 64, 16, "bfloat16", "bfloat16", group_size=12)


@pytest.mark.parametrize("variant", [*VARIANTS, *long(MORE_VARIANTS)], ids=str)
@settings(max_examples=3)
@given(data=st.data())
def test_every_variant_meets_the_error_bound(variant, data, open_device):
    problem = build(data.draw(specs(variant)))
    assert_close(problem, *decode(problem, variant, open_device))


@pytest.mark.long
@pytest.mark.parametrize("variant", VARIANTS, ids=str)
@settings(max_examples=20)
@given(data=st.data())
def test_every_variant_meets_the_error_bound_more_often(variant, data, open_device):
    problem = build(data.draw(specs(variant)))
    assert_close(problem, *decode(problem, variant, open_device))


FLOAT32_OVER_16_BITS = [v for v in VARIANTS if v.q_dtype == "float32" and v.kv_dtype in ("float16", "bfloat16")]
# Three terms of q with one tile of heads.
FLOAT32_OVER_16_BITS.append(Variant("split", 128, 24, "float32", "bfloat16", group_size=5))


@pytest.mark.parametrize("variant", FLOAT32_OVER_16_BITS, ids=str)
def test_float32_queries_lose_nothing_to_16_bit_operands(variant, open_device):
    for scale in (None, 0.25):
        problem = build(variant.spec(seq_lens=(2, 3, 17, 300), num_kv_heads=2, scale=scale))
        out, _ = decode(problem, variant, open_device)
        assert np.abs(out - expect(problem)[0]).max() <= 1e-5


@ALL
def test_lengths_at_the_boundaries(variant, open_device):
    size = SHORTEST_SPLIT
    lengths = (0, 1, 2, 4, 15, 16, 17, 31, 32, 33, 63, 64, 65, 127, 128, 129, size - 1, size, size + 1, 2 * size + 1)
    problem = build(variant.spec(seq_lens=lengths, num_kv_heads=1))
    assert_close(problem, *decode(problem, variant, open_device))


LONG = SHORTEST_SPLIT * FULL_GRID  # tokens of one KV head, from which on its splits grow
# Partial results of many heads are larger.
LONG_OF_MANY_HEADS = config_of(MANY_HEADS, (9, 0)).short_split * FEW_SPLITS + 1


@pytest.mark.parametrize(
    ("length", "num_kv_heads", "variant"),
    [
        pytest.param(
            *(length, num_kv_heads, variant),
            id=f"{length}-{num_kv_heads}-{name}",
            # All loops get their tokens from the same split of the sequence.
            marks=[] if variant is TENSOR or (variant is CUDA_CORES and length == LONG + 1) else pytest.mark.long,
        )
        for name, variant in LOOPS.items()
        for length, num_kv_heads in ((LONG, 1), (LONG + 1, 1), (800, FULL_GRID // 2))
    ]
    + [pytest.param(LONG_OF_MANY_HEADS, 1, MANY_HEADS, id=f"{LONG_OF_MANY_HEADS}-1-many heads")],
)
def test_long_sequences_have_longer_splits_and_never_more_than_a_warp_merges(
    length, num_kv_heads, variant, open_device
):
    problem = build(variant.spec(seq_lens=(length, 7), num_kv_heads=num_kv_heads, sinks=True))
    assert_close(problem, *decode(problem, variant, open_device))


@pytest.mark.parametrize(
    ("length", "num_kv_heads"), [(300, 1), (2047, 8), (2048, 8), (4500, 1), (800, 64), *long([(2300, 32)])]
)
def test_a_sequence_leaves_as_many_partial_results_as_the_host_says(length, num_kv_heads):
    problem = build(TENSOR.spec(seq_lens=(length,), num_kv_heads=num_kv_heads))
    device = emulator(stats=True)
    decode(problem, TENSOR, device=device)
    config = split_config(checked_call(problem, "split"), capability=device.capability)
    count = -(-length // config.split_size(length, num_kv_heads))
    written = device.launches[0].buffers["split_sums"].bytes_written
    assert written == count * problem.spec.num_heads * TENSOR.head_dim * 4


@pytest.mark.parametrize("variant", [TENSOR, FOUR_BLOCKS, CUDA_CORES, *long([MANY_HEADS])], ids=str)
def test_a_needle_is_found_at_every_position_of_a_step(variant, open_device):
    """Eight KV heads have a needle each; its value, which says where it lies, is all of the output.

    With many heads test_many.py looks for it at every position of a stage.
    """
    size = SHORTEST_SPLIT
    for first in (0, 8, 16, 24, size - 4):
        needles = tuple(range(first, first + 8))
        for length in (32, 2 * size) if first < 32 else (2 * size, size + 4):
            spec = variant.spec(seq_lens=(length,), num_kv_heads=8, needles=needles, fingerprint=True, group_size=1)
            spec = spec.replace(group_size=variant.group_size)
            problem = build(spec)
            out, lse = decode(problem, variant, open_device)
            assert_close(problem, out, lse)
            np.testing.assert_array_equal(out.astype(np.float32), np.round(expect(problem)[0]))


@ALL_BUT_MANY_HEADS
def test_the_bits_are_the_same_in_any_batch_placement_layout_and_schedule(variant, open_device):
    """Those of many heads are in test_many.py, in another placement and layout."""
    spec = variant.spec(seq_lens=(700, 3, 65, 1037))
    out, lse = decode(build(spec), variant, open_device)
    device = open_device(seed=0, global_race=True)
    assert_same_bits(decode(build(spec), variant, device=device), (out, lse))
    for i in range(len(spec.seq_lens)):
        alone, device = spec.replace(seq_lens=spec.seq_lens[i : i + 1], ids=(i,)), open_device(seed=1 + i)
        assert_same_bits(decode(build(alone), variant, device=device), (out[i : i + 1], lse[i : i + 1]))
    for other, order in elsewhere(spec):
        assert_same_bits(decode(build(other), variant, open_device), (out[order], lse[order]))


def elsewhere(spec):
    """The sequences of a spec on other blocks, in other layouts, orders and strides; and which ones they are."""
    for placement, order, layout in ((5, [2, 0], "HND"), (6, [3, 1, 0, 2, 0], "NHD")):
        yield (
            spec.replace(
                seq_lens=tuple(spec.seq_lens[i] for i in order),
                ids=tuple(order),
                placement_seed=placement,
                layout=layout,
                strides="strided" if layout == "HND" else "own",
            ),
            order,
        )


@pytest.mark.parametrize(
    ("variant", "block_size"),
    [
        (TENSOR, 3),
        *long([(TENSOR, 1), (TENSOR, 256), (CUDA_CORES, 1), (CUDA_CORES, 3), (CUDA_CORES, 256)]),
        *long((MANY_HEADS, block_size) for block_size in (1, 3, 256)),
    ],
    ids=str,
)
def test_the_bits_are_the_same_for_any_block_size(variant, block_size, open_device):
    """All loops look their tokens up with the same steps."""
    spec = variant.spec(seq_lens=(700, 3, 65, 1037))
    out, lse = decode(build(spec), variant, open_device)
    for other, order in elsewhere(spec.replace(block_size=block_size)):
        assert_same_bits(decode(build(other), variant, open_device), (out[order], lse[order]))


@ALL
def test_counters_are_ready_for_the_next_launch(variant, open_device):
    problem = build(variant.spec(seq_lens=(700, 3, 300), num_kv_heads=1, sinks=True))
    expected = decode(problem, variant, open_device)
    call = checked_call(problem, "split")
    for seed in (1, 2):
        outs = [(np.zeros_like(problem.q), np.zeros(problem.q.shape[:2], np.float32)) for _ in range(2)]
        with open_device(seed=seed, global_race=True) as device:
            for out, lse in outs:
                attention.decode_attention(device, call, out, lse)
        for result in outs:
            assert_same_bits(result, expected)


def test_one_thread_of_a_block_fences_and_only_where_splits_are_merged(monkeypatch):
    """Each fence empties the L1 of its multiprocessor: once before a block counts, and once in the one that merges."""
    fence, lanes = Order.fence, []

    def counted(order, what, m):
        lanes.append(order.frame.num_lanes if m is None else np.count_nonzero(m))
        fence(order, what, m)

    monkeypatch.setattr(Order, "fence", counted)
    problem = build(TENSOR.spec(seq_lens=(3 * SHORTEST_SPLIT, SHORTEST_SPLIT, 2 * SHORTEST_SPLIT, 0), num_kv_heads=1))
    decode(problem, TENSOR)
    assert sum(lanes) == (3 + 1) + (2 + 1)


@ALL
@pytest.mark.parametrize("seed", [0, *long([1])])
def test_lengths_that_change_under_a_running_call_harm_no_later_one(variant, seed):
    """Every load of a length finds another one in memory."""
    problem = build(variant.spec(seq_lens=(3 * SHORTEST_SPLIT, 40), num_kv_heads=1))
    problem.block_tables %= len(problem.k_cache)  # entries past the lengths are used, too
    expected = decode(problem, variant)
    lengths = [0, 40, SHORTEST_SPLIT, 2 * SHORTEST_SPLIT + 5, 3 * SHORTEST_SPLIT, 2**30]
    # Partial results that no thread block has left may be merged.
    with emulator(init_check=False, seed=seed) as device:
        result = after_changing_lengths(
            device, checked_call(problem, "split"), attention.decode_attention, "split_counters", lengths, seed
        )
    assert_same_bits(result, expected)


SEEN_TOKENS = 601


def seen(variant):
    """The variant with a score_mod that reads arrays that end with the heads and with the longest sequence."""
    of_head = np.linspace(0, 1, 2 * variant.group_size, dtype=np.float32)
    of_position = np.resize(np.float32([0.7, 0, 0]), SEEN_TOKENS)

    def seeing(score, q_pos, k_pos, head, seq):
        """Every argument counts; head 1 sees nothing."""
        if head == 1:
            return -math.inf
        return 0.5 * score + of_position[k_pos] + of_head[head] + 0.3 * seq - 0.01 * (q_pos - k_pos)

    return variant._replace(score_mod=seeing)


# Kernels with a score_mod are not kept on disk: the tests of these stand together.
WITH_SCORE_MOD = pytest.mark.parametrize(
    "variant",
    [
        seen(TENSOR),
        seen(CUDA_CORES._replace(head_dim=96, group_size=5)),
        seen(MANY_HEADS._replace(head_dim=112, group_size=18)),
        *long([seen(TENSOR_12)]),
    ],
    ids=str,
)


@WITH_SCORE_MOD
def test_score_mod_sees_what_exists_and_may_mask_every_key(variant, open_device):
    """Positions, heads and sequences, none past the end; a thread block has fewer heads than its tiles have rows."""
    for sinks in (False, True):
        problem = build(variant.spec(seq_lens=(1, 40, SEEN_TOKENS, 0), num_kv_heads=2, sinks=sinks, window=450))
        out, lse = decode(problem, variant, open_device)
        assert_close(problem, out, lse)
        assert (out[:, 1] == 0).all()
        np.testing.assert_array_equal(lse[:3, 1], problem.options["sinks"][1] if sinks else np.float32(-math.inf))


@pytest.mark.parametrize("variant", [FOUR_BLOCKS, *long([TENSOR_12])], ids=str)
def test_logits_that_rise_slowly_overflow_nothing_and_leave_other_heads_alone(variant, open_device):
    """About two powers of two from one step of a warp to the next, for head 1; the others fall, head 3 by hundreds.

    Its P would overflow if its pivot moved with that of head 1.
    """
    problem = build(variant._replace(modified=True).spec(seq_lens=(2100,), num_kv_heads=1, alibi=True))
    slopes = problem.options["alibi_slopes"]
    slopes[...], slopes[1], slopes[3] = -0.012, 0.012, -2
    out, lse = decode(problem, variant, open_device)
    assert_close(problem, out, lse)
    problem.q[:, 1] = np.nan  # whose maximum never grows
    others = np.arange(problem.spec.num_heads) != 1
    expected = out[:, others], lse[:, others]
    out, lse = decode(problem, variant, open_device)
    assert_same_bits((out[:, others], lse[:, others]), expected)


@pytest.mark.parametrize("variant", [TENSOR, MANY_HEADS], ids=str)
def test_logits_of_up_to_180_million_overflow_nothing_in_float16(variant, open_device):
    for largest in (1.1e8, 1.8e8, -1.8e8):
        problem = build(variant.spec(seq_lens=(70,), num_kv_heads=1, scale=largest / 64))
        problem.k_cache[:] = 1
        problem.q[:] = (np.arange(variant.group_size)[:, None] + 1) / variant.group_size
        out, _ = decode(problem, variant, open_device)
        assert np.abs(out - expect(problem)[0]).max() <= 1e-3


@pytest.mark.parametrize(
    "variant", [TENSOR, MANY_HEADS, Variant("split", 256, 16, "float32", "bfloat16", group_size=12)], ids=str
)
def test_scales_that_are_not_positive(variant, open_device):
    for scale in (-0.2, 0.0):
        problem = build(variant.spec(seq_lens=(70, 5), num_kv_heads=1, scale=scale))
        assert_close(problem, *decode(problem, variant, open_device))


@ALL_BUT_MANY_HEADS
def test_windows_over_the_edges_of_splits(variant, open_device):
    size = SHORTEST_SPLIT
    for window in (1, 2, 17, size - 1, size, size + 1, 2**31 - 1, 2**32, 2**40 + 1):
        lengths = (0, 1, 2, 18, size, size + 1, 2 * size + 100)
        problem = build(variant.spec(seq_lens=lengths, num_kv_heads=1, window=window))
        assert_close(problem, *decode(problem, variant, open_device))


@ALL
def test_k_and_v_have_strides_of_their_own(variant, open_device):
    for layout in ("NHD", "HND"):
        problem = build(variant.spec(seq_lens=(37, 5, 300), strides="strided", layout=layout))
        assert_close(problem, *decode(problem, variant, open_device))


@ALL
def test_infinite_and_nan_queries_stay_in_their_heads(variant, open_device):
    spec = variant.spec(seq_lens=(37, 300), num_kv_heads=1)
    expected, expected_lse = decode(build(spec), variant, open_device)
    for value in (np.nan, np.inf):
        problem = build(spec)
        problem.q[0, 1, 3] = value
        out, lse = decode(problem, variant, open_device)
        assert np.isnan(out[0, 1].astype(np.float32)).all()
        others = np.ones(lse.shape, bool)
        others[0, 1] = False
        assert_same_bits((out[others], lse[others]), (expected[others], expected_lse[others]))


@ALL
def test_only_visible_rows_are_read_and_each_sector_once(variant):
    window, p = 300, variant.block_size
    problem = build(variant.spec(seq_lens=(607, 40), window=window, num_kv_heads=1))
    device = emulator(footprint=True)
    decode(problem, variant, device=device)
    lengths = problem.spec.seq_lens
    seq = np.repeat(np.arange(len(lengths)), [min(window, n) for n in lengths])
    position = np.concatenate([np.arange(max(0, n - window), n) for n in lengths])
    rows = np.zeros(problem.k_cache.shape, bool)
    rows[problem.block_tables[seq, position // p], position % p] = True
    for name in ("k_cache", "v_cache"):
        device.launches[0].footprint.expect(name, read=rows, written=False)
    device.launches[0].footprint.expect("seq_lens", read=True)


@pytest.mark.parametrize("variant", CODES, ids=str)
def test_every_fp8_code_is_its_value(variant, open_device):
    """As a value: the output of one token. As a key: the LSE of one token, of which each head sees another code."""
    codes, first, heads = np.arange(256, dtype=np.uint8), 5, variant.group_size
    values = codes.view(reference.FP8_DTYPES[variant.kv_dtype]).astype(np.float32)
    finite = np.isfinite(values)
    # No head sees anything beside a code that is not finite, even where its own query is 0.
    keys = [*np.array_split(codes[finite], 32), *codes[~finite, None]]
    problem = build(variant.spec(seq_lens=(1,) * len(keys), num_kv_heads=1, scale=1.0))
    problem.q[...] = np.eye(heads, variant.head_dim, first)
    problem.k_cache[...] = 0
    block = problem.block_tables[:, 0]
    problem.v_cache[block, 0, 0, :64] = codes.reshape(4, 64)[np.arange(len(keys)) % 4]
    for i, key in enumerate(keys):
        problem.k_cache[block[i], 0, 0, first : first + len(key)] = key
    out, lse = decode(problem, variant, open_device)
    for i, key in enumerate(keys):
        if finite[key].all():
            np.testing.assert_allclose(lse[i, : len(key)], values[key], rtol=3e-7, atol=2e-6)
        else:
            assert np.isnan(lse[i]).all()
    # Infinite values meet the second term of P, which is 0.
    expected = np.where(np.isinf(values), np.nan, values).reshape(4, 64)
    for i in range(8):
        np.testing.assert_array_equal(out[i, 0, :64], expected[i % 4])


@ALL
def test_caches_whose_strides_are_negative(variant, open_device):
    spec = variant.spec(seq_lens=(70, 300))
    expected = decode(build(spec), variant, open_device)
    problem = build(spec)
    for name in ("k_cache", "v_cache"):
        setattr(problem, name, np.ascontiguousarray(getattr(problem, name)[::-1])[::-1])
    assert_same_bits(decode(problem, variant, open_device), expected)

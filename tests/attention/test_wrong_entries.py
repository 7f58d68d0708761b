"""Wrong lengths, block ids and query starts on a device, where nobody looks at them first, harm no other sequence."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pagedkv.cuda.bad_entries import raise_if_failed
from pagedkv.emulator.machine.access import Access
from pagedkv.kernels.prefill.config import PART

from ..support.devices import emulator
from ..support.problems import build
from ..support.strategies import long
from .kernels import (
    BOTH_PREFILLS,
    DECODE,
    FEW_ROWS,
    FEW_ROWS_SPLIT,
    LONG,
    ON_DEVICE,
    PREFILL_CORES,
    PREFILL_VLLM,
    SPLIT,
    V1,
    V2,
    WGMMA,
    assert_same_bits,
    each_emulated,
    each_kernel,
    new_results,
)

# Where kernels read lengths and bounds: all forms of split do it in the same steps.
READ_LENGTHS = (V1, V2, SPLIT)


def numbers(*values):
    return np.array(values, np.int32)


def batch_of(kernel):
    """Three sequences, the last one the longest, so that whatever is wrong with one leaves two others."""
    if kernel is FEW_ROWS:
        fields = {"seq_lens": (600, 530, 700), "query_lens": (4, 3, 8), "num_kv_heads": 1}
    elif kernel.is_prefill:
        fields = {"seq_lens": (40, 3, 100), "query_lens": (40, 3, 40), "num_kv_heads": 1}
    else:
        fields = {"seq_lens": (40, 3, 600)}
    return kernel.build(**fields, sinks=True)


def rows_of(problem, sequence):
    starts = np.arange(4) if problem.query_starts is None else problem.query_starts
    return slice(*starts[sequence:][:2])


def assert_only_these_are_empty(problem, result, expected, wrong):
    """The rows of the wrong sequences are 0 and -inf, whatever their sinks; those of the others have their bits."""
    out, lse = result
    for sequence in range(len(problem.seq_lens)):
        rows = rows_of(problem, sequence)
        if sequence in wrong:
            assert (out[rows] == 0).all()
            assert (lse[rows] == -np.inf).all()
        else:
            assert_same_bits((out[rows], lse[rows]), tuple(x[rows] for x in expected))


@each_kernel(*ON_DEVICE, long=LONG)
def test_what_check_refuses_is_recorded_once_and_harms_nobody_else(kernel, open_device):
    problem = batch_of(kernel)
    expected, good = kernel.attend(problem, open_device), kernel.call(problem, check=True)
    column = (512 if kernel is FEW_ROWS else 64) // kernel.spec.block_size
    cases = [({}, None, "", [])]
    for bad in (-1, 10**6, 2**31 - 1, -(2**31)) if kernel in DECODE else (10**6,):
        tables = good.block_tables.copy()
        tables[2, column] = bad
        cases.append(({"block_tables": tables}, IndexError, rf"got {bad} for sequence 2, column {column}$", [2]))
    for bad in (-1, 10**6):
        lengths = good.seq_lens.copy()
        lengths[1] = bad
        cases.append(({"seq_lens": lengths}, ValueError, rf"seq_lens .* got {bad} for sequence 1$", [1]))
    for changes, error, message, wrong in cases:
        result = new_results(problem)
        with open_device(global_race=True) as device:
            kernel.launch(device, good._replace(**changes), *result)
            if error:
                with pytest.raises(error, match=message):
                    raise_if_failed([device])
            raise_if_failed([device])
        assert_only_these_are_empty(problem, result, expected, wrong)


@each_kernel(*BOTH_PREFILLS, FEW_ROWS, WGMMA, long=LONG)
def test_wrong_query_starts_are_recorded_and_harm_neither_other_sequences_nor_later_calls(kernel, open_device):
    problem = batch_of(kernel)
    expected, good = kernel.attend(problem, open_device), kernel.call(problem, check=True)
    first, second, last = problem.query_starts[1:].tolist()
    total = len(problem.q)
    cases = [
        ({"seq_lens": good.seq_lens * numbers(1, 0, 1)}, rf"got {second} for sequence 1$", [1]),
        ({"query_starts": numbers(0, first, second, total + 7)}, rf"got {total + 7} for sequence 2$", [2]),
        ({"query_starts": numbers(0, first, first - 1, last)}, rf"got {first - 1} for sequence 1$", [0, 1, 2]),
        ({"query_starts": numbers(-3, first, second, last)}, r"got -3 for sequence 0$", [0]),
    ]
    cases.append(({}, "", []))
    results = [new_results(problem) for _ in cases]
    with open_device() as device:
        for (changes, message, wrong), result in zip(cases, results, strict=True):
            kernel.launch(device, good._replace(**changes), *result)
            if wrong:
                with pytest.raises(ValueError, match=message):
                    raise_if_failed([device])
    for (_, _, wrong), result in zip(cases, results, strict=True):
        for sequence in {0, 1, 2}.difference(wrong):
            rows = rows_of(problem, sequence)
            assert_same_bits(tuple(x[rows] for x in result), tuple(x[rows] for x in expected))
    unchecked = [numbers(0, first, first - 1, 2**31 - 1), numbers(-(2**31), second, second, 0)]
    result, call = new_results(problem), kernel.call(problem)
    with open_device() as device:
        for query_starts in (*unchecked, call.query_starts):
            kernel.launch(device, call._replace(query_starts=query_starts), *result)
    assert_same_bits(result, expected)


@each_kernel(*READ_LENGTHS, *BOTH_PREFILLS, FEW_ROWS, PREFILL_VLLM)
def test_a_wrong_length_that_nobody_checks_counts_as_0_and_harms_no_later_call(kernel, open_device):
    """Nothing past the table, the workspace and shared memory is touched, and counters go back to 0."""
    problem = batch_of(kernel)
    expected, call = kernel.attend(problem, open_device), kernel.call(problem)
    capacity, results = call.block_tables.shape[1] * kernel.spec.block_size, []
    bad = [-1, 3] if kernel.is_prefill else [-1, 2**31 - 1]  # of prefill, fewer than its queries
    bad.append(capacity + 1)
    with open_device(global_race=True) as device:
        for length in (problem.seq_lens[2], *bad, problem.seq_lens[2]):
            lengths = call.seq_lens.copy()
            lengths[2] = length
            results.append(new_results(problem))
            kernel.launch(device, call._replace(seq_lens=lengths), *results[-1])
    for i, result in enumerate(results):
        assert_only_these_are_empty(problem, result, expected, [2] if 0 < i <= len(bad) else [])


def assert_checked_from(first_key, problem, kernel, open_device):
    """Blocks before that of the first key that is seen may be wrong, and that one may not."""
    expected, call = kernel.attend(problem, open_device), kernel.call(problem, check=True)
    first = first_key // kernel.spec.block_size
    call.block_tables[0, :first] = -1  # freed
    result = new_results(problem)
    with open_device() as device:
        kernel.launch(device, call, *result)
        raise_if_failed([device])
    assert_same_bits(result, expected)
    call.block_tables[0, first] = -1
    with open_device() as device:
        kernel.launch(device, call, *result)
        with pytest.raises(IndexError, match=rf"got -1 for sequence 0, column {first}"):
            raise_if_failed([device])


@each_kernel(*DECODE, *BOTH_PREFILLS)
def test_block_ids_before_the_window_are_not_looked_at(kernel, open_device):
    fields = {"seq_lens": (150,), "query_lens": (4,)} if kernel.is_prefill else {"seq_lens": (600,)}
    problem = kernel.build(window=70, **fields)
    assert_checked_from(problem.seq_lens[0] - len(problem.q) + 1 - 70, problem, kernel, open_device)


@each_kernel(PREFILL_CORES)
def test_block_ids_within_padding_are_not_looked_at(kernel, open_device):
    problem = kernel.build(seq_lens=(150,), query_lens=(4,), leftpad=True, poison="zero")
    problem.options["leftpad"][0] = 100
    assert_checked_from(100, problem, kernel, open_device)


@each_kernel(PREFILL_CORES)
def test_rows_within_padding_look_up_no_block(kernel, open_device):
    """A tile of them, which ends before the first key that anyone sees."""
    spec = {"seq_lens": (63,), "query_lens": (63,), "block_size": 4, "leftpad": True}
    problem = kernel.build(**spec, poison="zero")
    problem.options["leftpad"][0] = 20
    expected = kernel.attend(problem, open_device)
    problem.block_tables[0, : 20 // 4] = 2**30
    assert_same_bits(kernel.attend(problem, open_device), expected)


@each_kernel(*BOTH_PREFILLS, long=LONG)
def test_nothing_before_the_windows_of_a_chunk_is_looked_up_or_counts(kernel, open_device):
    """Blocks that have been given away, and NaN where the first window's tile begins."""
    fields = {"seq_lens": (100,), "query_lens": (4,), "window": 20, "kv_scales": None}
    first, p = 100 - 4 - 20 + 1, kernel.spec.block_size
    expected, problem = kernel.attend(kernel.build(**fields), open_device), kernel.build(**fields)
    problem.block_tables[0, : first // p] = -1
    block, inside = problem.block_tables[0, first // p], first % p
    named = ("k_scales", "v_scales") if kernel.spec.has_scales else ("k_cache", "v_cache")
    for name in named:  # offsets are the third axis of a block in layout vllm
        np.moveaxis(problem.caches[name][block], 0 if kernel.spec.layout == "NHD" else 2, 0)[:inside] = (
            0x7F if kernel.spec.is_fp8 else np.nan
        )
    call = kernel.call(kernel.build(**fields))._replace(block_tables=problem.block_tables, **problem.caches)
    result = new_results(problem)
    with open_device() as device:
        kernel.launch(device, call, *result)
    assert_same_bits(result, expected)


@st.composite
def bounded(draw, kernel):
    """A problem in tables that are wider than its lengths, and a bound that it keeps."""
    lengths = st.sampled_from([0, 1, 255, 256, 257, 511, 512, 513]) | st.integers(0, 700)
    fields = {
        "seq_lens": tuple(draw(st.lists(lengths, min_size=1, max_size=3))),
        "num_kv_heads": 1,
        "window": draw(st.none() | st.integers(1, 700)),
        "sinks": draw(st.booleans()),
        "seed": draw(st.integers(0, 2**16)),
    }
    problem = build(kernel.spec.replace(**fields))
    unused = np.full((len(problem.seq_lens), draw(st.sampled_from([0, 3, 200]))), -7, np.int32)
    problem.block_tables = np.concatenate([problem.block_tables, unused], axis=1)
    return problem, int(problem.seq_lens.max()) + draw(st.sampled_from([0, 0, 1, 10**6]))


@each_kernel(*READ_LENGTHS)
@settings(max_examples=6)
@given(data=st.data())
def test_a_bound_on_lengths_changes_no_bit(kernel, open_device, data):
    problem, bound = data.draw(bounded(kernel))
    expected = kernel.attend(problem, open_device)
    problem.options["max_seq_len"] = bound
    assert_same_bits(kernel.attend(problem, open_device), expected)
    result = new_results(problem)
    with open_device() as device:
        kernel.launch(device, kernel.call(problem, check=True), *result)
        raise_if_failed([device])
    assert_same_bits(result, expected)


@each_kernel(*READ_LENGTHS)
def test_a_length_beyond_the_bound_counts_as_0_and_harms_no_later_call(kernel, open_device):
    """The bound is rounded up to 512."""
    problem = kernel.build(seq_lens=(512, 3, 600), sinks=True)
    expected, unbounded, results = kernel.attend(problem, open_device), kernel.call(problem), []
    bounded = [kernel.call(problem, check)._replace(max_seq_len=300) for check in (False, True)]
    with open_device(global_race=True) as device:
        for call in (unbounded, *bounded, unbounded):
            results.append(new_results(problem))
            kernel.launch(device, call, *results[-1])
        with pytest.raises(ValueError, match=r"^seq_lens .* at most max_seq_len, got 600 for sequence 2$"):
            raise_if_failed([device])
    for result, wrong in zip(results, ([], [2], [2], []), strict=True):
        assert_only_these_are_empty(problem, result, expected, wrong)


@each_kernel(*BOTH_PREFILLS)
def test_tables_have_room_for_more_tokens_than_a_length_can_say(kernel, open_device):
    problem = kernel.build(seq_lens=(5,), query_lens=(3,))
    expected, call = kernel.attend(problem, open_device), kernel.call(problem)
    table = np.lib.stride_tricks.as_strided(call.block_tables, (1, 2**32 // kernel.spec.block_size), (4, 0))
    for length, wrong in ((5, []), (-(2**31), [0])):
        result = new_results(problem)
        wide = call._replace(block_tables=table, seq_lens=numbers(length), max_seq_len=2**33)
        with open_device() as device:
            kernel.launch(device, wide, *result)
        assert_only_these_are_empty(problem, result, expected, wrong)


@each_emulated(*DECODE, FEW_ROWS)
@pytest.mark.parametrize("seed", [0, *long([1])])
def test_lengths_that_change_under_a_running_call_harm_no_later_one(kernel, seed, monkeypatch):
    """Every load of a length finds another one in memory, in two calls; counters are 0 after each."""
    size = kernel.edge if kernel is not FEW_ROWS else PART
    batch = {"seq_lens": (3 * size, 40), "num_kv_heads": 1}
    if kernel is FEW_ROWS:
        batch = {"seq_lens": (FEW_ROWS_SPLIT + 9, 600), "query_lens": (1, 2), "num_kv_heads": 1}
    problem = kernel.build(**batch)
    problem.block_tables %= len(problem.k_cache)  # entries past the lengths are used, too
    expected, call, load = kernel.attend(problem), kernel.call(problem), Access.ld_global
    rng, lengths = np.random.default_rng(seed), [0, 3, 40, size, size + 1, 2 * size + 5, 3 * size, -1, 2**30]

    def changing(access, op, addresses, view, lanes, registers):
        load(access, op, addresses, view, lanes, registers)
        if where <= addresses.flat[0] < where + call.seq_lens.nbytes:
            found = rng.choice(lengths, len(registers[0]))
            np.copyto(registers[0], found, casting="unsafe", where=lanes is None or lanes)

    # Partial results that nobody has left may be merged.
    with emulator(init_check=False, race=kernel is not FEW_ROWS, seed=seed) as device:
        where = device.address("seq_lens", call.seq_lens)
        for each in (changing, changing, load):
            result = new_results(problem)
            monkeypatch.setattr(Access, "ld_global", each)
            kernel.launch(device, call, *result)
            assert kernel.kernel != "split" or not device.take("split_counters").any()
    assert_same_bits(result, expected)

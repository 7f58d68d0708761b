"""SequenceTable: what is refused, and that it changes nothing."""

import numpy as np
import pytest

from pagedkv.errors import CapacityError, OutOfBlocksError
from pagedkv.memory import BlockPool, SequenceTable
from pagedkv.memory import pool as pool_module
from pagedkv.memory.prefix.prompt import Added

from .manager import refused, state

REFUSALS = [
    (lambda t, a, b: t.add(21), ValueError, r"^num_tokens must be at most max_blocks \* block_size = 20, got 21$"),
    (lambda t, a, b: t.add(-1), ValueError, r"^num_tokens must be at least 0, got -1$"),
    (lambda t, a, b: t.add(1.0), TypeError, r"^num_tokens must be an int, got float$"),
    (lambda t, a, b: t.add(20), OutOfBlocksError, r"^5 blocks asked for, 4 of 12 are free$"),
    (
        lambda t, a, b: t.append([a], 1),
        ValueError,
        r"n must be at most 0, what is left of .* = 20 for sequence 8, got 1$",
    ),
    (lambda t, a, b: t.append([b, a], [1, 1]), ValueError, r"n must be at most 0"),
    (lambda t, a, b: t.append([b], 11), ValueError, r"n must be at most 10"),
    (lambda t, a, b: t.append([b], 2**63 - 1), ValueError, r"n must be at most 10"),
    (lambda t, a, b: t.append([b], 2**63), ValueError, r"^n must be at most 9223372036854775807"),
    (lambda t, a, b: t.append([b], [2**63 - 1]), ValueError, r"n must be at most 10"),
    (lambda t, a, b: t.append([b], -1), ValueError, r"^n must be at least 0, got -1$"),
    (lambda t, a, b: t.append([a, b], [0, -3]), ValueError, r"^n must be at least 0, got -3$"),
    (lambda t, a, b: t.append([b], [1, 1]), ValueError, r"^n must have shape \(num_seqs,\) = \(1,\), got \(2,\)$"),
    (
        lambda t, a, b: t.append([b], 1.0),
        TypeError,
        r"^n must be an int, or a list or array with one for each sequence, got float$",
    ),
    (lambda t, a, b: t.append([b], True), TypeError, r"^n must be an int, got bool$"),
    (lambda t, a, b: t.append([a, b], [0, False]), TypeError, r"^n must hold ints, got a bool$"),
    (lambda t, a, b: t.append([b], np.ones(1)), TypeError, r"^n must have an integer dtype, got float64$"),
    (lambda t, a, b: t.append([b], np.array(1)), ValueError, r"^n must have shape \(num_seqs,\) = \(1,\), got \(\)$"),
    (lambda t, a, b: t.append(True), TypeError, r"^seqs must hold ints, got a bool$"),
    (lambda t, a, b: t.append([b], np.ma.array([1], mask=[True])), TypeError, r"^n must be no masked array"),
    (lambda t, a, b: t.free(np.ma.array([a, b], mask=[0, 1])), TypeError, r"^seqs must be no masked array"),
    (lambda t, a, b: t.append([b, b]), ValueError, r"^seqs must name each sequence once, got \d+ twice$"),
    (lambda t, a, b: t.append([b, a, b], 0), ValueError, r"^seqs must name each sequence once"),
    (lambda t, a, b: t.truncate([b, b], 1), ValueError, r"^seqs must name each sequence once"),
    (lambda t, a, b: t.free([a, b, a]), ValueError, r"^seqs must name each sequence once"),
    (lambda t, a, b: t.fork(b, 3), CapacityError, r"^3 more sequences asked for, 2 of 4 rows are free$"),
    (lambda t, a, b: t.fork(b, -1), ValueError, r"^n must be at least 0, got -1$"),
    (lambda t, a, b: t.fork([b, a], 2), CapacityError, r"^4 more sequences asked for, 2 of 4 rows are free$"),
    (lambda t, a, b: t.fork("b"), TypeError, r"^seqs must be handles \(.*\), got str$"),
    (lambda t, a, b: t.free(Added(a, 0)), TypeError, r"^seqs must be handles \(.*\), got Added: pass its \.seq$"),
    (lambda t, a, b: t.seq_lens([Added(a, 0)]), TypeError, r"got Added: pass its \.seq$"),
    (lambda t, a, b: t.fork(True), TypeError, r"^seqs must hold ints, got a bool$"),
    (lambda t, a, b: t.slots(True, 0, 0), TypeError, r"^seq must be an int, got bool$"),
    (
        lambda t, a, b: t.reorder([a, b], [0]),
        ValueError,
        r"^parents must have shape \(num_seqs,\) = \(2,\), got \(1,\)$",
    ),
    (lambda t, a, b: t.reorder([a, b], [0, 2]), IndexError, r"^parents must be in 0..num_seqs-1 = 0..1, got 2$"),
    (lambda t, a, b: t.reorder([a, b], [-1, 1]), IndexError, r"^parents must be in 0..num_seqs-1 = 0..1, got -1$"),
    (lambda t, a, b: t.reorder([a, a], [0, 1]), ValueError, r"^seqs must name each sequence once"),
    (lambda t, a, b: t.reorder([b, 0], [0, 0]), KeyError, r"no sequence 0: it was freed or never added"),
    (lambda t, a, b: t.truncate(b, 11), ValueError, r"^length must be at most the 10 tokens of sequence 9, got 11$"),
    (lambda t, a, b: t.truncate([a, b], [20, 11]), ValueError, r"^length must be at most the 10 tokens"),
    (lambda t, a, b: t.truncate(b, -1), ValueError, r"^length must be at least 0, got -1$"),
    (
        lambda t, a, b: t.truncate(b, None),
        TypeError,
        r"^length must be an int, or a list or array with .*, got NoneType$",
    ),
    (
        lambda t, a, b: t.slots(b, 0, 11),
        ValueError,
        r"^start <= stop <= 10, the length of sequence 9, must hold, got start 0, stop 11$",
    ),
    (lambda t, a, b: t.slots(b, 3, 2), ValueError, r"got start 3, stop 2$"),
    (lambda t, a, b: t.slots(b, -1, 2), ValueError, r"^start must be at least 0, got -1$"),
    (lambda t, a, b: t.slots(b, 0, 2.0), TypeError, r"^stop must be an int, got float$"),
    (lambda t, a, b: t.seq_lens([a, 0]), KeyError, r"no sequence 0: it was freed or never added"),
    (lambda t, a, b: t.seq_lens([-1]), KeyError, r"no sequence -1: it was freed or never added"),
    (
        lambda t, a, b: t.fork([], 2**63),
        ValueError,
        r"^n must be at most 9223372036854775807, got 9223372036854775808$",
    ),
    (lambda t, a, b: t.free(2**70), KeyError, r"no sequence 1180591620717411303424: it was freed or never added"),
    (lambda t, a, b: t.free([a, -(2**70)]), KeyError, r"no sequence -1180591620717411303424"),
    (lambda t, a, b: t.seq_lens([True]), TypeError, r"^seqs must hold ints, got a bool$"),
    (lambda t, a, b: t.seq_lens([1.0]), TypeError, r"^seqs must be handles \(.*\), got float$"),
    (lambda t, a, b: t.seq_lens(None), TypeError, r"^seqs must be handles \(.*\), got NoneType$"),
    (lambda t, a, b: t.seq_lens([[a], [b]]), TypeError, r"^seqs must be handles \(.*\), got list$"),
    (lambda t, a, b: t.seq_lens(np.array([a], np.int32)), TypeError, r"^seqs must have dtype int64, got int32$"),
    (lambda t, a, b: t.seq_lens(np.array([[a]])), ValueError, r"^seqs must have shape \(num_seqs,\), got \(1, 1\)$"),
]


@pytest.mark.parametrize(("call", "error", "message"), REFUSALS)
def test_refusals(table, call, error, message):
    full, other = table.add(20), table.add(10)
    with refused(table, error, message):
        call(table, full, other)


def test_a_fork_past_the_last_reference(table):
    seq = table.add(6)
    table.pool._refs[1] = 2**31 - 2
    before = state(table)
    with pytest.raises(OverflowError, match=r"^block 1 would have more than 2\*\*31 - 1 references$"):
        table.fork(seq, 2)
    assert state(table) == before
    assert len(table.fork(seq)) == 1


@pytest.mark.parametrize("name", ["append", "truncate"])
def test_counts_that_change_while_they_are_used(table, name, monkeypatch):
    counts = np.array([2])
    commit = pool_module.commit

    def changing(writes):
        counts[:] = 99
        commit(writes)

    seq = table.add(3)
    monkeypatch.setattr(pool_module, "commit", changing)
    getattr(table, name)(seq, counts)
    assert table.seq_lens(seq).tolist() == [5 if name == "append" else 2]
    table.check()


def test_all_rows_taken(table):
    for _ in range(4):
        table.add(0)
    with refused(table, CapacityError, r"^1 more sequences asked for, 0 of 4 rows are free$"):
        table.add(0)


def test_append_that_needs_more_blocks_than_there_are(table):
    seqs = [table.add(16), table.add(16), table.add(14)]
    [fork] = table.fork(seqs[2])
    assert table.pool.num_free == 0
    with refused(table, OutOfBlocksError, r"^1 blocks asked for, 0 of 12 are free$"):
        table.append([fork])
    with refused(table, OutOfBlocksError, r"^3 blocks asked for, 0 of 12 are free$"):
        table.append([*seqs, fork])
    table.free(seqs[0])
    assert table.append([seqs[2], fork]).copies.shape == (1, 2)
    table.check()


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ((8, 4, 3, 2), TypeError, r"^pool must be a BlockPool, got int$"),
        ((BlockPool(8), 0, 3, 2), ValueError, r"^block_size must be at least 1, got 0$"),
        ((BlockPool(8), 4.0, 3, 2), TypeError, r"^block_size must be an int, got float$"),
        ((BlockPool(8), 4, 0, 2), ValueError, r"^max_seqs must be at least 1, got 0$"),
        ((BlockPool(8), 4, 3, 0), ValueError, r"^max_blocks must be at least 1, got 0$"),
        ((BlockPool(8), 2**31, 3, 2), ValueError, r"^block_size must be at most 2147483647, got 2147483648$"),
        (
            (BlockPool(8), 4, 3, 2**29),
            ValueError,
            r"^max_blocks \* block_size must be at most 2\*\*31 - 1, got 536870912 \* 4$",
        ),
    ],
)
def test_tables_that_cannot_be(arguments, error, message):
    with pytest.raises(error, match=message):
        SequenceTable(*arguments)

"""SequenceTable: where tokens go, what is shared, and what check() finds."""

from operator import attrgetter

import numpy as np
import pytest

from pagedkv.memory import BlockPool, SequenceTable

from .manager import refused, state


def lens(table, seqs):
    return table.seq_lens(seqs).tolist()


@pytest.mark.parametrize(("num_tokens", "num_blocks"), [(0, 0), (1, 1), (4, 1), (5, 2), (20, 5)])
def test_add_takes_the_blocks_that_the_tokens_need(table, num_tokens, num_blocks):
    seq = table.add(num_tokens)
    assert type(seq) is int
    assert table.pool.num_free == 12 - num_blocks
    assert lens(table, seq) == [num_tokens]
    assert table.slots(seq, 0, num_tokens).tolist() == list(range(num_tokens))
    assert (table.num_seqs, table.num_tokens) == (1, num_tokens)
    table.check()


def test_append_fills_the_last_block_before_it_takes_another(table):
    seqs = [table.add(3), table.add(4), table.add(0)]
    slots, copies = table.append(seqs)
    assert slots.dtype == copies.dtype == np.int64
    assert slots.tolist() == [3, 8, 12]
    assert copies.shape == (0, 2)
    assert table.append(seqs).slots.tolist() == [16, 9, 13]
    assert table.block_tables(seqs).tolist() == [[0, 4], [1, 2], [3, -1]]
    table.check()


def test_append_of_different_numbers_of_tokens(table):
    seqs = [table.add(3), table.add(4), table.add(0), table.add(1)]
    slots = table.append(seqs, [2, 0, 5, 1]).slots
    assert lens(table, seqs) == [5, 4, 5, 2]
    blocks = table.block_tables(seqs)
    assert blocks.tolist() == [[0, 3], [1, -1], [4, 5], [2, -1]]
    assert slots.tolist() == [3, 12, 16, 17, 18, 19, 20, 9]
    table.check()


def test_append_of_nothing_changes_nothing_even_at_the_maximum_length(table):
    full, shared = table.add(20), table.add(2)
    table.fork(shared)
    appended = table.append([shared, full], 0)
    assert appended.slots.shape == (0,)
    assert appended.copies.shape == (0, 2)
    table.append([shared, full], np.array([1, 0], np.int32))
    assert lens(table, [shared, full]) == [3, 20]
    table.check()


def test_many_tokens_are_the_same_as_one_at_a_time():
    at_once, one_by_one = (SequenceTable(BlockPool(40), 3, 8, 10) for _ in range(2))
    counts = [0, 1, 2, 3, 4, 7, 11, 30]
    a = at_once.append([at_once.add(0) for _ in counts], counts).slots
    b = [one_by_one.add(0) for _ in counts]
    for seq, count in zip(b, counts, strict=True):
        for _ in range(count):
            one_by_one.append(seq)
    assert a.tolist() == [
        slot for seq, count in zip(b, counts, strict=True) for slot in one_by_one.slots(seq, 0, count)
    ]


def test_fork_gives_new_handles_and_takes_no_blocks(table):
    seq = table.add(6)
    forks = table.fork(seq, 3)
    assert all(type(fork) is int for fork in forks)
    assert len({seq, *forks}) == 4
    assert table.pool.num_free == 10
    assert table.pool.ref_counts[:3].tolist() == [4, 4, 0]
    assert lens(table, forks) == [6, 6, 6]
    assert table.fork(seq, 0) == []
    table.check()


@pytest.mark.parametrize(("length", "num_blocks"), [(9, 3), (8, 2), (5, 2), (4, 1), (1, 1), (0, 0), (10, 3)])
def test_truncate_releases_the_blocks_past_the_end(table, length, num_blocks):
    seq = table.add(10)
    table.truncate(seq, length)
    assert lens(table, [seq]) == [length]
    assert table.pool.num_free == 12 - num_blocks
    assert table.block_tables([seq]).shape == (1, max(num_blocks, 1))
    table.check()


def test_many_sequences_are_truncated_in_one_call(table):
    seqs = [table.add(10), table.add(7), table.add(3)]
    table.truncate(seqs, [5, 7, 0])
    assert lens(table, seqs) == [5, 7, 0]
    table.truncate(seqs[:2], 5)
    assert lens(table, seqs) == [5, 5, 0]
    table.check()


def test_truncate_keeps_what_others_share(table):
    seq = table.add(10)
    [fork] = table.fork(seq)
    table.truncate(seq, 0)
    assert table.pool.num_free == 9
    assert table.slots(fork, 0, 10).tolist() == list(range(10))


def test_free_gives_blocks_back_when_the_last_sharer_goes(table):
    seq = table.add(6)
    forks = table.fork(seq, 2)
    table.free([seq, forks[0]])
    assert table.pool.num_free == 10
    table.free(forks[1])
    assert table.pool.num_free == 12
    assert table.num_seqs == 0
    table.check()


def test_slots_of_a_range(table):
    table.add(1)
    seq = table.add(9)
    assert table.slots(seq, 3, 9).tolist() == [7, 8, 9, 10, 11, 12]
    assert table.slots(seq, 9, 9).dtype == np.int64
    assert table.slots(seq, 9, 9).shape == (0,)


def test_tables_and_lengths_are_new_arrays_as_wide_as_needed(table):
    seqs = [table.add(9), table.add(1), table.add(0)]
    tables, lengths = table.block_tables(seqs), table.seq_lens(seqs)
    assert tables.dtype == lengths.dtype == np.int32
    assert tables.flags.c_contiguous
    assert tables.tolist() == [[0, 1, 2], [3, -1, -1], [-1, -1, -1]]
    assert table.block_tables(seqs[1:]).shape == (2, 1)
    assert table.block_tables(seqs[2]).shape == (1, 1)
    assert table.block_tables([]).shape == (0, 1)
    assert table.seq_lens([]).shape == (0,)
    tables[:], lengths[:] = 7, 7
    table.check()


def test_a_sequence_may_be_named_twice_in_reads(table):
    seq = table.add(5)
    assert table.block_tables([seq, seq]).tolist() == [[0, 1], [0, 1]]
    assert lens(table, (seq, seq)) == [5, 5]


def test_blocks_of_one_token():
    table = SequenceTable(BlockPool(6), block_size=1, max_seqs=2, max_blocks=4)
    seq = table.add(2)
    [fork] = table.fork(seq)
    assert table.append([seq, fork], 2).slots.tolist() == [2, 3, 4, 5]
    table.check()


def test_slots_past_32_bits():
    pool = BlockPool(4096)
    table = SequenceTable(pool, block_size=2**20, max_seqs=1, max_blocks=2)
    pool.allocate(4094)
    seq = table.add(2**20 - 1)
    assert table.append(seq, 2).slots.tolist() == [4095 * 2**20 - 1, 4095 * 2**20]
    assert table.append(seq).slots.tolist() == [4095 * 2**20 + 1]
    assert table.slots(seq, 2**20, 2**20 + 2).tolist() == [4095 * 2**20, 4095 * 2**20 + 1]


@pytest.mark.parametrize(
    ("where", "index", "value", "message"),
    [
        ("_rows.lens", 0, -1, "a length is out of range"),
        ("_rows.lens", 0, 21, "a length is out of range"),
        ("_rows.lens", 3, 1, "a row without a sequence has a length"),
        ("_rows.lens", 1, 4, "an entry past the end of a sequence is not -1"),
        ("_rows.lens", 1, 9, "an entry is no block"),
        ("_rows.blocks", (0, 4), 3, "an entry past the end of a sequence is not -1"),
        ("_rows.blocks", (3, 0), 3, "an entry past the end of a sequence is not -1"),
        ("_rows.blocks", (0, 0), 12, "an entry is no block"),
        ("_rows.blocks", (0, 0), 1, "a block occurs twice in one sequence"),
        ("_rows.blocks", (0, 0), 9, "reference counts differ from the table's entries"),
        ("pool._refs", 0, 2, "shared blocks are counted wrongly"),
        ("pool._refs", 0, -1, "a reference count is negative"),
        ("_rows.handles._num_free", 0, 5, "5 of 4 rows are free"),
        ("_rows.handles._num_free", 0, 1, "free rows and rows without a handle differ"),
        ("_rows.handles._free", 0, 2, "free rows and rows without a handle differ"),
        ("_rows.handles._issued", 0, -1, "free rows and rows without a handle differ"),
        ("_rows.handles._issued", 0, 17, "a handle is not that of its generation"),
        ("_rows.handles._generations", 1, 2, "a handle is not that of its generation"),
        ("_rows.handles._issued", 4, -1, "the entry for handles of no row has changed"),
    ],
)
def test_check_finds_broken_invariants(table, where, index, value, message):
    table.add(6)
    table.add(5)
    table.check()
    attrgetter(where)(table)[index] = value
    with pytest.raises(AssertionError, match=message):
        table.check()


def test_every_block_says_a_sequence_that_has_it(table):
    first, second = table.add(6), table.add(3)
    [fork] = table.fork(first)
    table.append(fork)
    owners = table.block_owners().tolist()
    assert owners[0] in (first, fork)
    assert owners[1:] == [first, second, fork, *[-1] * 8]
    table.free([first, second])
    assert table.block_owners().tolist() == [fork, -1, -1, fork, *[-1] * 8]


def test_beams_go_on_with_the_tokens_of_others(table):
    seqs = [table.add(n) for n in (6, 9, 3)]
    table.reorder(seqs, [1, 1, 0])
    assert lens(table, seqs) == [9, 9, 6]
    assert table.block_tables(seqs).tolist() == [[2, 3, 4], [2, 3, 4], [0, 1, -1]]
    assert table.pool.ref_counts[:6].tolist() == [1, 1, 2, 2, 2, 0]
    assert table.pool.num_free == 7, "what only the third one had is free"
    slots, copies = table.append(seqs)
    assert slots.tolist() == [21, 17, 6]
    assert copies.tolist() == [[4, 5]]
    table.check()


def test_a_reorder_of_nothing_changes_nothing(table):
    seqs = [table.add(6), table.add(3)]
    before = state(table)
    table.reorder(seqs, [0, 1])
    table.reorder([], [])
    assert state(table) == before


def test_forks_of_several_sequences(table):
    seqs = [table.add(6), table.add(3)]
    forks = table.fork(seqs)
    assert lens(table, forks) == [6, 3]
    assert table.block_tables(forks).tolist() == [[0, 1], [2, -1]]
    assert table.pool.ref_counts[:4].tolist() == [2, 2, 2, 0]
    assert table.fork([]) == []
    table.check()


def test_steps_go_on_past_the_columns_that_a_table_has():
    table = SequenceTable(BlockPool(64), 4, 32, 64)
    seqs = [table.add(62), table.add(3)]
    for _ in range(6):
        table.append(seqs)
        table.check()
    assert lens(table, seqs) == [68, 9]


def test_a_step_past_the_longest_sequence_is_refused():
    table = SequenceTable(BlockPool(8), 4, 2, 2)
    seqs = [table.add(6), table.add(3)]
    for _ in range(2):
        table.append(seqs)
    with refused(table, ValueError, "8"):
        table.append(seqs)


def test_blocks_released_by_the_caller_are_not_released_again():
    table = SequenceTable(BlockPool(8), 4, 3, 8)
    seq = table.add(4)
    table.pool.release(table.block_tables(seq)[0, :1])
    for call in (lambda: table.free(seq), lambda: table.truncate(seq, 0)):
        with pytest.raises(KeyError, match="block 0 released 1 times, it has 0 references"):
            call()
    assert table.pool.ref_counts[0] == 0
    assert lens(table, seq) == [4]


def test_a_shared_block_released_by_the_caller_is_freed_once():
    table = SequenceTable(BlockPool(8), 4, 3, 8)
    seqs = [table.add(8)]
    seqs += table.fork(seqs)
    table.pool.release([1])
    for call in (lambda: table.free(seqs), lambda: table.truncate(seqs, 4)):
        with pytest.raises(KeyError, match="block 1 released 2 times, it has 1 references"):
            call()
    assert table.pool.ref_counts[:2].tolist() == [2, 1]
    assert table.pool.num_free == 6


def test_a_fork_does_not_wrap_a_count_of_references(table):
    seq = table.add(4)
    table.pool._refs[0] = 2**31 - 1
    with pytest.raises(OverflowError, match="more than 2"):
        table.fork(seq, 1)


def test_70_000_references_to_one_block():
    table = SequenceTable(BlockPool(4), block_size=2, max_seqs=70_001, max_blocks=2)
    seq = table.add(3)
    forks = table.fork(seq, 69_999)
    assert table.pool.ref_counts.tolist() == [70_000, 70_000, 0, 0]
    assert table.append(forks[7]).copies.tolist() == [[1, 2]]
    table.reorder(forks[:2], [1, 0])
    table.check()
    table.free(forks)
    assert table.pool.ref_counts.tolist() == [1, 1, 0, 0]
    assert table.pool.num_shared == 0
    table.free(seq)
    table.check()

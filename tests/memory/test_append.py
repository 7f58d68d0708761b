"""Copy-on-write: shared blocks, and no others, are copied before they are written."""


def test_a_shared_partial_block_is_copied_before_it_is_written(table):
    seq = table.add(6)
    [fork] = table.fork(seq)
    assert table.block_tables([seq, fork]).tolist() == [[0, 1], [0, 1]]
    slots, copies = table.append(seq)
    assert copies.tolist() == [[1, 2]]
    assert slots.tolist() == [10]
    assert table.block_tables([seq, fork]).tolist() == [[0, 2], [0, 1]]
    # Nobody shares it any more.
    slots, copies = table.append(fork)
    assert copies.shape == (0, 2)
    assert slots.tolist() == [6]
    table.check()


def test_a_sharer_that_appends_nothing_copies_nothing(table):
    first = table.add(table.block_size + 1)
    second, third = table.fork(first, 2)
    before = table.block_tables([first, second]).tolist()
    free = table.pool.num_free
    appended = table.append([first, second, third], [0, 0, 1])
    assert table.block_tables([first, second]).tolist() == before
    assert len(appended.copies) == len(appended.slots) == 1
    assert table.pool.num_free == free - 1
    table.check()


def test_the_last_sharer_of_an_append_keeps_the_block(table):
    seq = table.add(6)
    seqs = [seq, *table.fork(seq, 3)]
    slots, copies = table.append(seqs[::-1])
    assert copies.tolist() == [[1, 2], [1, 3], [1, 4]]
    assert slots.tolist() == [10, 14, 18, 6]
    assert table.pool.ref_counts[:6].tolist() == [4, 1, 1, 1, 1, 0]
    table.check()


def test_no_sharer_keeps_a_block_while_others_share_it(table):
    seq = table.add(6)
    seqs = [seq, *table.fork(seq, 3)]
    copies = table.append(seqs[:3], [1, 1, 1]).copies
    assert copies.tolist() == [[1, 2], [1, 3], [1, 4]]
    assert table.pool.ref_counts[:6].tolist() == [4, 1, 1, 1, 1, 0]
    table.check()


def test_appending_nothing_copies_no_shared_block(table):
    seq = table.add(6)
    [fork] = table.fork(seq)
    assert table.append([seq, fork], [0, 1]).copies.tolist() == [[1, 2]]
    assert table.append([seq, fork], [1, 0]).copies.shape == (0, 2)
    table.check()


def test_full_blocks_are_shared_without_copies(table):
    seq = table.add(8)
    [fork] = table.fork(seq)
    assert table.append([seq, fork]).copies.shape == (0, 2)
    assert table.block_tables([seq, fork]).tolist() == [[0, 1, 2], [0, 1, 3]]
    assert table.pool.ref_counts[:4].tolist() == [2, 2, 1, 1]


def test_a_full_block_that_was_truncated_into_is_copied_if_shared(table):
    seq = table.add(8)
    [fork] = table.fork(seq)
    table.truncate(fork, 7)
    assert table.append(fork).copies.tolist() == [[1, 2]]
    table.truncate(seq, 5)
    assert table.append(seq).copies.shape == (0, 2)
    table.check()


def test_a_new_block_is_no_copy_of_the_last_one_of_the_pool(table):
    others, last = [table.add(20), table.add(20)], table.add(8)
    table.fork(last)
    assert table.pool.ref_counts[11] == 2
    table.free(others[0])
    appended = table.append([table.add(0), others[1]], [1, 0])
    assert appended.copies.shape == (0, 2)
    assert appended.slots.tolist() == [0]
    table.check()

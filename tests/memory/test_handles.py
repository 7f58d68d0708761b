"""Handles: each names one sequence, for as long as that lives, and is refused afterwards."""

import numpy as np
import pytest

from pagedkv.memory import BlockPool, SequenceTable

from .manager import refused


def test_handles_are_never_given_out_twice():
    table = SequenceTable(BlockPool(2), block_size=1, max_seqs=1, max_blocks=2)
    handles = []
    for _ in range(100):
        handles.append(table.add(1))
        table.free(handles[-1])
    assert len(set(handles)) == 100
    table.add(2)
    for handle in handles:
        with refused(table, KeyError, "freed or never added"):
            table.free(handle)


def test_every_way_to_name_sequences(table):
    a, b = table.add(1), table.add(2)
    for seqs in ([a, b], (a, b), np.array([a, b]), [np.int64(a), b]):
        assert table.seq_lens(seqs).tolist() == [1, 2]
    for seq in (b, np.int64(b), [b]):
        assert table.seq_lens(seq).tolist() == [2]
    read_only = np.array([a, b])
    read_only.flags.writeable = False
    assert table.seq_lens(read_only).tolist() == [1, 2]


ON_HANDLES = {
    "append": lambda t, seqs: t.append(seqs),
    "append 0": lambda t, seqs: t.append(seqs, 0),
    "truncate": lambda t, seqs: t.truncate(seqs, 0),
    "free": lambda t, seqs: t.free(seqs),
    "fork": lambda t, seqs: t.fork(seqs[0]),
    "slots": lambda t, seqs: t.slots(seqs[0], 0, 0),
    "block_tables": lambda t, seqs: t.block_tables(seqs),
    "seq_lens": lambda t, seqs: t.seq_lens(seqs),
}


@pytest.mark.parametrize("max_seqs", [2, 3, 4, 7, 8])
@pytest.mark.parametrize("name", ON_HANDLES)
def test_handles_that_are_not_valid(name, max_seqs):
    table = SequenceTable(BlockPool(4), block_size=2, max_seqs=max_seqs, max_blocks=2)
    alive, freed = table.add(1), table.add(0)
    table.free(freed)
    invalid = [freed, ~alive, alive + 1, -alive, 0, *range(-3 * max_seqs, 0), *range(max_seqs + 1), -(2**63), 2**63 - 1]
    for seq in invalid:
        with refused(table, KeyError, "freed or never added"):
            ON_HANDLES[name](table, [seq, alive])
    again = table.add(0)
    assert again != freed
    with refused(table, KeyError, f"no sequence {freed}: it was freed or never added"):
        ON_HANDLES[name](table, [freed, alive])


@pytest.mark.parametrize("named", [list, np.array])
def test_a_freed_sequence_is_unknown_even_if_the_last_call_named_it(named):
    table = SequenceTable(BlockPool(8), 4, 3, 5)
    seqs = named([table.add(3), table.add(2)])
    table.append(seqs)
    table.free(seqs)
    with refused(table, KeyError, "it was freed or never added"):
        table.append(seqs)


def test_looking_up_handles_while_another_thread_changes_them(table):
    seqs = np.array([7])  # no row of a table of 4, so it is compared with 0

    class Changing(np.ndarray):
        def take(self, rows, mode):
            seqs[:] = 0
            return np.asarray(self).take(rows, mode=mode)

    handles = table._rows.handles
    handles._issued = handles._issued.view(Changing)
    with pytest.raises(KeyError, match="no sequence 7: it was freed or never added"):
        table.seq_lens(seqs)

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from pagedkv.visible import FURTHEST, Visible

COUNTS = st.integers(0, 70)


@given(
    before=COUNTS | st.just(FURTHEST),
    max_seq_len=COUNTS,
    sizes=st.tuples(COUNTS, COUNTS),
    unit=st.sampled_from([1, 16]),
)
def test_no_sequence_exceeds_the_bounds_and_the_longest_has_them(before, max_seq_len, sizes, unit):
    visible, seq_len = Visible(before), min(sizes[0], max_seq_len)
    num_rows = min(sizes[1], seq_len)
    (first,) = visible.first_keys(np.array([seq_len], np.int32), num_rows)
    keys = {k for p in range(seq_len - num_rows, seq_len) for k in range(seq_len) if p - before <= k <= p}
    assert min(keys, default=first) == first
    assert len(keys) <= visible.most_keys(max_seq_len, num_rows) <= max_seq_len
    units = len({k // unit for k in keys})
    assert units <= visible.most_units(unit, max_seq_len, num_rows) <= max(1, -(-max_seq_len // unit))
    if seq_len == max_seq_len and num_rows:
        assert len(keys) == visible.most_keys(max_seq_len, num_rows)


def test_padding_hides_keys_that_the_rule_leaves():
    visible = Visible(before=3, leftpad=np.array([0, 4, 9], np.int32))
    lens = np.array([9, 9, 9], np.int32)
    assert visible.first_keys(lens, np.array([1, 4, 1])).tolist() == [5, 4, 9]

"""Tally, compared with counts in plain Python."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from pagedkv.memory.ids import Tally


@given(st.lists(st.integers(0, 6), max_size=12), st.lists(st.integers(0, 6), max_size=12))
def test_a_tally_counts_values_and_finds_their_last_places(first, second):
    tally = Tally(7)
    for values in (first, second):
        last, counts = tally(np.array(values, np.int64))
        assert [values[place] for place in last] == values
        for value in set(values):
            assert {int(place) for place, other in zip(last, values, strict=True) if other == value} == {
                len(values) - 1 - values[::-1].index(value)
            }
        assert [counts[place] for place in last] == [values.count(value) for value in values]
        assert counts.sum() == len(values)
        distinct = np.array(sorted(set(values)), np.int64)
        assert tally.among(distinct, np.array(second, np.int64)).tolist() == [value in second for value in distinct]
        repeated = tally.repeated(np.array(values, np.int64))
        assert repeated.tolist() == [value in values[place + 1 :] for place, value in enumerate(values)]

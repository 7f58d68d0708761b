"""HashIndex against a dict, with digests that meet in the same slots and differ in one half only."""

import numpy as np
import pytest

from pagedkv.commit import commit
from pagedkv.memory.prefix.digests import DIGEST
from pagedkv.memory.prefix.index import NO_BLOCK, HashIndex


@pytest.mark.parametrize("seed", range(4))
def test_blocks_come_and_go(seed):
    rng = np.random.default_rng(seed)
    index, twin = HashIndex(24), {}
    for _ in range(60):
        present, absent = [*twin.values()], sorted({*range(24)} - {*twin.values()})
        removed = rng.permutation(present)[: rng.integers(len(present) + 1)].astype(np.int64)
        put = rng.permutation(absent)[: rng.integers(len(absent) + 1)].astype(np.int64)
        drawn = {(6 * int(a), int(b)): None for a, b in rng.integers([4, 12], size=(len(put), 2))}
        keys = np.array([key for key in drawn if key not in twin], np.int64).reshape(-1, 2)
        put = put[: len(keys)]
        digests = keys.view(DIGEST).reshape(-1)
        found, places = index.find(digests)
        assert (found == NO_BLOCK).all()
        commit(index.plan(removed, put, digests, index.distinct_slots(places)))
        twin = {key: block for key, block in twin.items() if block not in removed}
        twin |= {(a, b): block for (a, b), block in zip(keys.tolist(), put.tolist(), strict=True)}
        index.check(np.array(sorted(twin.values()), np.int64))
        asked = np.array([(a, b) for a in range(0, 24, 6) for b in range(12)])
        expected = [twin.get((a, b), NO_BLOCK) for a, b in asked.tolist()]
        asked = asked.view(DIGEST).reshape(-1)
        assert index.find(asked)[0].tolist() == expected
        assert index.find(asked[:5])[0].tolist() == expected[:5]

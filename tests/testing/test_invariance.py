"""assert_invariant: results that keep their bits pass, and each thing that may change them is looked at."""

import numpy as np
import pytest

from pagedkv.testing import Spec, assert_invariant
from pagedkv.testing.calls import run

DECODE = Spec(seq_lens=(37, 5, 0), block_size=16)
PREFILL = DECODE.replace(query_lens=(20, 5, 0))


@pytest.mark.parametrize(("spec", "count"), [(DECODE, 8), (PREFILL, 10), (DECODE.replace(layout="vllm"), 7)])
def test_our_operations_are_invariant(spec, count):
    assert assert_invariant(spec) == count


def by(what):
    """Attention whose bits depend on one thing."""

    def attend(problem):
        out, lse = run(problem)
        return out, lse + np.float32(what(problem))

    return attend


@pytest.mark.parametrize(
    ("over", "what"),
    [
        ("placement", lambda problem: problem.block_tables[0, 0]),
        ("block_size", lambda problem: problem.k_cache.shape[1]),
        ("batch", lambda problem: len(problem.seq_lens)),
        ("chunks", lambda problem: len(problem.q)),
    ],
)
def test_each_is_looked_at(over, what):
    with pytest.raises(AssertionError, match=f"^other bits where {over} is another: Spec"):
        assert_invariant(PREFILL, by(what), over=[over])


def test_an_unknown_kind_of_change_is_refused():
    with pytest.raises(ValueError, match=r"^over must be of placement, batch, block_size, chunks, got colour$"):
        assert_invariant(DECODE, over=["colour"])

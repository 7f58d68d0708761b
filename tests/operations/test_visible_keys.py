"""Which keys a row sees: window_right, leftpad and masks, and slopes for each sequence, on each backend."""

import numpy as np
import pytest

import pagedkv

from ..support.problems import Spec, assert_close, build, run

# Padding and windows that leave rows nothing, rows of one sequence that see nothing while others do.
LONG = Spec(seq_lens=(700, 40, 0, 1300, 9), query_lens=(1, 20, 0, 300, 9), group_size=3, block_size=7)
SHORT = LONG.replace(seq_lens=(40, 20, 0, 9), query_lens=(1, 20, 0, 9))
OPTIONS = {
    "right side of a window": {"causal": False, "window_right": 2},
    "both sides": {"causal": False, "window": 5, "window_right": 3},
    "padding": {"leftpad": True},
    "padding and a window": {"leftpad": True, "window": 6, "causal": False, "window_right": 0},
    "mask": {"mask": "bool"},
    "bits, of all keys": {"mask": "bits", "causal": False},
    "slopes of sequences": {"alibi": True, "seq_slopes": True},
    "all": {"leftpad": True, "mask": "bits", "alibi": True, "seq_slopes": True, "softcap": 3.0, "sinks": True},
}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize(
    ("backend", "spec"),
    [
        ("cpu", LONG),
        ("cpu", LONG.replace(kv_dtype="fp8_e4m3", layout="vllm", block_size=8)),
        ("emulator", SHORT),
        ("emulator", SHORT.replace(q_dtype="bfloat16", kv_dtype="bfloat16", block_size=16)),
    ],
    ids=["cpu", "cpu-vllm", "emulator", "emulator-bfloat16"],
)
def test_rows_see_the_keys_that_options_leave(backend, spec, options):
    problem = build(spec.replace(**options))
    assert_close(problem, *run(problem, backend=backend))


@pytest.mark.parametrize("backend", ["cpu", "emulator"])
def test_a_sequence_of_padding_alone_gives_zeros(backend):
    """Its length is a multiple of the tokens of a split."""
    problem = build(SHORT.replace(seq_lens=(1024, 20), query_lens=(1, 20), leftpad=True))
    problem.options["leftpad"][0] = 1024
    assert_close(problem, *run(problem, backend=backend))


def test_a_change_of_one_row_of_a_mask_changes_that_row_alone():
    problem = build(SHORT.replace(mask="bool"))
    before, _ = run(problem, backend="cpu")
    first_row_of_second = int(problem.query_starts[1])
    keys = np.cumsum(np.diff(problem.query_starts) * problem.seq_lens)
    problem.options["mask"][keys[0] + 20 : keys[0] + 40] ^= True  # the second row of the second sequence
    after, _ = run(problem, backend="cpu")
    changed = (before != after).any(axis=(1, 2))
    assert changed.nonzero()[0].tolist() == [first_row_of_second + 1]


def test_keys_that_a_draft_may_not_see_do_not_matter():
    """A tree of drafts: two children of one token, each blind to the other."""
    seq_len, query_len = 6, 3
    mask = np.tril(np.ones((seq_len, seq_len), bool))[-query_len:]
    mask[2, 4] = False  # the second child does not see the first
    rng = np.random.default_rng(0)
    k, v = rng.standard_normal((2, 2, 4, 1, 8)).astype(np.float32)
    q = rng.standard_normal((query_len, 2, 8)).astype(np.float32)
    tables, lens, starts = (np.array(x, np.int32) for x in ([[0, 1]], [seq_len], [0, query_len]))
    tree = pagedkv.prefill_attention(q, k, v, tables, lens, starts, mask=mask.ravel())
    k_chain, v_chain = k.copy(), v.copy()
    for cache, chain in ((k, k_chain), (v, v_chain)):
        chain[1, 0] = cache[1, 1]  # the chain that ends in the second child
    chain = pagedkv.prefill_attention(q[[0, 2]], k_chain, v_chain, tables, lens - 1, np.array([0, 2], np.int32))
    np.testing.assert_allclose(tree[[0, 2]], chain, rtol=1e-5, atol=1e-6)

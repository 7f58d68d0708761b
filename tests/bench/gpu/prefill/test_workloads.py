"""The cells of bench prefill: products, bytes, and rows to compare that are the whole result's."""

import numpy as np
import pytest

import pagedkv
from pagedkv.bench.gpu.prefill.workloads import GROUPS, Cell, HostProblem, cells, quick_cells


def pairs_of(cell):
    """Pairs of a query and a key, counted one by one."""
    count = 0
    for n, length in zip(cell.query_lens, cell.seq_lens, strict=True):
        for row in range(n):
            count += length - n + row + 1 if cell.causal else length
    return count


@pytest.mark.parametrize("cell", quick_cells(), ids=str)
def test_products_are_those_of_the_pairs_that_the_mask_leaves(cell):
    assert cell.num_flops == 4 * cell.num_heads * cell.head_dim * pairs_of(cell)


def test_the_products_of_a_long_prompt():
    """Half of 4 L^2 Hq D, and half a diagonal."""
    (cell,) = [cell for cell in cells() if cell.group == "prompt" and cell.seq_lens == (16384,)]
    assert cell.num_flops == 2 * 16384 * 16385 * 32 * 128


def test_verification_reads_keys_and_values_once():
    cell = next(cell for cell in cells() if cell.group == "verify")
    assert (len(cell.seq_lens), cell.query_lens[0], cell.length) == (4, 8, "32768")
    assert cell.num_bytes == 2 * 4 * 32768 * 8 * 128 * 2


def test_every_group_has_cells_and_every_cell_is_one_that_prefill_takes():
    assert {"prompt", "verify", "chunk", "mixed", "fp8"} <= set(GROUPS)
    for cell in [*cells(), *quick_cells()]:
        assert len(cell.query_lens) == len(cell.seq_lens)
        assert all(0 < n <= length for n, length in zip(cell.query_lens, cell.seq_lens, strict=True))
        assert cell.num_heads % cell.num_kv_heads == 0
        assert cell.head_dim <= 256


def test_the_length_of_queries():
    assert Cell("x", (5, 9), query_lens=(2, 2)).query_length == "2"
    assert Cell("x", (5, 9), query_lens=(2, 7)).query_length == "2..7"


@pytest.mark.parametrize("cell", quick_cells(), ids=str)
def test_what_is_compared_are_rows_of_the_whole_result(cell):
    host = HostProblem(cell)
    q, starts = host.q.astype(np.float32), host.query_starts
    options = {"kv_dtype": cell.kv_dtype, "causal": cell.causal}
    whole = pagedkv.prefill_attention(q, *host.kv, host.block_tables, host.seq_lens, starts, **options)
    np.testing.assert_array_equal(host.expected, whole[host.checked])
    assert {0, starts[-1] - 1} <= set(host.checked.tolist())
    assert all(((starts[i] <= host.checked) & (host.checked < starts[i + 1])).any() for i in range(len(starts) - 1))

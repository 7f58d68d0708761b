"""Cells: bytes to read, operations to compute, arrays and expected results."""

import numpy as np
import pytest

import pagedkv
from pagedkv import reference
from pagedkv.bench.gpu import decode, prefill
from pagedkv.bench.problem import BenchProblem, Cell, span

SMALL = [Cell("x", (70, 1, 33), 8, 2, 64), Cell("x", (40,), 4, 2, 64, 1, "bfloat16", "fp8_e5m2")]


def test_lengths_are_named():
    assert [span(lengths) for lengths in ((5, 5), (7, 5), (2, 7))] == ["5", "5..7", "2..7"]


@pytest.mark.parametrize("cell", SMALL, ids=str)
def test_the_least_traffic_is_every_byte_of_a_visible_token(cell):
    problem = BenchProblem(cell)
    read = np.zeros(problem.kv.shape, bool)
    for table, length in zip(problem.block_tables, problem.seq_lens, strict=True):
        for position in range(length):
            read[:, table[position // cell.block_size], position % cell.block_size] = True
    assert cell.num_bytes == read.sum() * problem.kv.itemsize


@pytest.mark.parametrize("cell", prefill.quick_cells(), ids=str)
def test_products_are_those_of_the_pairs_that_the_mask_leaves(cell):
    pairs = 0
    for n, length in zip(cell.query_lens, cell.seq_lens, strict=True):
        pairs += sum(length - n + row + 1 if cell.causal else length for row in range(n))
    assert cell.num_flops == 4 * cell.num_heads * cell.head_dim * pairs


@pytest.mark.parametrize("cell", SMALL, ids=str)
def test_a_problem_follows_its_cell_and_its_expected_result_is_right(cell):
    problem = BenchProblem(cell)
    assert problem.q.shape == (len(cell.seq_lens), cell.num_heads, cell.head_dim)
    assert problem.q.dtype.name == cell.dtype
    used = [table[: -(-n // cell.block_size)] for table, n in zip(problem.block_tables, problem.seq_lens, strict=True)]
    assert sorted(np.concatenate(used)) == list(range(problem.kv.shape[1]))
    rows = problem.kv.reshape(-1, cell.num_kv_heads * cell.head_dim)
    assert len(np.unique(rows.view(np.uint8), axis=0)) == len(rows)
    arguments = (problem.q, *problem.kv, problem.block_tables, problem.seq_lens)
    exact = reference.decode_attention(*arguments, kv_dtype=cell.kv_dtype)
    np.testing.assert_allclose(problem.expected, exact, atol=1e-5)


@pytest.mark.parametrize("cell", [Cell("one", (40, 7), 8, 2, 64), *prefill.quick_cells()], ids=str)
def test_compared_rows_are_those_of_the_whole_result(cell):
    problem = BenchProblem(cell)
    q, starts, checked = problem.q.astype(np.float32), problem.query_starts, problem.checked
    options = {"kv_dtype": cell.kv_dtype, "causal": cell.causal}
    whole = pagedkv.prefill_attention(q, *problem.kv, problem.block_tables, problem.seq_lens, starts, **options)
    np.testing.assert_array_equal(problem.expected, whole[checked])
    assert {0, starts[-1] - 1} <= set(checked.tolist())
    assert all(((starts[i] <= checked) & (checked < starts[i + 1])).any() for i in range(len(starts) - 1))


def test_errors_show_in_compared_rows_and_nan_in_any_row():
    problem = BenchProblem(Cell("x", (80,), 4, 2, 64, query_lens=(80,)))
    whole = pagedkv.prefill_attention(
        problem.q.astype(np.float32), *problem.kv, problem.block_tables, problem.seq_lens, problem.query_starts
    )
    assert problem.error_of(whole) == 0
    for row, value in ((79, 9.0), (0, 9.0), (33, np.nan)):
        wrong = whole.copy()
        wrong[row, 1, 2] = value
        assert problem.error_of(wrong) > 1


@pytest.mark.parametrize("bench", [decode, prefill], ids=lambda bench: bench.__name__)
def test_every_group_has_cells_that_the_operation_takes(bench):
    for cell in [*bench.cells(), *bench.quick_cells()]:
        assert cell.group in bench.GROUPS
        assert all(0 < n <= length for n, length in zip(cell.query_lens, cell.seq_lens, strict=True))
        assert cell.num_heads % cell.num_kv_heads == 0
        assert cell.head_dim <= 256
    assert {cell.group for cell in bench.cells()} == set(bench.GROUPS) - {"launch"}


def test_the_cells_that_others_publish_are_there():
    kernelbench = [cell.columns("decode") for cell in decode.cells() if cell.group == "kernelbench"]
    assert [tuple(row[name] for name in ("B", "Hq", "Hkv", "D", "L", "P", "q")) for row in kernelbench] == [
        (8, 32, 8, 128, "1024", 16, "bfloat16"),
        (32, 32, 8, 128, "2048", 16, "bfloat16"),
        (4, 64, 8, 128, "4096", 16, "bfloat16"),
        (16, 32, 8, 128, "1535", 16, "bfloat16"),
        (8, 16, 4, 64, "2000", 16, "bfloat16"),
    ]
    verify = next(cell for cell in prefill.cells() if cell.group == "verify").columns("prefill")
    assert {name: verify[name] for name in ("B", "n", "L")} == {"B": 4, "n": "8", "L": "32768"}

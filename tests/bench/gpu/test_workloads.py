"""The cells of bench decode: those that are to be there, and what they have to read."""

import numpy as np
import pytest

from pagedkv import reference
from pagedkv.bench.gpu.workloads import GROUPS, Cell, HostProblem, cells, only, quick_cells

SMALL = [Cell("x", (70, 1, 33), 8, 2, 64), Cell("x", (40,), 4, 2, 64, 1, "bfloat16", "fp8_e5m2")]


def shape(cell):
    heads = (cell.num_heads, cell.num_kv_heads, cell.head_dim)
    return (len(cell.seq_lens), *heads, max(cell.seq_lens), cell.block_size)


def test_kernelbench_has_its_five_shapes():
    assert [shape(cell) for cell in only(["kernelbench"], cells())] == [
        (8, 32, 8, 128, 1024, 16),
        (32, 32, 8, 128, 2048, 16),
        (4, 64, 8, 128, 4096, 16),
        (16, 32, 8, 128, 1535, 16),
        (8, 16, 4, 64, 2000, 16),
    ]


def test_every_kind_of_cell_is_there():
    shapes = {shape(cell) for cell in cells() if not cell.is_ragged and cell.kv_dtype is None}
    assert {(32, 32, 8, 128, length, 16) for length in (2048, 8192)} <= shapes
    assert (32, 32, 32, 128, 2048, 16) in shapes
    assert {cell.group_size for cell in cells()} >= {1, 4, 8, 16}
    assert {cell.block_size for cell in cells()} == {1, 16, 256}
    assert max(max(cell.seq_lens) for cell in cells() if len(cell.seq_lens) == 8) == 131072
    assert any(len(cell.seq_lens) == 1 for cell in cells())
    assert sorted(cell.seq_lens[0] for cell in cells() if cell.kv_dtype == "fp8_e5m2") == [2048, 8192]
    one_long, drawn = only(["ragged"], cells())
    assert sorted(one_long.seq_lens) == [1] * 31 + [100_000]
    assert len(set(drawn.seq_lens)) > 10
    assert min(drawn.seq_lens) >= 1


def test_groups_choose_cells():
    assert {cell.group for cell in cells()} == set(GROUPS)
    assert only(None, cells()) == cells()
    assert {cell.group for cell in only(["fp8", "pages"], cells())} == {"fp8", "pages"}
    assert {cell.group for cell in quick_cells()} <= set(GROUPS)


@pytest.mark.parametrize("cell", SMALL, ids=str)
def test_the_least_traffic_is_every_byte_of_a_visible_token(cell):
    problem = HostProblem(cell)
    read = np.zeros(problem.kv.shape, bool)
    for table, length in zip(problem.block_tables, problem.seq_lens, strict=True):
        for position in range(length):
            read[:, table[position // cell.block_size], position % cell.block_size] = True
    assert cell.num_bytes == read.sum() * problem.kv.itemsize


@pytest.mark.parametrize("cell", SMALL, ids=str)
def test_a_problem_is_what_the_cell_says_and_what_is_expected_of_it_is_right(cell):
    problem = HostProblem(cell)
    assert problem.q.shape == (len(cell.seq_lens), cell.num_heads, cell.head_dim)
    assert problem.q.dtype.name == cell.dtype
    used = [table[: -(-n // cell.block_size)] for table, n in zip(problem.block_tables, problem.seq_lens, strict=True)]
    assert sorted(np.concatenate(used)) == list(range(problem.kv.shape[1]))
    rows = problem.kv.reshape(-1, cell.num_kv_heads * cell.head_dim)
    assert len(np.unique(rows.view(np.uint8), axis=0)) == len(rows)
    arguments = (problem.q, *problem.kv, problem.block_tables, problem.seq_lens)
    exact = reference.decode_attention(*arguments, kv_dtype=cell.kv_dtype)
    np.testing.assert_allclose(problem.expected, exact, atol=1e-5)


def test_lengths_are_named():
    assert Cell("x", (5, 5)).length == "5"
    assert Cell("x", (7, 5)).length == "5..7"

"""apply_rotary on the CPU, against the float64 oracle."""

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import given

import pagedkv
from pagedkv import reference
from pagedkv.cpu import rotary

from ..support.bits import bits
from ..support.problems import FLOATS, as_torch
from ..support.rotary_cases import tables_of, tokens_of

HALF_ULP = {"float32": 2.0**-24, "float16": 2.0**-11, "bfloat16": 2.0**-8}


@st.composite
def problems(draw):
    """The arguments of a call, its option `interleaved`, and the name of q's dtype."""
    dtype, head_dim = draw(st.sampled_from(list(FLOATS))), draw(st.sampled_from([8, 24, 128]))
    half = draw(st.integers(1, head_dim // 2))
    rng = np.random.default_rng(draw(st.integers(0, 2**16)))
    num_tokens, max_positions = draw(st.sampled_from([0, 1, 7, 300])), draw(st.sampled_from([1, 40]))
    q, k = tokens_of(rng, num_tokens, (draw(st.integers(1, 5)), draw(st.integers(0, 3))), head_dim, FLOATS[dtype])
    table_dtype = FLOATS[draw(st.sampled_from([dtype, "float32"]))]
    cos, sin = tables_of(rng, max_positions, half, table_dtype, one_table=draw(st.booleans()))
    positions = rng.integers(0, max_positions, num_tokens).astype(draw(st.sampled_from([np.int32, np.int64])))
    return (q, k if draw(st.booleans()) else None, cos, sin, positions), draw(st.booleans()), dtype


@given(problems(), st.sampled_from(["new", "out", "in place"]))
def test_oracle(problem, where):
    (q, k, cos, sin, positions), interleaved, dtype = problem
    exact = reference.apply_rotary(q, k, cos, sin, positions, interleaved=interleaved)
    rest = [None if x is None else bits(x[..., 2 * cos.shape[1] :]) for x in (q, k)]
    out = {
        "new": None,
        "out": tuple(None if x is None else np.full(x.shape, np.nan, x.dtype) for x in (q, k)),
        "in place": (q, k),
    }[where]
    largest = max((np.abs(x).max(initial=0) for x in exact if x is not None), default=0)
    results = pagedkv.apply_rotary(q, k, cos, sin, positions, interleaved=interleaved, out=out)
    for result, expected, same, given_one in zip(results, exact, rest, out or (None, None), strict=True):
        if expected is None:
            assert result is None
            continue
        assert out is None or result is given_one
        assert result.dtype == FLOATS[dtype]
        # Three roundings in float32, of terms that may cancel, and one to the dtype.
        bound = 4 * 2.0**-24 * largest + HALF_ULP[dtype] * np.abs(expected)
        assert (np.abs(result.astype(np.float64) - expected) <= bound + 1e-7).all()
        np.testing.assert_array_equal(bits(result[..., 2 * cos.shape[1] :]), same)


@pytest.mark.parametrize("interleaved", [False, True])
def test_queries_and_keys_meet_by_their_distance_alone(interleaved):
    rng = np.random.default_rng(0)
    q, k = rng.standard_normal((2, 64))
    angles = np.multiply.outer(np.arange(200), 10000.0 ** (-np.arange(32) / 32))
    tables = np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)
    rows = [np.broadcast_to(x.astype(np.float32), (200, 1, 64)) for x in (q, k)]
    queries, keys = pagedkv.apply_rotary(*rows, *tables, np.arange(200), interleaved=interleaved)
    scores = queries[:, 0] @ keys[:, 0].T
    for distance in (0, 1, 50):
        along = np.diagonal(scores, distance)
        np.testing.assert_allclose(along, along[0], rtol=0, atol=1e-4)
    assert np.ptp(scores[0]) > 1


def test_interleaved_pairs_are_the_halves_in_another_order():
    rng = np.random.default_rng(1)
    q, _ = tokens_of(rng, 9, (3, 1), 24, np.dtype(np.float32))
    cos, sin = tables_of(rng, 20, 8, np.dtype(np.float32))
    positions, order = rng.integers(0, 20, 9), np.arange(24)
    order[:16] = np.arange(16).reshape(2, 8).T.reshape(-1)
    halves, nothing = pagedkv.apply_rotary(q, None, cos, sin, positions)
    neighbours, _ = pagedkv.apply_rotary(q[..., order].copy(), None, cos, sin, positions, interleaved=True)
    assert nothing is None
    np.testing.assert_array_equal(neighbours, halves[..., order])


@pytest.mark.usefixtures("without_lines")
@pytest.mark.parametrize("backend", ["cpu", "emulator"])
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_what_is_not_finite_stays_in_its_pair(bad, backend):
    rng = np.random.default_rng(2)
    q, k = tokens_of(rng, 5, (2, 1), 24, np.dtype(np.float32))
    tables, positions = tables_of(rng, 9, 8, np.dtype(np.float32)), np.arange(5)
    clean = pagedkv.apply_rotary(q, k, *tables, positions, backend=backend)
    q[3, 1, 2] = k[1, 0, 23] = bad
    dirty = pagedkv.apply_rotary(q, k, *tables, positions, backend=backend)
    assert [np.argwhere(bits(x) != bits(y)).tolist() for x, y in zip(clean, dirty, strict=True)] == [
        [[3, 1, 2], [3, 1, 10]],
        [[1, 0, 23]],
    ]


def test_parts_of_one_projection_are_rotated_in_place():
    rng = np.random.default_rng(3)
    qkv = rng.standard_normal((6, 4 + 2 + 2, 16), np.float32)
    q, k, v = np.split(qkv, [4, 6], axis=1)
    (cos, sin), positions = tables_of(rng, 10, 8, np.dtype(np.float32)), rng.integers(0, 10, 6)
    expected, values = pagedkv.apply_rotary(q, k, cos, sin, positions), v.copy()
    pagedkv.apply_rotary(q, k, cos, sin, positions, out=(q, k))
    for x, y in zip((q, k, v), (*expected, values), strict=True):
        np.testing.assert_array_equal(x, y)


@pytest.mark.parametrize("dtype", FLOATS)
def test_torch_tensors_in_torch_tensors_out(dtype):
    rng = np.random.default_rng(4)
    arrays = (*tokens_of(rng, 5, (2, 1), 16, FLOATS[dtype]), *tables_of(rng, 9, 4, FLOATS[dtype]))
    positions = np.array([8, 0, 3, 3, 1], np.int32)
    expected = pagedkv.apply_rotary(*arrays, positions)
    results = pagedkv.apply_rotary(*map(as_torch, arrays), torch.from_numpy(positions))
    for x, y in zip(results, expected, strict=True):
        assert torch.equal(x, as_torch(y))


def test_llama_as_transformers_writes_it():
    """rotate_half and tables with every column twice, in torch."""
    rng = np.random.default_rng(5)
    q = torch.from_numpy(rng.standard_normal((7, 3, 32), np.float32))
    positions = torch.tensor([4, 0, 100, 2, 9, 9, 1])
    angles = torch.outer(torch.arange(128.0), 10000.0 ** (-torch.arange(16) / 16))
    both = torch.cat((angles, angles), dim=-1)[positions][:, None]
    rotated_half = torch.cat((-q[..., 16:], q[..., :16]), dim=-1)
    expected = q * both.cos() + rotated_half * both.sin()
    result, _ = pagedkv.apply_rotary(q, None, angles.cos(), angles.sin(), positions)
    assert torch.allclose(result, expected, rtol=0, atol=1e-6)


def angles_of(max_positions, half):
    return np.multiply.outer(np.arange(max_positions), 10000.0 ** (-np.arange(half) / half))


def test_what_transformers_gives_its_layers():
    """Partial rotary embedding: the message about its shape, and then that about its columns, say what to pass."""
    rng = np.random.default_rng(7)
    q, positions = torch.from_numpy(rng.standard_normal((7, 3, 64), np.float32)), [4, 0, 100, 2, 9, 9, 1]
    both = torch.from_numpy(np.tile(angles_of(101, 8)[positions], 2)).float()[None]
    cos, sin, tokens = both.cos(), both.sin(), torch.arange(7)
    with pytest.raises(
        ValueError, match=r"each column twice: pass cos.flatten\(0, 1\)\[:, :8\], sin alike, and 0, 1, 2"
    ):
        pagedkv.apply_rotary(q, None, cos, sin, tokens)
    with pytest.raises(
        ValueError, match=r"got equal halves: .* pass cos\[:, :8\] and sin\[:, :8\]; or say rotary_dim=32"
    ):
        pagedkv.apply_rotary(q, None, cos.flatten(0, 1), sin.flatten(0, 1), tokens)
    tables = [x.flatten(0, 1)[:, :8] for x in (cos, sin)]
    result, _ = pagedkv.apply_rotary(q, None, *tables, tokens, rotary_dim=16)
    rotated, rest = q[..., :16], q[..., 16:]
    expected = rotated * cos[0][:, None] + torch.cat((-rotated[..., 8:], rotated[..., :8]), -1) * sin[0][:, None]
    torch.testing.assert_close(result, torch.cat((expected, rest), -1), rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    ("twice", "what"), [(lambda x: np.tile(x, 2), "halves"), (lambda x: np.repeat(x, 2, axis=1), "neighbours")]
)
def test_tables_with_each_column_twice(twice, what):
    both = twice(angles_of(9, 4))
    tables, kv = (np.cos(both).astype(np.float32), np.sin(both).astype(np.float32)), np.ones((2, 1, 64), np.float32)
    caches, slots = np.zeros((2, 1, 4, 1, 64), np.float32), np.arange(2)
    with pytest.raises(
        ValueError, match=f"must have one column for each pair of dims, got equal {what}: .*rotary_dim=16"
    ):
        pagedkv.apply_rotary(kv, None, *tables, slots)
    rotation = dict(zip(("cos", "sin", "positions"), (*tables, slots), strict=True))
    with pytest.raises(ValueError, match=f"got equal {what}"):
        pagedkv.write_kv(kv, kv, *caches, slots, **rotation)
    assert not caches.any()
    meant, _ = pagedkv.apply_rotary(kv, None, *tables, slots, rotary_dim=16)
    np.testing.assert_array_equal(meant[0], kv[0])
    assert (meant[1] != kv[1]).sum() == 16


@pytest.mark.parametrize(
    "angles",
    [
        np.zeros((9, 8)),  # as at position 0
        angles_of(9, 8),
        np.concatenate([np.repeat(angles_of(3, 4), 3, axis=0), np.tile(angles_of(3, 4), (3, 1))], axis=1),  # of a grid
    ],
)
def test_tables_whose_columns_are_equal_by_chance_are_accepted(angles):
    q, positions = np.ones((9, 1, 16), np.float32), np.arange(9)
    cos, sin = np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)
    expected = reference.apply_rotary(q, None, cos, sin, positions)[0]
    np.testing.assert_allclose(pagedkv.apply_rotary(q, None, cos, sin, positions)[0], expected, rtol=0, atol=1e-6)


def test_q_is_unchanged_if_k_fails(monkeypatch):
    rng = np.random.default_rng(6)
    q, k = tokens_of(rng, 5, (2, 1), 16, np.dtype(np.float32))
    tables, before, compute = tables_of(rng, 9, 4, np.dtype(np.float32)), q.copy(), rotary.rotated

    def out_of_memory(x, *args, **options):
        if x.shape[1] == 1:
            raise MemoryError
        return compute(x, *args, **options)

    monkeypatch.setattr(rotary, "rotated", out_of_memory)
    with pytest.raises(MemoryError):
        pagedkv.apply_rotary(q, k, *tables, np.arange(5), out=(q, k))
    np.testing.assert_array_equal(q, before)

"""The paged-attention kernel: results, invariants, faults for bad inputs, and mutants that must be caught."""

import numpy as np
import pytest

from pagedkv.emulator import EmulatorError, MemoryFault, RaceFault, SyncFault

from ...support.strategies import long
from .attention_kernel import SOURCE, Problem, build

TOL = 1e-6


@pytest.fixture(scope="module")
def kernel():
    return build()


@pytest.mark.parametrize(
    ("cc", "fastmath"),
    [((8, 0), False), ((9, 0), True), ((10, 0), False), *long([((8, 0), True), ((9, 0), False), ((10, 0), True)])],
)
def test_attention_matches_the_reference(cc, fastmath):
    p = Problem()
    np.testing.assert_allclose(p.run(build(cc=cc, fastmath=fastmath), global_race=True), p.reference(), atol=TOL)


@pytest.mark.parametrize("lens", [(1,), (15, 16, 17), (0, 5), (128,), (7, 8, 9)])
def test_all_lengths_match_the_reference(kernel, lens):
    p = Problem(lens=lens)
    np.testing.assert_allclose(p.run(kernel), p.reference(), atol=TOL)


def test_results_do_not_depend_on_the_schedule(kernel):
    p = Problem()
    base = p.run(kernel)
    for seed in range(3):
        assert (p.run(kernel, seed=seed, global_race=True) == base).all()
    assert (p.run(kernel, batch_threads=128) == base).all()


def test_huge_block_numbers(kernel):
    """Byte offsets beyond 2**31: the pools are mostly untouched virtual memory."""
    from pagedkv.emulator import Device

    from .attention_kernel import BS, HD

    p = Problem(lens=(20,), heads=1, kv_heads=1)
    dev = Device(6 << 30)
    small = p.table.copy()
    nbytes = BS * HD * 2
    blocks = (5 << 30) // (2 * nbytes)
    pools = {n: dev.alloc((blocks, BS * HD), "f2", n, poison=False) for n in ("k", "v")}
    p.table[0] = (blocks - 1, blocks - 7)
    for n, pool in pools.items():
        for new, old in zip(p.table[0], small[0], strict=False):
            pool.view()[new] = getattr(p, n)[old].reshape(-1)
            pool.mark(True, int(new))
    q, table, lens = dev.upload(p.q), dev.upload(p.table), dev.upload(p.lens)
    out = dev.alloc(p.q.shape, "f4")
    dev.launch(
        kernel, (1, 1), 128, [q, pools["k"], pools["v"], table, lens, out, np.float32(HD**-0.5), 1, 1, p.max_blocks]
    )
    p.table = small
    np.testing.assert_allclose(out.get(), p.reference(), atol=TOL)


@pytest.mark.parametrize("block", [24, -1, 2**31 - 1, -(2**31)])
def test_bad_block_number(kernel, block):
    p = Problem()
    p.table[2, 3] = block
    with pytest.raises(MemoryFault, match=r"(global load|address).*"):
        p.run(kernel)


def test_table_overrun(kernel):
    p = Problem(lens=(37, 1, 112))
    p.lens[2] = 130
    with pytest.raises(MemoryFault, match="past the end of table"):
        p.run(kernel)


def test_statistics_count_bytes_sectors_and_barriers(kernel):
    p = Problem(lens=(64, 64), heads=4, kv_heads=2)
    p.run(kernel, stats=True)
    s = p.stats
    useful = 2 * 2 * 64 * 128 * 2  # sequences x kv heads x tokens x bytes per row, each read by 2 heads
    assert s.buffers["k"].bytes_read == s.buffers["v"].bytes_read == 2 * useful
    assert s.buffers["k"].distinct_sectors_read == useful // 32
    assert s.buffers["k"].sectors_read == 2 * useful // 32
    assert s.buffers["out"].bytes_written == p.q.nbytes
    assert s.barriers == 8
    assert s.warp_instructions["shuffle"] == 8 * 4 * 8 * 4
    per = s.warp_instructions_per_unit("k", 512)
    assert per == s.total_warp_instructions / (2 * useful / 512)


MUTANTS = {
    "barrier removed": ("    cuda.syncthreads()\n", "", RaceFault),
    "K tail guard off by one": (
        "        if t < length:\n            block",
        "        if t <= length:\n            block",
        MemoryFault,
    ),
    "V guard removed": ("        if t < length:\n            new", "        if t < length + 1:\n            new", None),
    "shuffle dropped": ("        x += cuda.shfl_xor_sync(0xffffffff, x, 8)\n", "", None),
    "shuffle in divergent code": (
        "        x += cuda.shfl_xor_sync(0xffffffff, x, 8)\n",
        "        if t < length:\n            x += cuda.shfl_xor_sync(0xffffffff, x, 8)\n",
        SyncFault,
    ),
    "wrong head map": ("head // (heads // kv_heads)", "head % kv_heads", None),
    "rescale forgotten": ("acc[2 * i] * corr + e", "acc[2 * i] + e", None),
    "block stride wrong": ("block * kv_heads + kv_head", "block * heads + kv_head", MemoryFault),
    "group maximum not shared": ("            max_s[group] = m", "            max_s[0] = m", (MemoryFault, RaceFault)),
    "row misaligned": ("+ lane * 8) * 2\n", "+ lane * 8) * 2 + 4\n", MemoryFault),
    "partial sum race": (
        "        sum_s[group] = s\n",
        "        sum_s[group] = s\n    if lane == 1:\n        sum_s[group] = s\n",
        RaceFault,
    ),
    "output not written": ("    out[(i64(seq)", "    if tid != 77:\n     out[(i64(seq)", AssertionError),
}


@pytest.mark.parametrize("name", MUTANTS)
def test_mutant_is_caught(name):
    """Fault where given; otherwise the result must differ from the reference."""
    old, new, expected = MUTANTS[name]
    old = old if old in SOURCE else old.replace("            max_s", "        max_s")
    assert SOURCE.count(old) >= 1
    p = Problem()
    entry = build(SOURCE.replace(old, new.replace("            max_s", "        max_s"), 1))
    if expected is None:
        try:
            got = p.run(entry)
        except EmulatorError:
            return
        assert np.abs(got - p.reference()).max() > 1e-4
    else:
        with pytest.raises(expected):
            p.run(entry)

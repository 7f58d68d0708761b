"""What prefill alone does where thread blocks share the keys of rows, which it does for few KV heads."""

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pagedkv.compiler.compile import compile_kernel
from pagedkv.compiler.occupancy import shared_kib
from pagedkv.cuda.plans import prefill as planning
from pagedkv.kernels.prefill.config import ENOUGH_BLOCKS, FEW_KV_HEADS, MOST_STATES, STRETCH, TensorConfig
from pagedkv.kernels.prefill.tensor_cores.stretches.kernel import make_prefill_stretches, make_prefill_stretches_wgmma
from pagedkv.kernels.prefill.tensor_cores.stretches.merge import (
    make_prefill_stretches_merge,
    make_prefill_stretches_wgmma_merge,
)
from pagedkv.kernels.prefill.tensor_cores.tile import TileShape
from pagedkv.kernels.prefill.tensor_cores.wgmma.shape import WgmmaShape
from pagedkv.visible import Visible

from ...attention.drawn import STRETCH_KERNELS
from ...attention.kernels import (
    STRETCHES,
    WGMMA,
    WGMMA_STRETCHES,
    assert_same_bits,
    each_emulated,
    each_kernel,
)
from ...support.devices import emulator
from ...support.problems import assert_close
from ...support.strategies import long

MANY_TOKENS = STRETCH + 100


def planned(problem, capability=(9, 0), kernel=WGMMA, **changes):
    device = SimpleNamespace(capability=capability, lineinfo=False, blocks_at_once=lambda *of: 132)
    return planning.plan(device, kernel.call(problem)._replace(**changes))


def launched(problem, capability=(9, 0), kernel=WGMMA, **changes):
    """The kernels that a call launches, and in which grids."""
    plan = planned(problem, capability, kernel, **changes)
    return {launch.kernel.entry: launch.grid for launch in plan.launches}


@pytest.fixture
def uncompiled(monkeypatch):
    """Plans with kernels that are nothing but a name."""
    monkeypatch.setattr(
        planning, "compile_for", lambda device, make, config: SimpleNamespace(entry=make.__name__.removeprefix("make_"))
    )


def test_keys_are_shared_by_what_a_model_is_and_what_rows_may_see(uncompiled):
    fields = {"seq_lens": (MANY_TOKENS,), "query_lens": (40,), "block_size": 256, "num_kv_heads": FEW_KV_HEADS}
    shared = WGMMA.build(**fields)
    assert list(launched(shared, exact=True)) == ["prefill_stretches_wgmma", "prefill_stretches_wgmma_merge"]
    assert list(launched(shared, (10, 0), exact=True)) == ["prefill_stretches", "prefill_stretches_merge"]
    assert list(launched(shared, (8, 0), exact=True)) == ["prefill"]
    assert list(launched(shared, exact=True, max_seq_len=4096)) == ["prefill_wgmma"]
    assert list(launched(WGMMA.build(**fields, window=STRETCH), exact=True)) == ["prefill_wgmma"]
    for more in ({"window": STRETCH + 1}, {"causal": False}):
        assert "prefill_stretches_wgmma" in launched(WGMMA.build(**fields | more), exact=True)
    assert list(launched(WGMMA.build(**fields | {"num_kv_heads": FEW_KV_HEADS + 1}), exact=True)) == ["prefill_wgmma"]
    assert "prefill_stretches_wgmma" in launched(shared), "beside the kernels of few rows"


def test_what_is_reserved_for_long_contexts_serves_short_ones(uncompiled):
    fields = {"seq_lens": (MANY_TOKENS,), "query_lens": (40,), "block_size": 256, "num_kv_heads": FEW_KV_HEADS}
    reserved, needed = (
        dict(planned(WGMMA.build(**fields), exact=True, max_seq_len=length).workspaces) for length in (2**20, 4096)
    )
    assert needed
    assert all(reserved[name] >= size for name, size in needed.items())


def test_a_chunk_of_few_kv_heads_has_work_for_a_whole_gpu(uncompiled):
    """512 tokens behind 32,768, four query heads to the KV head."""
    fields = {"group_size": 4, "num_kv_heads": 1, "block_size": 256, "head_dim": 128}
    chunk = WGMMA.build(seq_lens=(2**15 + 512,), query_lens=(512,), **fields)
    grid = launched(chunk, exact=True)["prefill_stretches_wgmma"]
    assert grid == (512 * 4 // 128 + 1, -(-(2**15 + 512) // STRETCH), 1)
    assert (grid[0] - 1) * grid[1] >= 100
    prompt = WGMMA.build(seq_lens=(2**13,), query_lens=(2**13,), **fields)
    assert launched(prompt)["prefill_stretches_wgmma"] == (2**13 * 4 // 128 + 1, 1, 1)


@given(
    num_tiles=st.integers(1, 2**20),
    max_seq_len=st.integers(STRETCH + 1, 2**31 - 1) | st.integers(STRETCH + 1, 2**17),
    window=st.integers(STRETCH + 1, 2**16) | st.just(2**31 - 1),
    more=st.tuples(st.integers(0, 1000), st.integers(0, 2**20)),
)
def test_a_workspace_has_room_for_every_state(num_tiles, max_seq_len, window, more):
    """And one for a call that is larger in everything is enough for both."""
    visible = Visible(window - 1)
    most = visible.most_units(STRETCH, max_seq_len, 128)
    columns, states = planning.columns_and_states(num_tiles, most)
    assert 1 <= columns <= most
    assert states in (1, most)
    assert (states == 1) == (columns == 1)
    assert columns == 1 or num_tiles * columns < ENOUGH_BLOCKS + num_tiles
    room = planning.most_states(num_tiles, most)
    assert num_tiles * states <= room <= max(num_tiles, MOST_STATES)
    larger = visible.most_units(STRETCH, min(max_seq_len + more[1], 2**31 - 1), 128)
    assert room <= planning.most_states(num_tiles + more[0], larger)


@pytest.mark.parametrize("is_alone", [False, True], ids=["several columns", "one column"])
@each_kernel(STRETCHES, WGMMA_STRETCHES, long=STRETCH_KERNELS[2:])
def test_a_row_has_the_same_bits_whoever_computes_its_stretches(kernel, is_alone, open_device, monkeypatch):
    """And those that see keys of one stretch have the bits of the kernel that shares none."""
    length = 3 * kernel.stretch + 20  # at most 512: the kernel of few rows takes no part
    query_len = min(length - 20, 1200 // kernel.spec.group_size)
    for fields in ({"scale": 1.0, "sinks": True}, {"window": kernel.stretch + 20}):
        problem = kernel.build(seq_lens=(length,), query_lens=(query_len,), num_kv_heads=1, **fields)
        expected = kernel.attend(problem, open_device)
        assert_close(problem, *expected)
        if is_alone:
            monkeypatch.setattr(planning, "ENOUGH_BLOCKS", 1)
        else:
            unshared = replace(kernel, stretch=None).attend(problem, open_device)
            one = slice(0, max(0, kernel.stretch - (length - query_len)))
            assert_same_bits([x[one] for x in expected], [x[one] for x in unshared])
        for start, stop in ((0, 50), (query_len - 3, query_len)):
            part = kernel.attend_rows(problem, start, stop, open_device, seed=start)
            assert_same_bits(part, (expected[0][start:stop], expected[1][start:stop]))


@each_emulated(STRETCHES)
def test_a_thread_block_of_its_own_takes_each_stretch(kernel):
    """Or one takes all, where there are thread blocks enough; and those of short sequences read no workspace."""
    problem = kernel.build(seq_lens=(200, 60), query_lens=(20, 60), num_kv_heads=1)
    device = emulator(footprint=True)
    assert_close(problem, *kernel.attend(problem, device=device))
    attend, merge = device.launches
    both = np.zeros(problem.out.shape, bool)
    both[:20] = True
    attend.footprint.expect("out", read=False, written=~both)
    merge.footprint.expect("out", read=False, written=both)


@given(
    head_dim=st.integers(1, 32).map(lambda n: 8 * n),
    kib=st.sampled_from([100, 164, 228]),
    kinds=st.sampled_from([("float16", "float16"), ("bfloat16", "fp8_e5m2"), ("float16", "int8")]),
    modified=st.booleans(),
)
def test_a_stretch_is_whole_tiles_of_keys(head_dim, kib, kinds, modified):
    config = TensorConfig(head_dim, 4, 16, *kinds, modified=modified, shared_kib=kib)
    for shape in (TileShape(config), WgmmaShape(config)):
        assert STRETCH % shape.keys == 0


CASES = [(64, (9, 0), {}), *long([(128, (9, 0), {}), (256, (9, 0), {}), (128, (10, 0), {}), (256, (12, 0), {})])]
CASES += long([(128, (9, 0), {"modified": True}), (128, (9, 0), {"kv_kind": "fp8_e4m3"}), (128, (12, 0), {})])
CASES += long([(256, (9, 0), {"kv_kind": "int8"}), (128, (10, 0), {"kv_kind": "int8"})])
ON_WARPGROUPS = [(128, {}), *long([(256, {}), (128, {"modified": True}), (256, {"modified": True})])]


def check_registers(make, config, capability):
    resources = compile_kernel(make, config, capability).linked.resources()
    assert resources.stack_bytes == resources.spill_bytes == 0


@pytest.mark.parametrize(("head_dim", "capability", "fields"), CASES, ids=str)
def test_everything_is_in_registers(head_dim, capability, fields):
    fields = {"q_kind": "float16", "kv_kind": "float16", "shared_kib": shared_kib(capability)} | fields
    config = TensorConfig(head_dim, 4, 16, **fields)
    for make in (make_prefill_stretches, make_prefill_stretches_merge):
        check_registers(make, config, capability)


@pytest.mark.parametrize(("head_dim", "fields"), ON_WARPGROUPS, ids=str)
def test_everything_is_in_registers_on_warpgroups(head_dim, fields):
    config = TensorConfig(head_dim, 3, 16, "float16", "float16", **fields)
    for make in (make_prefill_stretches_wgmma, make_prefill_stretches_wgmma_merge):
        check_registers(make, config, (9, 0))

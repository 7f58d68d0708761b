"""The prefill kernel on warpgroups in the emulator, with all of its checks on, against the oracle."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pagedkv.compiler.compile import compile_kernel
from pagedkv.compiler.occupancy import occupancy
from pagedkv.cuda.bad_entries import raise_if_failed
from pagedkv.cuda.plans import prefill as planning
from pagedkv.cuda.plans.prefill import tensor_config, uses_wgmma
from pagedkv.kernels.prefill.config import TensorConfig
from pagedkv.kernels.prefill.tensor_cores.wgmma.kernel import make_prefill_wgmma
from pagedkv.kernels.prefill.tensor_cores.wgmma.shape import DIMS, WgmmaShape

from ...machine_code.sass import code_of, moves_between, products_of
from ...support.devices import emulator
from ...support.problems import assert_close, build, expect
from ...support.strategies import each_of, long, own_parity
from ..decode_cases import LargeCaches, assert_same_bits, checked_call, move_past_4_gib
from .variants import (
    FP8,
    WGMMA,
    WGMMA_FORMS,
    chunk_of,
    prefill,
    prefill_in_chunks,
    rows_read,
    specs_on_warpgroups,
)


@pytest.fixture(autouse=True)
def asked_for(monkeypatch):
    monkeypatch.setenv("PAGEDKV_WGMMA", "1")


@each_of("form", WGMMA_FORMS)
def test_the_kernel_is_chosen_by_device_and_config_alone(form, monkeypatch):
    call = checked_call(build(form.replace(seq_lens=(300, 1), query_lens=(300, 1))))
    config = tensor_config(call, capability=(9, 0))
    assert uses_wgmma(config, capability=(9, 0))
    for capability in ((8, 0), (8, 9), (10, 0), (12, 0)):
        assert not uses_wgmma(config, capability=capability)
    others = [
        *({"kv_kind": "fp8_e4m3"}, {"head_dim": 72}, {"head_dim": 192}),
        {"modified": True, "score_mod": own_parity},
    ]
    for fields in others:
        assert not uses_wgmma(replace(config, **fields), capability=(9, 0))
    assert uses_wgmma(replace(config, wide=True), capability=(9, 0))
    for value in ("0", ""):
        monkeypatch.setenv("PAGEDKV_WGMMA", value)
        assert not uses_wgmma(config, capability=(9, 0))


def test_what_it_does_not_take_goes_to_the_other_kernel():
    for form, name in ((WGMMA, "prefill_wgmma["), (FP8, "prefill[")):
        problem = build(form.replace(seq_lens=(5,), query_lens=(5,)))
        device = emulator()
        assert_close(problem, *prefill(problem, device=device))
        assert device.launches[-1].kernel.startswith(name)


@each_of("form", WGMMA_FORMS, "64 dims")
@settings(max_examples=5)
@given(data=st.data())
def test_every_form_meets_the_error_bound(form, data, open_device):
    problem = build(data.draw(specs_on_warpgroups(form)))
    assert_close(problem, *prefill(problem, open_device))


@each_of("form", WGMMA_FORMS, "64 dims", "128 dims")
def test_a_prompt_of_several_tiles_of_rows_and_keys(form, open_device):
    problem = build(form.replace(seq_lens=(290, 7), query_lens=(200, 7), num_kv_heads=1, window=150, sinks=True))
    assert_close(problem, *prefill(problem, open_device))


@each_of("form", WGMMA_FORMS, "64 dims")
def test_a_needle_is_found_at_every_position_of_a_tile(form, open_device):
    """Of the rows past it; a KV head each."""
    needles = tuple(range(0, 128, 9))
    spec = form.replace(seq_lens=(133,), query_lens=(2,), num_kv_heads=len(needles), needles=needles)
    problem = build(spec.replace(fingerprint=True))
    out, lse = prefill(problem, open_device)
    assert_close(problem, out, lse)
    if not form.softcap:
        np.testing.assert_array_equal(out.astype(np.float32), np.round(expect(problem)[0]))


@st.composite
def elsewhere(draw, form):
    """A sequence, cut into chunks, and other ways to look at it."""
    length = draw(st.sampled_from([260, 1, 33, 128, 129]))
    stops = sorted({length, *draw(st.lists(st.integers(1, length), max_size=2))})
    fields = {"scale": draw(st.sampled_from([4.0, None])), "window": draw(st.sampled_from([None, 20]))}
    spec = form.replace(seq_lens=(length,), query_lens=(length,), sinks=draw(st.booleans()), **fields)
    return spec.replace(num_kv_heads=1, seed=draw(st.integers(0, 99))), stops, draw(st.integers(0, 2**16))


@each_of("form", WGMMA_FORMS, "64 dims")
@settings(max_examples=2)
@given(data=st.data())
def test_a_row_has_the_same_bits_in_any_chunk_batch_placement_layout_and_schedule(form, data, open_device):
    spec, stops, seed = data.draw(elsewhere(form))
    out, lse = prefill_in_chunks(spec, stops, seed, open_device)
    other = spec.replace(seq_lens=(5, *spec.seq_lens, 70), query_lens=(5, *spec.query_lens, 3), ids=(8, 0, 9))
    moved, moved_lse = prefill(build(other.replace(placement_seed=seed, layout="HND")), open_device)
    rows = slice(5, 5 + len(out))
    assert_same_bits((moved[rows], moved_lse[rows]), (out, lse))


@pytest.mark.long
def test_token_by_token_has_the_bits_of_a_prompt(open_device):
    whole = build(WGMMA.replace(seq_lens=(131,), query_lens=(131,), num_kv_heads=1, scale=2.0))
    out, lse = prefill(whole, open_device)
    for position in (0, 1, 63, 64, 126, 127, 128, 129, 130):
        part = chunk_of(whole, position, position + 1, open_device(global_race=True))
        assert_same_bits(part, (out[position : position + 1], lse[position : position + 1]))


@each_of("form", WGMMA_FORMS, "64 dims")
def test_pivots_that_move_leave_other_rows_alone(form, open_device):
    whole = build(form.replace(seq_lens=(270,), query_lens=(150,), num_kv_heads=1, scale=4.0))
    out, lse = prefill(whole, open_device)
    assert_close(whole, out, lse)
    whole = build(whole.spec.replace(query_lens=(270,)))
    out, lse = prefill(whole, open_device)
    for start, stop in ((200, 231), (269, 270)):
        part = chunk_of(whole, start, stop, open_device(global_race=True))
        assert_same_bits(part, (out[start:stop], lse[start:stop]))


@pytest.mark.parametrize("block_size", long([3, 1, 256]))
def test_the_bits_are_the_same_for_any_block_size(block_size, open_device):
    spec = WGMMA.replace(seq_lens=(290, 3, 70), query_lens=(130, 3, 1))
    expected = prefill(build(spec), open_device)
    assert_same_bits(prefill(build(spec.replace(block_size=block_size)), open_device), expected)


@each_of("form", WGMMA_FORMS, "64 dims")
def test_what_is_not_used_does_not_change_a_bit(form, open_device):
    spec = form.replace(seq_lens=(37, 1, 150, 0), query_lens=(20, 1, 30, 0), window=50, sinks=True)
    expected = prefill(build(spec.replace(poison="huge")), open_device)
    for poison in ("nan", "inf"):
        assert_same_bits(prefill(build(spec.replace(poison=poison)), open_device), expected)


def test_keys_that_no_row_sees_are_not_read():
    spec = WGMMA.replace(seq_lens=(400,), query_lens=(200,), window=40, num_kv_heads=1)
    problem = build(spec)
    whole = problem.block_tables, problem.k_cache, problem.v_cache
    problem = build(spec.replace(seq_lens=(250,), query_lens=(5,)))  # behind it, 150 more tokens
    problem.q = problem.q[:5]
    problem.block_tables, problem.k_cache, problem.v_cache = whole
    device = emulator(footprint=True)
    prefill(problem, device=device)
    rows = rows_read(problem, 245 - 39, 249)
    for name in ("k_cache", "v_cache"):
        device.launches[0].footprint.expect(name, read=rows, written=False)


@pytest.mark.long
def test_caches_of_more_than_4_gib_and_of_negative_strides():
    spec = WGMMA.replace(seq_lens=(140, 3), query_lens=(20, 3))
    expected = prefill(build(spec))
    problem = build(spec)
    num_blocks = len(problem.k_cache)
    move_past_4_gib(problem)
    assert_same_bits(prefill(problem, device=LargeCaches(num_blocks)), expected)
    problem = build(spec)
    for name in ("k_cache", "v_cache"):
        setattr(problem, name, np.ascontiguousarray(getattr(problem, name)[::-1])[::-1])
    assert_same_bits(prefill(problem), expected)


def test_what_check_refuses_is_recorded_and_harms_nobody_else(open_device):
    problem = build(WGMMA.replace(seq_lens=(40, 140), query_lens=(40, 40)))
    expected = prefill(problem, open_device)
    call = checked_call(problem, check=True)
    out, lse = np.full_like(problem.q, np.nan), np.full(problem.q.shape[:2], np.nan, np.float32)
    with open_device(global_race=True) as device:
        planning.prefill_attention(device, call._replace(seq_lens=np.array([40, -1], np.int32)), out, lse)
        with pytest.raises(ValueError, match=r"seq_lens .* got -1 for sequence 1"):
            raise_if_failed([device])
    assert_same_bits((out[:40], lse[:40]), (expected[0][:40], expected[1][:40]))
    assert (out[40:] == 0).all()
    assert (lse[40:] == -np.inf).all()


def kernel_of(head_dim, kind="float16", **fields):
    config = TensorConfig(head_dim, fields.pop("group_size", 4), 16, kind, kind, **fields)
    return config, compile_kernel(make_prefill_wgmma, config, (9, 0))


@pytest.mark.parametrize(
    ("head_dim", "kind"), [(128, "float16"), *long([(64, "float16"), (256, "float16"), (128, "bfloat16")])]
)
def test_the_plain_loop_has_few_instructions_and_moves_nothing_between_products(head_dim, kind):
    """That ptxas makes no product wait is an error of `link`."""
    config, kernel = kernel_of(head_dim, kind)
    assert ".target sm_90a\n" in kernel.ptx
    assert ".extern .shared .align 1024 " in kernel.ptx  # the emulator gives it more than it asks for
    resources = kernel.linked.resources()
    assert (resources.stack_bytes, resources.spill_bytes) == (0, 0)
    assert occupancy((9, 0), resources.registers, kernel.num_threads, WgmmaShape(config).nbytes) >= 1
    code = code_of(kernel.cubin, kernel.entry)
    loop = products_of(code, (9, 0))
    assert loop.mma == head_dim // 16 + WgmmaShape(config).keys // 16
    assert loop.instructions - loop.mma <= 480
    assert moves_between(code, (9, 0)) == 0


OTHERS = [(128, {"modified": True}), (256, {"modified": True}), (128, {"wide": True, "group_size": 5})]


@pytest.mark.parametrize(("head_dim", "fields"), long(OTHERS), ids=str)
def test_options_have_everything_in_registers(head_dim, fields):
    _, kernel = kernel_of(head_dim, **fields)
    resources = kernel.linked.resources()
    assert (resources.stack_bytes, resources.spill_bytes) == (0, 0)
    assert moves_between(code_of(kernel.cubin, kernel.entry), (9, 0)) == 0


@pytest.mark.parametrize("head_dim", DIMS)
@pytest.mark.parametrize("modified", [False, True])
def test_tiles_are_cut_as_descriptors_ask(head_dim, modified):
    shape = WgmmaShape(TensorConfig(head_dim, 4, 16, "float16", "float16", modified=modified))
    assert shape.nbytes <= 227 * 1024
    assert shape.num_threads == shape.copiers == make_prefill_wgmma(shape.config).num_threads
    assert shape.lanes == shape.chunks
    starts = (shape.k_start, shape.v_start, shape.tile_bytes, shape.panel_bytes, shape.q_panel_bytes)
    assert all(start % 1024 == 0 for start in starts)
    assert shape.rows_at_once * shape.rows_of_thread == shape.keys
    assert shape.rows_at_once % 8 == 0  # a chunk keeps its place in the rows of a thread
    assert shape.warp_rows_at_once * shape.rows_of_thread <= 32

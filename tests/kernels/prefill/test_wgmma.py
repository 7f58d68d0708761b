"""What prefill on warpgroups alone does: which calls take it, its instructions and its tiles."""

from dataclasses import replace

import pytest

from pagedkv.compiler.compile import compile_kernel
from pagedkv.compiler.occupancy import occupancy
from pagedkv.cuda.plans import prefill as planning
from pagedkv.cuda.plans.prefill import tensor_config, uses_wgmma
from pagedkv.kernels.prefill.config import TensorConfig
from pagedkv.kernels.prefill.tensor_cores.wgmma.kernel import make_prefill_wgmma
from pagedkv.kernels.prefill.tensor_cores.wgmma.shape import DIMS, GroupShape, WgmmaShape

from ...attention.drawn import WGMMAS
from ...attention.kernels import PREFILL, WGMMA, assert_same_bits, each_emulated, each_kernel, new_results
from ...machine_code.sass import code_of, moves_between, overlap_of, products_of
from ...support.device_fakes import RecordingDevice, without_code
from ...support.devices import emulator, few_at_once
from ...support.problems import assert_close
from ...support.strategies import long, own_parity


@each_emulated(*WGMMAS)
def test_the_kernel_is_chosen_by_device_and_config_alone(kernel):
    config = tensor_config(kernel.call(kernel.build()), capability=(9, 0))
    assert uses_wgmma(config, (9, 0))
    for capability in ((8, 0), (8, 9), (10, 0), (12, 0)):
        assert not uses_wgmma(config, capability)
    others = [
        *({"kv_kind": "fp8_e4m3"}, {"head_dim": 64}, {"head_dim": 192}),
        {"modified": True, "score_mod": own_parity},
    ]
    for fields in others:
        assert not uses_wgmma(replace(config, **fields), (9, 0))
    assert uses_wgmma(replace(config, wide=True), (9, 0))


def test_what_it_does_not_take_goes_to_the_other_kernel():
    for kernel, name in ((WGMMA, "prefill_wgmma["), (PREFILL, "prefill[")):
        problem, device = kernel.build(seq_lens=(5,), query_lens=(5,)), emulator()
        assert_close(problem, *kernel.attend(problem, device=device))
        assert device.launches[-1].kernel.startswith(name)


@each_kernel(*WGMMAS[:2], long=WGMMAS[2:])
def test_a_prompt_of_several_tiles_of_rows_and_keys(kernel, open_device):
    problem = kernel.build(seq_lens=(290, 7), query_lens=(200, 7), num_kv_heads=1, window=150, sinks=True)
    assert_close(problem, *kernel.attend(problem, open_device))


@each_kernel(WGMMA, long=WGMMAS[1:])
def test_stages_are_used_again(kernel, open_device):
    """Each warpgroup copies over what the other one has read, whichever is ahead."""
    problem = kernel.build(seq_lens=(900,), query_lens=(-(-90 // kernel.spec.group_size),), num_kv_heads=1)
    expected = kernel.attend(problem, open_device)
    assert_close(problem, *expected)
    for seed in (1, 2):
        assert_same_bits(kernel.attend(problem, device=open_device(seed=seed)), expected)


@each_kernel(WGMMA, long=WGMMAS[1:])
def test_the_thread_block_that_takes_an_item_changes_no_bits(kernel, open_device):
    """All items to one, three that draw, one for each; in another order, and again with the counter as it is left."""
    problem = kernel.build(seq_lens=(150, 0, 7, 300), query_lens=(100, 0, 7, 2), num_kv_heads=1)
    expected = kernel.attend(problem, open_device)
    assert_close(problem, *expected)
    for count, seed in ((1, 1), (3, 2), (1000, 3)):
        with few_at_once(open_device, count)(seed=seed, global_race=True) as device:
            results = [new_results(problem) for _ in range(2)]
            for result in results:
                kernel.launch(device, kernel.call(problem), *result)
        for result in results:
            assert_same_bits(result, expected)


@without_code()
def test_a_grid_has_as_many_thread_blocks_as_run_at_once():
    for length, grid in ((64, 2 * 3), (4000, RecordingDevice.num_blocks_at_once)):
        call = WGMMA.call(WGMMA.build(seq_lens=(length,), query_lens=(length,), num_kv_heads=3))
        made = planning.plan(RecordingDevice(), call)
        assert made.launches[0].grid == (grid, 1, 1)
        assert dict(made.workspaces)["prefill_items"] == 4


@each_kernel(long=(WGMMA,))
def test_token_by_token_has_the_bits_of_a_prompt(kernel, open_device):
    whole = kernel.build(seq_lens=(131,), query_lens=(131,), num_kv_heads=1, scale=2.0)
    out, lse = kernel.attend(whole, open_device)
    for position in (0, 1, 63, 64, 126, 127, 128, 129, 130):
        part = kernel.attend_rows(whole, position, position + 1, open_device)
        assert_same_bits(part, (out[position : position + 1], lse[position : position + 1]))


def kernel_of(head_dim, kind="float16", **fields):
    config = TensorConfig(head_dim, fields.pop("group_size", 4), 16, kind, kind, **fields)
    return config, compile_kernel(make_prefill_wgmma, config, (9, 0))


@pytest.mark.parametrize(("head_dim", "kind"), [(128, "float16"), (256, "float16"), *long([(128, "bfloat16")])])
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
    assert loop.instructions - loop.mma <= 490
    assert moves_between(code, (9, 0)) == 0
    before, late_exponentials = overlap_of(code, (9, 0))
    assert before <= 12
    assert late_exponentials == 0


OTHERS = [(128, {"modified": True}), (256, {"modified": True}), (128, {"wide": True, "group_size": 5})]


@pytest.mark.parametrize(("head_dim", "fields"), long(OTHERS), ids=str)
def test_options_have_everything_in_registers(head_dim, fields):
    _, kernel = kernel_of(head_dim, **fields)
    resources = kernel.linked.resources()
    assert (resources.stack_bytes, resources.spill_bytes) == (0, 0)
    code = code_of(kernel.cubin, kernel.entry)
    assert moves_between(code, (9, 0)) == 0
    assert overlap_of(code, (9, 0)).exponentials <= 1  # of 34 to 66


@pytest.mark.parametrize("head_dim", DIMS)
@pytest.mark.parametrize("modified", [False, True])
def test_tiles_are_cut_as_descriptors_ask(head_dim, modified):
    shape = WgmmaShape(TensorConfig(head_dim, 4, 16, "float16", "float16", modified=modified))
    assert shape.nbytes <= 227 * 1024
    assert shape.num_threads == make_prefill_wgmma(shape.config).num_threads
    copied = GroupShape(shape.config)
    assert (2 * copied.num_threads, 2 * copied.rows, 2 * copied.keys) == (shape.num_threads, shape.rows, shape.keys)
    assert copied.lanes == copied.chunks
    assert copied.rows_at_once * copied.rows_of_thread == copied.keys
    assert copied.keys % 8 == copied.rows % 8 == 0  # rows of both warpgroups are swizzled alike
    assert copied.warp_rows_at_once * copied.rows_of_thread <= 32
    starts = (shape.k_start, shape.v_start, shape.tile_bytes, shape.panel_bytes, shape.q_panel_bytes)
    assert all(start % 1024 == 0 for start in starts)

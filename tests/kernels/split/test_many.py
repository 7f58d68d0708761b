"""Many query heads: the split kernel with rows in shared memory."""

from pagedkv.kernels.split.config import SHORTEST_SPLIT
from pagedkv.kernels.split.tensor_cores.stages import StageShape

from ...attention.drawn import SPLITS
from ...attention.kernels import MANY_HEADS, STAGES_OF_16, decode_kernel, each_emulated, each_kernel
from ...support.devices import emulator
from ...support.problems import assert_close
from .test_split import config_of

KERNELS = (MANY_HEADS, STAGES_OF_16, next(kernel for kernel in SPLITS if kernel.spec.group_size == 33))
MORE = (decode_kernel("split", 256, 16, "float16", "fp8_e4m3", group_size=48),)


def tokens_of_stage(kernel):
    return StageShape(config_of(kernel)).tokens


def test_stages_have_32_tokens_or_16():
    assert [tokens_of_stage(kernel) for kernel in KERNELS] == [32, 16, 16]


@each_kernel(*KERNELS, long=MORE)
def test_the_last_stage_may_have_any_number_of_tokens(kernel, open_device):
    lengths = range(1, 2 * tokens_of_stage(kernel) + 2)
    problem = kernel.build(seq_lens=(*lengths, SHORTEST_SPLIT - 1), num_kv_heads=1)
    assert_close(problem, *kernel.attend(problem, open_device))


@each_kernel(long=tuple(MANY_HEADS.replace(f"G{size}", group_size=size) for size in (32, 33, 64, 65)))
def test_the_heads_of_every_warp(kernel, open_device):
    problem = kernel.build(seq_lens=(70, 5))
    assert_close(problem, *kernel.attend(problem, open_device))


@each_emulated(*KERNELS, long=MORE)
def test_lanes_keep_out_of_each_others_banks(kernel):
    device = emulator(stats=True)
    kernel.attend(kernel.build(seq_lens=(SHORTEST_SPLIT,), num_kv_heads=1), device=device)
    stats = device.launches[0]
    assert stats.shared_wavefronts <= 1.1 * stats.shared_wavefronts_min

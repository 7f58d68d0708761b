"""Every family of kernels against the oracle and against itself, in calls as users make them; graphs, streams.

What is wrong says where to look: wgmma alone, its descriptors; "many splits" alone, the count of the last thread block;
repeats alone, a fence or a wait. Where the GPU has no warpgroups, "wgmma" is the other kernel of prefill.
"""

import os

import numpy as np
import pytest

import pagedkv

from ..attention.kernels import assert_same_bits
from ..support.frameworks import FRAMES, capture, sent
from ..support.problems import Spec, assert_close, build
from ..support.strategies import long

pytestmark = pytest.mark.usefixtures("without_lines")

F16 = {"q_dtype": "float16", "kv_dtype": "float16"}
BF16 = {"q_dtype": "bfloat16", "kv_dtype": "bfloat16"}
E4M3, E5M2 = ({"q_dtype": "float16", "kv_dtype": x, "kv_scales": "per head"} for x in ("fp8_e4m3", "fp8_e5m2"))
LONG, LONG_IN_THE_EMULATOR = 9000, 3000
DECODES = {
    "v1": Spec((37, 0, 600), layout="vllm", alibi=True),
    "v2 e4m3": Spec((20, 1500), layout="vllm", **E4M3),
    "split 64 dims": Spec((2, 0, 200), group_size=4, **F16),
    "split 128 dims": Spec((LONG, 0, 200), group_size=4, head_dim=128, **BF16),
    "split many splits": Spec((2, 0, LONG, 530), group_size=8, head_dim=128, sinks=True, **F16),
    "split bfloat16 of 16 heads": Spec((LONG, 17), group_size=16, layout="HND", **BF16),
    "split 48 heads": Spec((LONG, 17), group_size=48, head_dim=128, num_kv_heads=1, **F16),
    "split e4m3": Spec((LONG, 17), group_size=4, head_dim=128, **E4M3),
    "split e5m2 of 72 dims": Spec((LONG, 17), group_size=8, head_dim=72, block_size=8, **E5M2),
    "split float32": Spec((LONG, 17), group_size=4, head_dim=128),
    "split options": Spec((LONG, 17), group_size=4, head_dim=128, softcap=5.0, alibi=True, window=2000, **F16),
}
RAGGED = {"seq_lens": (290, 7, 0, 700), "query_lens": (200, 7, 0, 150), "group_size": 4}
PREFILLS = {
    "prefill 64 dims": Spec(**RAGGED, sinks=True, **F16),
    "prefill options of 72 dims": Spec(**RAGGED, head_dim=72, softcap=3.0, **BF16),
    "prefill e4m3": Spec(**RAGGED, head_dim=128, **E4M3),
    "prefill e5m2 of 256 dims": Spec(**RAGGED, head_dim=256, **E5M2),
    "prefill few rows": Spec((LONG, 40), (3, 2), group_size=4, **F16),
    "prefill few rows e4m3": Spec((LONG, 40), (3, 2), group_size=4, head_dim=128, **E4M3),
    "prefill stretches": Spec((LONG, 40), (150, 3), num_kv_heads=1, group_size=4, **F16),
    "prefill float32": Spec((70, 33), (40, 3), group_size=3),
}
WGMMAS = {
    "wgmma 128 dims": Spec(**RAGGED, head_dim=128, window=150, **F16),
    "wgmma bfloat16": Spec(**RAGGED, head_dim=128, sinks=True, scale=-0.1, **BF16),
    "wgmma 256 dims": Spec(**RAGGED, head_dim=256, **BF16),
    "wgmma options": Spec(**RAGGED, head_dim=128, softcap=3.0, alibi=True, **BF16),
    "wgmma stretches": Spec((LONG, 40), (150, 3), num_kv_heads=1, group_size=4, head_dim=128, **BF16),
    "wgmma and few rows": Spec((LONG, 40), (3, 2), group_size=4, head_dim=128, **F16),
}
FAMILIES = DECODES | PREFILLS | WGMMAS
# Kernels that other tests compile.
SHORT = ("v1", "split 64 dims", "prefill float32")


class OnDevice:
    """A problem whose arrays are on a device."""

    def __init__(self, framework, spec):
        most = LONG_IN_THE_EMULATOR if framework.name == "host" else LONG
        self.problem = build(spec.replace(seq_lens=tuple(min(n, most) for n in spec.seq_lens)))
        self.framework, self.args = framework, [framework.send(x) for x in self.problem.args]
        self.options = sent(framework, self.problem.options) | framework.options

    def zeros(self):
        return self.framework.send(np.zeros(self.problem.q.shape, self.problem.q.dtype))

    def attend(self, out, **more):
        """The LSE, with `out` filled."""
        call = pagedkv.decode_attention if self.problem.spec.query_lens is None else pagedkv.prefill_attention
        return call(*self.args, **self.options, **more, out=out, return_lse=True)[1]

    def result(self, **more):
        """(out, lse) of a call, on the host."""
        out = self.zeros()
        lse = self.attend(out, **more)
        return self.framework.fetch(out), self.framework.fetch(lse)


def over(names, *frames):
    """Parametrise by families: all of them on a GPU, and in the emulator's short run those in SHORT."""
    return pytest.mark.parametrize(
        ("name", "frame"),
        [
            *((name, "host") for name in names if name in SHORT),
            *long((name, "host") for name in names if name not in SHORT),
            *(pytest.param(name, frame, marks=pytest.mark.gpu) for frame in frames for name in names),
        ],
    )


@over(FAMILIES, "torch")
def test_a_family_is_right_and_has_the_same_bits_again_and_again(name, frame):
    held = OnDevice(FRAMES[frame](), FAMILIES[name])
    kernel = {"kernel": name.split()[0]} if name in DECODES else {}
    first = held.result(**kernel)
    assert_close(held.problem, *first)
    for _ in range(2 if frame == "host" else int(os.environ.get("PAGEDKV_REPEATS", "200"))):
        assert_same_bits(held.result(**kernel), first)


@over(["split 64 dims", "split many splits", "prefill few rows", "prefill stretches"], "torch", "cupy")
def test_replays_and_calls_between_them_have_the_same_bits(name, frame):
    """Nothing runs before the capture, and lengths change between replays."""
    framework = FRAMES[frame]()
    held = OnDevice(framework, FAMILIES[name])
    out, lengths = held.zeros(), held.problem.seq_lens
    replay = capture(framework, lambda: held.attend(out, check=False), 0)
    for now in (lengths, np.maximum(lengths - 100, np.minimum(lengths, 3)), lengths):
        held.args[4][...] = framework.send(now)
        replay()
        replay()
        assert_same_bits([framework.fetch(out)], held.result(check=False)[:1])


def test_streams_have_workspaces_and_counters_of_their_own(gpu_framework):
    held = OnDevice(gpu_framework, FAMILIES["split many splits"])
    expected = held.result()
    assert_close(held.problem, *expected)
    streams = [gpu_framework.stream() for _ in range(4)]
    outs, lses = [held.zeros() for _ in streams], [None] * len(streams)
    gpu_framework.fetch(outs[-1])  # all that the streams read has arrived
    for _ in range(100):
        for i, stream in enumerate(streams):
            with stream:
                lses[i] = held.attend(outs[i])
    for stream, out, lse in zip(streams, outs, lses, strict=True):
        with stream:
            assert_same_bits((gpu_framework.fetch(out), gpu_framework.fetch(lse)), expected)

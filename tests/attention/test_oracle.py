"""Attention is what the reference says, within the error bound, for problems drawn for every kernel."""

import math

import numpy as np
import pytest
from hypothesis import given, settings

from ..support.devices import emulator
from ..support.problems import Spec, assert_close, build, expect
from ..support.strategies import fading_faster, fading_parity
from .drawn import PAGED, Source, on_devices, on_the_cpu
from .kernels import (
    CUDA_CORES,
    MANY_HEADS,
    PREFILL,
    PREFILL_CORES,
    PREFILL_FP8,
    SPLIT,
    Kernel,
    decode_kernel,
    each_kernel,
    gpu,
)


def cases():
    """(source, open_device): each source, and as a long case the first kernels of each kind with many problems."""
    for source in on_the_cpu():
        yield pytest.param(source, None, id=str(source.kernel), marks=[pytest.mark.long] if source.is_long else [])
    for source in on_devices():
        name, marks = str(source.kernel), [pytest.mark.long] if source.is_long else []
        yield pytest.param(source, emulator, id=f"emulator-{name}", marks=marks)
        yield pytest.param(source, gpu, id=f"gpu-{name}", marks=[*marks, pytest.mark.gpu])
        if not source.is_long:
            more = source._replace(num_problems=20)
            yield pytest.param(more, emulator, id=f"emulator-{name}-more_often", marks=pytest.mark.long)


@pytest.mark.parametrize(("source", "open_device"), [*cases()])
def test_drawn_problems_meet_the_error_bound(source: Source, open_device):
    @settings(max_examples=source.num_problems)
    @given(source.specs)
    def check(spec):
        problem = build(spec)
        assert_close(problem, *source.kernel.attend(problem, open_device))

    check()


# -- score_mod: kernels that have one are not kept on disk, so their tests stand together
SEEN_TOKENS = 601


def seen(kernel: Kernel) -> Kernel:
    """The kernel with a score_mod that reads arrays that end with the heads and with the longest sequence."""
    of_head = np.linspace(0, 1, 2 * kernel.spec.group_size, dtype=np.float32)
    of_position = np.resize(np.float32([0.7, 0, 0]), SEEN_TOKENS)

    def seeing(score, q_pos, k_pos, head, seq):
        """Every argument counts; head 1 sees nothing."""
        if head == 1:
            return -math.inf
        return 0.5 * score + of_position[k_pos] + of_head[head] + 0.3 * seq - 0.01 * (q_pos - k_pos)

    return kernel.replace("seeing", score_mod=seeing)


# A thread block of these has fewer heads than its tiles have rows.
FEW_HEADS = decode_kernel("split", 96, 16, "float32", "float32", group_size=5)
MORE_HEADS = decode_kernel("split", 112, 16, "float16", "float16", group_size=18)
WITH_SCORE_MOD = (
    *(kernel for kernel in PAGED if kernel.spec.score_mod),
    *map(seen, (SPLIT, FEW_HEADS, MORE_HEADS, PREFILL_CORES)),
)
MORE_WITH_SCORE_MOD = tuple(map(seen, (CUDA_CORES, MANY_HEADS, PREFILL, PREFILL_FP8)))


@each_kernel(*WITH_SCORE_MOD, long=MORE_WITH_SCORE_MOD)
def test_a_score_mod_sees_positions_heads_and_sequences_and_may_mask_every_key(kernel, open_device):
    batch = {"seq_lens": (1, 40, SEEN_TOKENS, 0), "window": 450}
    if kernel.is_prefill:
        batch = {"seq_lens": (1, 40, 70), "query_lens": (1, 5, 70)}
    for sinks in (False, True):
        group_size = 2 if kernel.kernel in ("v1", "v2") else kernel.spec.group_size
        problem = kernel.build(**batch, sinks=sinks, group_size=group_size, causal=not sinks)
        out, lse = kernel.attend(problem, open_device)
        assert_close(problem, out, lse)
        assert (out[:, 1] == 0).all()
        masked = problem.options["sinks"][1] if sinks else np.float32(-math.inf)
        np.testing.assert_array_equal(lse[:3, 1], np.full(len(lse[:3]), masked))


ON_CPU = (Spec(seq_lens=(1, 2, 0, 513)), Spec(seq_lens=(40, 90), query_lens=(40, 3)))


@pytest.mark.parametrize("spec", ON_CPU, ids=["decode", "prefill"])
def test_a_score_mod_on_the_cpu_comes_last_and_may_mask_every_key(spec):
    """After softcap and bias; functions that differ in a number that they close over are different ones."""
    kernel = Kernel("cpu", "score_mod", spec)
    for score_mod in (fading_parity, fading_faster, fading_parity):
        for fields in ({}, {"sinks": True}, {"softcap": 0.3, "alibi": True, "scale": 2.0, "window": 150}):
            problem = kernel.build(score_mod=score_mod, **fields)
            assert (expect(problem)[1] == -np.inf).any() or "sinks" in fields
            assert_close(problem, *kernel.attend(problem))

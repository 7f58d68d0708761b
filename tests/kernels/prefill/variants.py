"""What the prefill kernels are compiled for in tests, the problems drawn for each, and calls on an emulator."""

from collections.abc import Callable
from typing import Any

import hypothesis.strategies as st
import numpy as np

from pagedkv.cuda.plans import prefill as planning
from pagedkv.cuda.plans.prefill import suits_tensor_cores, tensor_config
from pagedkv.kernels.prefill.config import FEW_ROWS, PART
from pagedkv.kernels.prefill.cuda_cores.shape import CoresShape
from pagedkv.kernels.prefill.tensor_cores.tile import TileShape

from ...support.devices import emulator, with_capability
from ...support.problems import Problem, Spec, build
from ...support.strategies import fade, own_parity
from ..decode_cases import assert_same_bits, checked_call

# Two stages and 32 rows of a warp; a gap in rows, options, 16 rows; one stage; fp8 on its way to operands, 16 at once.
TENSOR = Spec(q_dtype="float16", kv_dtype="float16", group_size=4)
OPTIONS = Spec(q_dtype="bfloat16", kv_dtype="bfloat16", head_dim=72, group_size=3, block_size=3, softcap=3.0)
ONE_STAGE = Spec(q_dtype="float16", kv_dtype="float16", head_dim=256, group_size=1)
FP8 = Spec(q_dtype="bfloat16", kv_dtype="fp8_e4m3", head_dim=80, group_size=2, kv_scales="per head")
# float32; layout vllm.
CORES = Spec(head_dim=64, group_size=3)
VLLM = Spec(q_dtype="float16", kv_dtype="fp8_e5m2", head_dim=48, group_size=2, layout="vllm", kv_scales="scalar")
FORMS = {
    **{"tensor cores": TENSOR, "options": OPTIONS, "one stage": ONE_STAGE, "fp8": FP8},
    **{"CUDA cores": CORES, "vllm": VLLM},
}
BOTH = {"tensor cores": TENSOR, "CUDA cores": CORES}
MORE_FORMS = {
    "fp8 of 40 dims": FP8.replace(head_dim=40),
    "128 dims": TENSOR.replace(head_dim=128, group_size=5),
    "128 dims of bfloat16": OPTIONS.replace(head_dim=128, softcap=None, group_size=8),
    "8 dims": TENSOR.replace(head_dim=8, group_size=9, block_size=1),
    "256 dims with options": ONE_STAGE.replace(alibi=True, block_size=7),
    "fp8 as float16": FP8.replace(q_dtype="float16", head_dim=128),
    "e5m2": FP8.replace(kv_dtype="fp8_e5m2", head_dim=256, group_size=7),
    "many heads": TENSOR.replace(group_size=130),
    "score_mod": TENSOR.replace(score_mod=own_parity, head_dim=80),
    "score_mod on CUDA cores": CORES.replace(score_mod=fade),
    "512 dims": CORES.replace(q_dtype="bfloat16", kv_dtype="bfloat16", head_dim=512),
    "264 dims": CORES.replace(kv_dtype="fp8_e4m3", head_dim=264),
    "float32 over bfloat16": CORES.replace(kv_dtype="bfloat16", head_dim=128),
    "vllm of float32": VLLM.replace(q_dtype="float32", kv_dtype="float32", kv_scales=None, head_dim=24),
    "vllm of float16": VLLM.replace(kv_dtype="float16", kv_scales=None, head_dim=128),
}
# Those whose few rows over a long context have a kernel of their own.
SPLIT_FORMS = {name: form for name, form in FORMS.items() if form not in (CORES, VLLM)}
MORE_NAMES = ("128 dims", "8 dims", "256 dims with options", "fp8 as float16", "e5m2", "score_mod")
SPLIT_FORMS |= {name: MORE_FORMS[name] for name in MORE_NAMES} | {"fp8": MORE_FORMS["fp8 of 40 dims"]}
SPLIT = 4 * PART  # tokens of a thread block of TENSOR
# On warpgroups.
WGMMA = TENSOR.replace(group_size=3)
WGMMA_OPTIONS = WGMMA.replace(softcap=3.0, q_dtype="bfloat16", kv_dtype="bfloat16", block_size=3)
WGMMA_FORMS = {
    "64 dims": WGMMA,
    **{"128 dims": WGMMA.replace(head_dim=128, group_size=8, q_dtype="bfloat16", kv_dtype="bfloat16")},
    **{"256 dims": WGMMA.replace(head_dim=256, group_size=1, block_size=7), "options": WGMMA_OPTIONS},
    **{"128 dims with options": WGMMA_OPTIONS.replace(head_dim=128, group_size=130)},
    **{"256 dims with options": WGMMA_OPTIONS.replace(head_dim=256, softcap=None, alibi=True)},
}
CAPABILITY = (9, 0)


def numbers(*values: int) -> np.ndarray:
    return np.array(values, np.int32)


@st.composite
def specs(draw: st.DrawFn, form: Spec) -> Spec:
    """Problems for a form: every option that is an argument of the launch."""
    size = form.block_size
    near = [0, 1, 2, size, size + 1, 31, 32, 33, 63, 64, 65, 127, 128, 129, 150]
    lengths = draw(st.lists(st.sampled_from(near) | st.integers(0, 150), min_size=1, max_size=3))
    query_lens = [min(n, draw(st.sampled_from([0, 1, 2, 17, 33, 150]) | st.integers(0, 150))) for n in lengths]
    layouts, strides = [form.layout] if form.layout == "vllm" else ["NHD", "HND"], ["own", "halves", "strided"]
    if form.is_fp8 and (form.layout == "vllm" or form.head_dim % 16 == 0):
        strides.remove("strided")  # gaps of 8 bytes, which whole vectors cannot have
    cores = form.layout == "vllm" or "float32" in (form.q_dtype, form.kv_dtype)
    fields: dict[str, Any] = {}
    if form.softcap or form.alibi or cores:
        fields["softcap"] = draw(st.sampled_from([None, 0.7, 30.0]))
        fields["alibi"] = (fields["softcap"] is None and not cores) or draw(st.booleans())
    if cores:
        fields["block_size"] = draw(st.sampled_from([8, 16, 32] if form.layout == "vllm" else [1, 3, 16, 64]))
        fields["group_size"] = draw(st.integers(1, 5))
        fields["leftpad"], fields["mask"] = draw(st.booleans()), draw(st.sampled_from([None, "bool", "bits"]))
        fields["seq_slopes"] = draw(st.booleans())
    causal = draw(st.booleans())
    return form.replace(
        seq_lens=tuple(lengths),
        query_lens=tuple(query_lens),
        padding_rows=draw(st.integers(0, 2)),
        num_kv_heads=draw(st.integers(1, 2)) if form.num_heads < 100 else 1,
        layout=draw(st.sampled_from(layouts)),
        strides=draw(st.sampled_from(strides)),
        scale=draw(st.sampled_from([None, None, 0.0, -0.1, 0.25])),
        window=draw(st.none() | st.sampled_from([1, 2, 17, 33, 64, 65, 10**6])),
        sinks=draw(st.booleans()),
        causal=causal,
        window_right=None if causal else draw(st.sampled_from([None, 0, 1, 40, 64])),
        seed=draw(st.integers(0, 2**16)),
        **fields,
    )


@st.composite
def specs_of_few_rows(draw: st.DrawFn, form: Spec) -> Spec:
    """Few rows of long sequences among others, near the ends of tiles, parts and splits."""
    near = [513, 575, 576, 577, 700, 1023, 1024, 1025, 1500, SPLIT, SPLIT + 1, SPLIT + 70]
    most = FEW_ROWS // form.group_size
    lengths, queries = [draw(st.sampled_from(near))], [draw(st.integers(1, most))]
    for _ in range(draw(st.integers(0, 2))):
        lengths.append(draw(st.sampled_from([0, 3, 130, 512, 513, 600])))
        queries.append(min(lengths[-1], draw(st.sampled_from([0, 1, most, most + 1, 40]))))
    fields: dict[str, Any] = {}
    if form.softcap or form.alibi:
        fields = {"softcap": draw(st.sampled_from([None, 0.7])), "alibi": True}
    causal = draw(st.booleans())
    return form.replace(
        seq_lens=tuple(lengths),
        query_lens=tuple(queries),
        padding_rows=draw(st.integers(0, 1)),
        num_kv_heads=draw(st.sampled_from([2, 1])),
        layout=draw(st.sampled_from(["NHD", "HND"])),
        scale=draw(st.sampled_from([None, None, 0.0, -0.1])),
        window=draw(st.sampled_from([None, None, 513, 600, 1100])),
        sinks=draw(st.booleans()),
        causal=causal,
        window_right=None if causal else draw(st.sampled_from([None, 0, 3])),
        seed=draw(st.integers(0, 2**16)),
        **fields,
    )


@st.composite
def specs_on_warpgroups(draw: st.DrawFn, form: Spec) -> Spec:
    """As those of the other kernels, some past two tiles more: stages take turns."""
    spec = draw(specs(form))
    more = draw(st.lists(st.sampled_from([0, 0, 128, 256]), min_size=len(spec.seq_lens), max_size=len(spec.seq_lens)))
    return spec.replace(seq_lens=tuple(n + m for n, m in zip(spec.seq_lens, more, strict=True)))


def prefill(
    problem: Problem, open_device: Any = emulator, *, device: Any = None, capability: tuple[int, int] = CAPABILITY
) -> tuple[np.ndarray, np.ndarray]:
    """(out, lse) of a problem, and that nothing beside the rows of sequences was written."""
    call = checked_call(problem)
    problem.out_buffer[...] = np.nan
    lse = np.full(problem.q.shape[:2], np.nan, np.float32)
    with with_capability(device or open_device(global_race=True), capability) as device:
        planning.prefill_attention(device, call, problem.out, lse)
    rows = problem.num_written
    written = problem.out[:rows].copy()
    problem.out[:rows] = np.nan
    assert np.isnan(problem.out_buffer.astype(np.float32)).all()
    assert np.isnan(lse[rows:]).all()
    return written, lse[:rows]


def keys_of_tile(form: Spec) -> int:
    """Tokens that a thread block takes at once."""
    call = checked_call(build(form.replace(seq_lens=(3,), query_lens=(1,))))
    if suits_tensor_cores(call):
        return TileShape(tensor_config(call, capability=CAPABILITY)).keys
    return CoresShape(planning.cores_config(call, capability=CAPABILITY)).rows


def chunk_of(whole: Problem, start: int, stop: int, device: Any) -> tuple[np.ndarray, np.ndarray]:
    """Rows start to stop of the only sequence of a problem, as its last ones."""
    chunk = build(whole.spec.replace(seq_lens=(stop,), query_lens=(stop - start,)))
    chunk.q = whole.q[start:stop]
    chunk.k_cache, chunk.v_cache, chunk.block_tables = whole.k_cache, whole.v_cache, whole.block_tables
    return prefill(chunk, device=device)


def prefill_in_chunks(
    spec: Spec, stops: list[int], seed: int, open_device: Callable[..., Any]
) -> tuple[np.ndarray, np.ndarray]:
    """The result of a problem's only sequence, whose chunks up to each stop have the same bits."""
    whole = build(spec)
    out, lse = prefill(whole, open_device)
    start = 0
    for stop in stops:
        part = chunk_of(whole, start, stop, open_device(seed=seed, global_race=True))
        assert_same_bits(part, (out[start:stop], lse[start:stop]))
        start = stop
    return out, lse


def rows_read(problem: Problem, first: int, last: int) -> np.ndarray:
    """Which rows of the caches of a sequence hold tokens first..last."""
    rows = np.zeros(problem.k_cache.shape, bool)
    position, size = np.arange(first, last + 1), problem.spec.block_size
    rows[problem.block_tables[0, position // size], position % size] = True
    return rows

"""Compiling ahead: what a call needs is there, and nothing is compiled twice."""

import numpy as np
import pytest

import pagedkv
import pagedkv.compiler.compile as compiling
from pagedkv.cuda import driver
from pagedkv.emulator import EmulatorDevice
from pagedkv.errors import BackendUnavailableError

from ..compiler.conftest import start_again


@pytest.fixture
def compiled(monkeypatch):
    """The kernels that this process has compiled or found on disk, where other tests may have left them.

    The emulator, in the place of a GPU, asks for the same ones.
    """
    monkeypatch.setattr(EmulatorDevice, "lineinfo", False)
    start_again(monkeypatch)
    kernels = []
    load_or_compile = compiling._load_or_compile.make

    def counted(make, *args):
        kernels.append(make.__name__.removeprefix("make_"))
        return load_or_compile(make, *args)

    monkeypatch.setattr(compiling._load_or_compile, "make", counted)
    return kernels


@pytest.fixture
def without_compilers(directory, monkeypatch):
    """For names alone: the kernels have no code."""
    monkeypatch.setattr(compiling, "_make_ptx", lambda *args: ("", 128))
    monkeypatch.setattr(compiling, "load_or_link", lambda *args: "machine code")


def test_calls_find_what_they_need(compiled):
    names = pagedkv.warmup(4, 2, 64, 16, "float16", layout="vllm", capabilities=[(9, 0)])
    assert sorted(compiled) == sorted(name.split("[")[0] for name in names)
    assert {"v1", "v2", "v2_reduce", "write_kv"} <= set(compiled)
    assert all(name.endswith("] for 9.0") for name in names)
    del compiled[:]

    k_cache, v_cache = np.zeros((3, 2, 8, 16, 8), np.float16), np.zeros((3, 2, 64, 16), np.float16)
    token = np.ones((1, 2, 64), np.float16)
    pagedkv.write_kv(token, token, k_cache, v_cache, np.array([17]), layout="vllm", backend="emulator")
    pagedkv.copy_blocks(k_cache, v_cache, np.array([[1, 2]]), backend="emulator")
    q, tables, lengths = np.zeros((1, 4, 64), np.float16), np.array([[2]], np.int32), np.array([2], np.int32)
    for kernel in ("v1", "v2"):
        out = pagedkv.decode_attention(
            q, k_cache, v_cache, tables, lengths, layout="vllm", kernel=kernel, backend="emulator"
        )
        assert (out == 0.5).all()
    table = np.array([2], np.int32)
    pagedkv.gather_kv(k_cache, v_cache, table, 2, layout="vllm", backend="emulator")
    assert compiled == []


def test_calls_of_nhd_find_what_they_need_with_and_without_softcap(compiled):
    names = pagedkv.warmup(4, 2, 64, 16, "float32", capabilities=[(9, 0)])
    assert [name.split("[")[0] for name in names] == ["split", "split", "write_kv", "gather_kv", "copy_blocks"]
    del compiled[:]
    cache, q = np.ones((3, 16, 2, 64), np.float32), np.zeros((1, 4, 64), np.float32)
    tables, lengths = np.array([[2]], np.int32), np.array([2], np.int32)
    for options in ({}, {"softcap": 5.0}, {"alibi_slopes": np.ones(4, np.float32)}, {"window": 1}):
        out = pagedkv.decode_attention(q, cache, cache.copy(), tables, lengths, **options, backend="emulator")
        assert (out == 1).all()
    assert compiled == []


@pytest.mark.usefixtures("without_compilers")
def test_capabilities_and_kernels_are_chosen(compiled):
    names = pagedkv.warmup(4, 2, 64, 16, "float32", layout="vllm", kernels=["v1"], capabilities=[(8, 0), (10, 0)])
    assert [name.split("[")[0] for name in names] == ["v1", "write_kv", "gather_kv", "copy_blocks"] * 2
    assert [name[-3:] for name in names] == ["8.0"] * 4 + ["0.0"] * 4
    assert len(compiled) == 8


def test_calls_with_options_find_what_they_need(directory, compiled):
    names = pagedkv.warmup(
        *(2, 2, 16, 16, "float16"),
        **{"layout": "vllm", "kv_dtype": "fp8_e5m2", "kernels": ["v1"], "capabilities": [(np.int64(9), 0)]},
        **{"token_dtype": "float32", "per_head_scales": True, "num_states": 3},
        **{"rotary_dim": 8, "interleaved": True, "prefill": True, "check": True},
    )
    assert [name.split("[")[0] for name in names[:3]] == ["check_batch", "v1", "prefill_on_cuda_cores"]
    assert any(name.startswith("merge_states[") and "num_states=3" in name for name in names)
    assert len(list(directory.glob("*.ptx"))) == len(list(directory.glob("*.cubin"))) == len(names)
    del compiled[:]
    cache, scales = {"layout": "vllm", "kv_dtype": "fp8_e5m2", "backend": "emulator"}, np.ones(2, np.float32)
    scales = {"k_scale": scales, "v_scale": scales}
    k_cache, v_cache = np.zeros((3, 2, 1, 16, 16), np.uint8), np.zeros((3, 2, 16, 16), np.uint8)
    token, tables = np.ones((1, 2, 16), np.float32), np.ones((2, 5, 4), np.float32)
    rotation = {"cos": tables[0], "sin": tables[1], "positions": np.array([4]), "interleaved": True}
    for options in ({}, rotation):
        pagedkv.write_kv(token, token, k_cache, v_cache, np.array([17]), check=True, **options, **scales, **cache)
    pagedkv.gather_kv(k_cache, v_cache, np.array([1], np.int32), 2, **scales, **cache)
    out = np.zeros((1, 2, 16), np.float16)
    pagedkv.merge_states([out] * 3, [np.zeros((1, 2), np.float32)] * 3, backend="emulator")
    pagedkv.apply_rotary(out, out, *tables, np.array([4]), interleaved=True, check=True, backend="emulator")
    v_cache[0] = 0x3C  # 1
    q, table, lengths = np.ones((2, 2, 16), np.float16), np.zeros((1, 1), np.int32), np.array([2], np.int32)
    arguments = q, k_cache, v_cache, table, lengths, np.array([0, 2], np.int32)
    for softcap in (None, 3.0):
        out = pagedkv.prefill_attention(*arguments, softcap=softcap, check=True, **scales, **cache)
        assert (out == 1).all()
    assert compiled == []


@pytest.mark.usefixtures("without_compilers")
@pytest.mark.parametrize("kv_dtype", ["fp8_e4m3", "int8"])
def test_the_default_is_the_gpus_of_the_machine(monkeypatch, kv_dtype):
    monkeypatch.setattr(driver, "capabilities", lambda: [(9, 0), (9, 0)])
    names = pagedkv.warmup(1, 1, 64, 16, "float16", layout="vllm", kernels=["v1"], kv_dtype=kv_dtype)
    assert len(names) == 4  # one copies blocks of K, V and scales
    assert f"kv_kind={kv_dtype}" in names[0]


@pytest.mark.parametrize(
    ("changed", "error", "message"),
    [
        ({"num_kv_heads": 3}, ValueError, "num_heads"),
        ({"head_dim": 9}, ValueError, "head_dim"),
        ({"block_size": 3}, ValueError, "block_size"),
        ({"dtype": "float64"}, TypeError, "dtype must be float32, float16 or bfloat16"),
        ({"kv_dtype": "fp8"}, ValueError, "kv_dtype"),
        ({"layout": "other"}, ValueError, "layout"),
        ({"kernels": ["v3"]}, ValueError, "kernel"),
        ({"score_mod": 3}, TypeError, "score_mod"),
        ({"check": 3}, TypeError, "check"),
        ({"kernels": "v1"}, TypeError, r'kernels must be a sequence of names, such as \["v1"\]'),
        ({"token_dtype": "int8"}, TypeError, "dtype"),
        ({"token_dtype": "bfloat16"}, TypeError, "k must have dtype float16"),
        ({"per_head_scales": 1}, TypeError, "per_head_scales"),
        ({"per_head_scales": True}, ValueError, "k_scale needs an fp8 cache"),
        ({"prefill": 1}, TypeError, "prefill must be True or False"),
        ({"num_states": 0}, ValueError, "num_states must be at least 1"),
        ({"num_states": 2.0}, TypeError, "num_states must be an int"),
        ({"rotary_dim": 7}, ValueError, "rotary_dim must be even, from 2 to head_dim = 64, got 7"),
        ({"rotary_dim": 66}, ValueError, "rotary_dim must be even, from 2 to head_dim = 64, got 66"),
        ({"rotary_dim": 64.0}, TypeError, "rotary_dim must be an int, got float"),
        ({"rotary_dim": 64, "interleaved": 1}, TypeError, "interleaved must be True or False, got 1"),
        ({"capabilities": ["9.0"]}, TypeError, r"such as \[\(9, 0\)\], got \['9.0'\]"),
        ({"capabilities": (9, 0)}, TypeError, r"such as \[\(9, 0\)\], got \(9, 0\)"),
        ({"capabilities": "9.0"}, TypeError, r"such as \[\(9, 0\)\], got '9.0'"),
        ({"capabilities": []}, TypeError, r"such as \[\(9, 0\)\], got \[\]"),
        ({"capabilities": 9}, TypeError, r"such as \[\(9, 0\)\], got 9"),
        ({"capabilities": [(9, 0.0)]}, TypeError, "capabilities must be an int, got float"),
        (
            {"capabilities": [(9, 0), (7, 0)]},
            ValueError,
            r"\(8, 0\) \(Ampere\) or newer, which kernels need, got \(7, 0\)",
        ),
        ({"capabilities": [(9, -1)]}, ValueError, r"capabilities must be \(8, 0\)"),
    ],
)
def test_wrong_arguments_are_those_of_the_calls(compiled, changed, error, message):
    given = {"num_heads": 4, "num_kv_heads": 2, "head_dim": 64, "block_size": 16, "dtype": "float16"}
    with pytest.raises(error, match=message):
        pagedkv.warmup(**{**given, "layout": "vllm", "capabilities": [(9, 0)], **changed})
    assert compiled == []


def test_without_a_gpu_the_capabilities_must_be_given(monkeypatch):
    def missing():
        raise BackendUnavailableError("no CUDA driver")

    monkeypatch.setattr(driver, "bindings", missing)
    monkeypatch.setattr(driver, "_gpus", {})
    with pytest.raises(BackendUnavailableError, match=r"^give capabilities, .* elsewhere: here no CUDA driver$"):
        pagedkv.warmup(4, 2, 64, 16, "float16", layout="vllm")

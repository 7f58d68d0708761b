"""warmup: compiling kernels before the first call."""

import pytest

import pagedkv


def test_warmup_compiles_for_a_missing_gpu():
    names = pagedkv.warmup(4, 2, 64, 16, "float16", layout="vllm", kernels=("v1",), capabilities=[(9, 0)])
    assert any(name.startswith("v1[") and name.endswith("for 9.0") for name in names)
    with pytest.raises(ValueError, match="head_dim must be a multiple of 8"):
        pagedkv.warmup(4, 2, 12, 16, "float16", layout="vllm", capabilities=[(9, 0)])

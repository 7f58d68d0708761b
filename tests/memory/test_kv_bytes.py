"""Bytes of K and V: those that a cache allocates."""

import pytest

from pagedkv import PagedKVCache, kv_bytes

SHAPE = {"num_layers": 3, "num_kv_heads": 2, "head_dim": 16}


@pytest.mark.parametrize("layout", ["NHD", "vllm"])
@pytest.mark.parametrize(
    ("dtype", "kv_dtype"),
    [("float32", None), ("bfloat16", None), ("float16", "fp8_e4m3"), ("float32", "fp8_e5m2"), ("float32", "int8")],
)
def test_a_cache_takes_as_many(dtype, kv_dtype, layout):
    cache = PagedKVCache(**SHAPE, num_blocks=5, block_size=8, dtype=dtype, layout=layout, kv_dtype=kv_dtype)
    allocated = sum(array.nbytes for array in (*cache.k_caches, *cache.v_caches, *cache.k_scales, *cache.v_scales))
    assert kv_bytes(40, **SHAPE, dtype=dtype, kv_dtype=kv_dtype) == allocated
    assert kv_bytes(33, **SHAPE, dtype=dtype, kv_dtype=kv_dtype, block_size=8) == allocated
    assert kv_bytes(0, **SHAPE, block_size=8) == 0


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"num_tokens": -1}, ValueError, "num_tokens must be at least 0, got -1"),
        ({"num_tokens": True}, TypeError, "num_tokens must be an int, got bool"),
        ({"num_layers": 0}, ValueError, "num_layers must be at least 1, got 0"),
        ({"num_kv_heads": 1.0}, TypeError, "num_kv_heads must be an int, got float"),
        ({"head_dim": 12}, ValueError, "head_dim must be a multiple of 8 from 8 to 512, got 12"),
        ({"block_size": 0}, ValueError, "block_size must be at least 1, got 0"),
        ({"dtype": "int8"}, TypeError, "dtype must be .*, got 'int8': for a cache in 8 bits pass .*"),
        ({"kv_dtype": "fp4"}, ValueError, "kv_dtype must be None, .*, got 'fp4'"),
    ],
)
def test_refusals(arguments, error, message):
    with pytest.raises(error, match=f"^{message}$"):
        kv_bytes(**{"num_tokens": 1} | SHAPE | arguments)

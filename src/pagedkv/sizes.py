"""kv_bytes: what the K and V of a model take."""

from __future__ import annotations

from typing import Any

from .layouts import require_head_dim, storage_dtype
from .memory.checks import as_int
from .typing import KvDtype


def kv_bytes(
    num_tokens: int,
    num_layers: int,
    num_kv_heads: int,
    head_dim: int,
    dtype: Any = "float32",
    *,
    kv_dtype: KvDtype | None = None,
    block_size: int = 1,
) -> int:
    """Bytes that the K and V of a sequence take in all layers: 2 * num_layers * Hkv * D * itemsize for each slot.

    That is what `PagedKVCache` allocates for as many slots; scales of an fp8 cache are a few numbers more.

    Parameters
    ----------
    num_tokens : int
        At least 0.
    num_layers, num_kv_heads, head_dim : int
        Of the model; at least 1, and D a multiple of 8 from 8 to 512.
    dtype : dtype-like
        float32, float16 or bfloat16.
    kv_dtype : str or None
        "fp8_e4m3" or "fp8_e5m2" for a cache in 8 bits.
    block_size : int
        P: the tokens are rounded up to whole blocks.

    Returns
    -------
    int

    Raises
    ------
    TypeError, ValueError
        An argument is not as described.

    Examples
    --------
    Llama 3.1 8B, a sequence of 1,000 tokens in blocks of 16:

    >>> llama = {"num_layers": 32, "num_kv_heads": 8, "head_dim": 128, "dtype": "bfloat16"}
    >>> kv_bytes(1000, **llama, block_size=16) / 2**20
    126.0
    """
    num_tokens = as_int("num_tokens", num_tokens)
    num_layers = as_int("num_layers", num_layers, minimum=1)
    num_kv_heads = as_int("num_kv_heads", num_kv_heads, minimum=1)
    block_size = as_int("block_size", block_size, minimum=1)
    require_head_dim(as_int("head_dim", head_dim))
    itemsize = storage_dtype(dtype, kv_dtype).itemsize
    return 2 * num_layers * num_kv_heads * int(head_dim) * itemsize * block_size * -(-num_tokens // block_size)

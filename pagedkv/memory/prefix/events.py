"""Events about which blocks can be found, for routers that look for prefixes in many caches.

The fields are those of vLLM's KV events [1]_.

References
----------
.. [1] https://docs.vllm.ai/en/latest/api/vllm/distributed/kv_events/
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class BlockStored:
    """Successive blocks of a sequence can be found from now on, or the state behind one of them.

    Attributes
    ----------
    block_hashes : list of bytes
        Their digests.
    parent_block_hash : bytes or None
        The digest of the block before them, None if there is none.
    token_ids : list of int
        The tokens of all these blocks in order.
    block_size : int
        P, tokens per block.
    lora_id, lora_name : None
        Always None: sequences of different adapters have different salts.
    medium : str
        Where the caches are: "GPU" or "CPU".
    extra_keys : list of (tuple or None), or None
        What a block's digest depends on besides tokens, for each of these blocks: the salt for the first block of a
        sequence. None if they have no salt, or a parent, which has it.
    group_idx : int or None
        The group of layers whose blocks these are, or the number of these groups for a snapshot of a state; None if the
        cache has one group and no states.
    kv_cache_spec_kind : str or None
        "full_attention" or "sliding_window", "mamba" for a snapshot; None where `group_idx` is.
    kv_cache_spec_sliding_window : int or None
        The window of the group, in tokens.
    """

    block_hashes: list[bytes]
    parent_block_hash: bytes | None
    token_ids: list[int]
    block_size: int
    lora_id: None = None
    medium: str | None = None
    lora_name: None = None
    extra_keys: list[tuple[str | bytes, ...] | None] | None = None
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None
    kv_cache_spec_sliding_window: int | None = None


@dataclass(frozen=True, slots=True)
class BlockRemoved:
    """Blocks can no longer be found, or the states behind them.

    Attributes
    ----------
    block_hashes : list of bytes
        Their digests.
    medium : str
        Where the caches are: "GPU" or "CPU".
    group_idx : int or None
        As in `BlockStored`.
    """

    block_hashes: list[bytes]
    medium: str | None = None
    group_idx: int | None = None


@dataclass(frozen=True, slots=True)
class AllBlocksCleared:
    """No block can be found any longer, after `PagedKVCache.reset`."""


Event = BlockStored | BlockRemoved | AllBlocksCleared
Listener = Callable[[Event], object]

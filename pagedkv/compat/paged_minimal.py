"""The CacheManager of a walkthrough that many read, tspeterkim/paged-attention-minimal, over a `PagedKVCache`.

Its script has a forward pass and a loop of its own, and calls ``flash_attn_with_kvcache`` on the caches.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from ..cache import PagedKVCache
from ..errors import OutOfBlocksError
from ..memory.arguments import as_int
from .arguments import in_words, require_tensors
from .names import missing_names


class CacheManager:
    """Blocks for a batch of prompts, and for the tokens that a model adds to them.

    Parameters
    ----------
    tokens : (batch_size, max_seq_len) tensor of ints
        The prompts, and -1 behind them, on the device where the caches are to be.
    block_size : int
        Tokens in a block.
    batch_size : int, optional
        The rows of `tokens`.
    n_kv_heads, head_dim : int
        Hkv and D.
    n_layers : int
        Layers that this manager hands out blocks for; 1 for a manager of each layer, as in the walkthrough.
    num_blocks : int, optional
        Blocks in the pool; as in the walkthrough, enough for five sequences of max_seq_len if None.
    dtype : torch.dtype
        Of keys and values: float32, float16 or bfloat16.

    Attributes
    ----------
    cache : PagedKVCache
        The caches of all layers, and the sequences in them.
    seqs : list of int
        The handles of the sequences, in the order of `tokens`.

    Raises
    ------
    OutOfBlocksError
        The prompts do not fit into the pool.
    TypeError, ValueError
        An argument is not as described here.

    Examples
    --------
    >>> tokens = torch.full((2, 32), -1)
    >>> tokens[0, :5], tokens[1, :3] = 7, 8
    >>> manager = CacheManager(tokens, block_size=4, n_kv_heads=1, head_dim=8, dtype=torch.float32)
    >>> manager.get_block_table()
    tensor([[ 0,  1],
            [ 2, -1]], dtype=torch.int32)
    >>> manager.update([False, False], [True, False])  # of the first one, the next token is still the prompt's
    >>> manager.get_last_pos()
    tensor([4, 3], dtype=torch.int32)
    """

    @in_words({"num_kv_heads": "n_kv_heads", "num_layers": "n_layers"})
    def __init__(
        self,
        tokens: Any,
        block_size: int = 256,
        batch_size: int | None = None,
        *,
        n_kv_heads: int,
        head_dim: int,
        n_layers: int = 1,
        num_blocks: int | None = None,
        dtype: Any = torch.bfloat16,
    ) -> None:
        require_tensors(tokens=tokens)
        if tokens.ndim != 2:
            raise ValueError(f"tokens must have shape (batch_size, max_seq_len), got {tuple(tokens.shape)}")
        num_seqs, max_seq_len = tokens.shape
        if batch_size is not None and as_int("batch_size", batch_size) != num_seqs:
            raise ValueError(f"batch_size must be the {num_seqs} rows of tokens, or left out, got {batch_size}")
        if num_blocks is None:
            num_blocks = 5 * -(-max_seq_len // as_int("block_size", block_size, minimum=1))
        self.cache = PagedKVCache(
            n_layers, num_blocks, block_size, n_kv_heads, head_dim, dtype,
            max_seqs=max(1, num_seqs), array_module=torch, device=tokens.device, prefix_cache=False,
        )  # fmt: skip
        self.seqs = [self.cache.add(length).seq for length in (tokens != -1).sum(1).tolist()]

    def get_free_block(self) -> int:
        """Take a block out of the pool; it is the caller's until ``cache.pool.release([block])``.

        Raises
        ------
        OutOfBlocksError
            No block is free.
        """
        return int(self.cache.pool.allocate(1)[0])

    def get_block_table(self) -> Any:
        """The blocks of each sequence, -1 behind them, (batch_size, max_blocks) int32."""
        return self.cache.asarray(self.cache.block_tables(self.seqs))

    def get_kv_cache(self, layer: int = 0) -> tuple[Any, Any]:
        """K and V of a layer, each (num_blocks, block_size, n_kv_heads, head_dim)."""
        layer = as_int("layer", layer, maximum=len(self.cache.k_caches) - 1)
        return self.cache.k_caches[layer], self.cache.v_caches[layer]

    def get_last_pos(self) -> Any:
        """The position of the last token of each sequence, (batch_size,) int32."""
        return self.cache.asarray(self.cache.seq_lens(self.seqs) - 1)

    def free_memory(self, index: int) -> None:
        """Release all blocks of sequence `index` but the first, which its rows of the batch go on writing to."""
        seq = self.seqs[index]
        self.cache.truncate(seq, min(int(self.cache.seq_lens(seq)[0]), self.cache.block_size))

    def update(self, eos_reached: Iterable[bool], input_text_mask: Iterable[bool]) -> None:
        """Make room for the token that each sequence has just got.

        Parameters
        ----------
        eos_reached : (batch_size,) bools
            Sequences that ended before: `free_memory` is called for them.
        input_text_mask : (batch_size,) bools
            Sequences whose token is one of the prompt, which has its room since the beginning.

        Raises
        ------
        OutOfBlocksError
            Too few blocks are free; nothing has changed.
        ValueError
            Not batch_size bools.
        """
        cache, size = self.cache, self.cache.block_size
        ended_before, are_prompts = list(eos_reached), list(input_text_mask)
        if not len(ended_before) == len(are_prompts) == len(self.seqs):
            raise ValueError(
                f"eos_reached and input_text_mask must have batch_size = {len(self.seqs)} bools each, "
                f"got {len(ended_before)} and {len(are_prompts)}"
            )
        steps = list(zip(self.seqs, ended_before, are_prompts, strict=True))
        ended = [seq for seq, eos, is_prompt in steps if eos and not is_prompt]
        growing = [seq for seq, eos, is_prompt in steps if not eos and not is_prompt]
        lens = cache.seq_lens(ended)
        needed = int(np.count_nonzero(cache.seq_lens(growing) % size == 0))
        free = cache.num_free + int(np.maximum(-(-lens // size) - 1, 0).sum())
        if needed > free:
            message = f"{needed} blocks are needed, {free} of {cache.pool.num_blocks} are free: raise num_blocks"
            raise OutOfBlocksError(message, requested=needed, free=free)
        cache.truncate(ended, np.minimum(lens, size))
        cache.append(growing)

    def get_fragmented_memory_size(self) -> int:
        """Bytes of K and V, in all layers, of slots in the last block of a sequence that hold no token."""
        cache = self.cache
        unused = int((-cache.seq_lens(self.seqs) % cache.block_size).sum())
        return unused * sum(x[0, 0].nbytes for x in (*cache.k_caches, *cache.v_caches))


if not TYPE_CHECKING:
    __getattr__ = missing_names(__name__, "the forward pass and the loop are the script's own")

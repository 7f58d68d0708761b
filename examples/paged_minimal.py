"""The script of a walkthrough of paged attention, tspeterkim/paged-attention-minimal, end to end on a CPU.

    python examples/paged_minimal.py "def main(" "class Queue:"

Its forward pass calls FlashAttention on blocks that its CacheManager hands out. Here both are pagedkv's, under the same
names; docs/explanation/cache_manager.md walks through it.
"""

import sys
from itertools import takewhile

import numpy as np

import pagedkv

try:
    from pagedkv.compat.flash_attn import flash_attn_with_kvcache
    from pagedkv.compat.paged_minimal import CacheManager
except ModuleNotFoundError as error:
    raise SystemExit(str(error)) from None

import torch

from tokenizer import END
from transformer import load

PROMPTS = ["import os\n\n\ndef read_file(path", "class Parser:\n    def __init__(self"]
MAX_NEW_TOKENS = 60


class Batch:
    """Prompts that go on together, one position at a time, of which the longer ones are read meanwhile."""

    def __init__(self, prompts: list[str], block_size: int = 16) -> None:
        self.model, self.tokenizer = load()
        prompt_tokens = [self.tokenizer.encode("\n\n\n" + prompt) for prompt in prompts]
        longest = max(map(len, prompt_tokens))
        if longest >= self.model.context:
            sys.exit(f"a prompt has {longest} tokens, the model takes fewer than {self.model.context}: shorten it")
        max_seq_len = min(self.model.context, longest + MAX_NEW_TOKENS)
        self.tokens = torch.full((len(prompts), max_seq_len), -1)
        for row, tokens in zip(self.tokens, prompt_tokens, strict=True):
            row[: len(tokens)] = torch.tensor(tokens)
        self.input_text_mask = self.tokens != -1
        self.eos_reached = torch.zeros(len(prompts), dtype=torch.bool)
        sizes = {"n_kv_heads": self.model.num_kv_heads, "head_dim": self.model.head_dim}
        self.cm = CacheManager(self.tokens, block_size, **sizes, n_layers=self.model.num_layers, dtype=torch.float32)

    def forward(self, tokens: torch.Tensor, start_pos: int) -> torch.Tensor:
        """The most probable token behind each row."""
        bsz, T = tokens.shape
        positions = np.tile(np.arange(start_pos, start_pos + T), bsz)
        cache_seqlens = torch.where(self.eos_reached, self.cm.get_last_pos(), start_pos).int()
        where = {"cache_seqlens": cache_seqlens, "block_table": self.cm.get_block_table()}

        def attend(layer: int, q: np.ndarray, k: np.ndarray, v: np.ndarray) -> np.ndarray:
            q, k = pagedkv.apply_rotary(q, k, self.model.cos, self.model.sin, positions)
            new_q, new_k, new_v = (torch.from_numpy(x).unflatten(0, (bsz, T)) for x in (q, k, v))
            k_cache, v_cache = self.cm.get_kv_cache(layer)
            y = flash_attn_with_kvcache(new_q, k_cache, v_cache, new_k, new_v, **where, causal=True)
            return y.flatten(0, 1).numpy()

        logits = self.model.forward(tokens.flatten().numpy(), attend, rows=range(T - 1, bsz * T, T))
        return torch.from_numpy(logits.argmax(axis=-1))

    def run(self) -> None:
        prev_pos = 0
        for cur_pos in range(int(self.input_text_mask.sum(1).min()), self.tokens.shape[1]):
            next_token = self.forward(self.tokens[:, prev_pos:cur_pos], prev_pos)
            is_prompt = self.input_text_mask[:, cur_pos]
            self.tokens[:, cur_pos] = torch.where(is_prompt, self.tokens[:, cur_pos], next_token)
            self.cm.update(self.eos_reached.tolist(), is_prompt.tolist())
            self.eos_reached |= ~is_prompt & (next_token == END)
            prev_pos = cur_pos
            if self.eos_reached.all():
                break


def main() -> None:
    batch = Batch(sys.argv[1:] or PROMPTS)
    batch.run()
    for row in batch.tokens.tolist():
        text = batch.tokenizer.decode(takewhile(lambda token: token not in (END, -1), row))
        print(text.strip(b"\n").decode(errors="replace"), "-" * 50, sep="\n")
    caches = batch.cm.cache.k_caches + batch.cm.cache.v_caches
    unused = batch.cm.get_fragmented_memory_size()
    print(f"Fragmented Memory: {unused / 1e3:.1f} kB ({unused / sum(x.nbytes for x in caches):.2%})")


if __name__ == "__main__":
    main()

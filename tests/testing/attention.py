"""Right and wrong attention functions of users, in NumPy and torch."""

import numpy as np
import torch


def numpy_decode(q, k_cache, v_cache, block_tables, seq_lens):
    """One sequence after another."""
    out = np.zeros_like(q)
    block_size, group = k_cache.shape[1], q.shape[1] // k_cache.shape[2]
    for i, length in enumerate(seq_lens):
        if length == 0:
            continue
        t = np.arange(length)
        block, offset = block_tables[i, t // block_size], t % block_size
        k, v = np.repeat(k_cache[block, offset], group, 1), np.repeat(v_cache[block, offset], group, 1)
        logits = np.einsum("hd,thd->ht", q[i], k) / np.sqrt(q.shape[2])
        weights = np.exp(logits - logits.max(axis=1, keepdims=True))
        out[i] = np.einsum("ht,thd->hd", weights / weights.sum(axis=1, keepdims=True), v)
    return out


def torch_prefill(q, k_cache, v_cache, block_tables, seq_lens, query_starts, *, causal=True, return_lse=False):
    out, lse = torch.zeros_like(q), torch.full(q.shape[:2], -torch.inf)
    block_size, group = k_cache.shape[1], q.shape[1] // k_cache.shape[2]
    for i, length in enumerate(seq_lens.tolist()):
        rows = slice(int(query_starts[i]), int(query_starts[i + 1]))
        t = torch.arange(length)
        block, offset = block_tables[i, t // block_size].long(), t % block_size
        k, v = (x[block, offset].repeat_interleave(group, 1).float() for x in (k_cache, v_cache))
        logits = torch.einsum("qhd,thd->hqt", q[rows].float(), k) / q.shape[2] ** 0.5
        if causal:
            positions = torch.arange(length - (rows.stop - rows.start), length)
            logits = logits.masked_fill(t[None, :] > positions[:, None], -torch.inf)
        lse[rows] = logits.logsumexp(-1).T
        out[rows] = torch.einsum("hqt,thd->qhd", logits.softmax(-1), v).to(q.dtype)
    return (out, lse) if return_lse else out

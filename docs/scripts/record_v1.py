"""The thread block of v1 that explanation/step_by_step.md plays: ``python docs/scripts/record_v1.py`` writes it.

v1 runs in the emulator, and this looks over its shoulder: what lanes load, what they hand each other in shuffles, and
what is in shared memory at each barrier. Queries, keys and values are multiples of 1/4, so that readers can check the
sums. The tests compare the file with what this records: a kernel that changes changes its page.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
from record_pool import DATA, Step, listed, script

import pagedkv
from pagedkv import reference
from pagedkv.emulator.machine.access import Access
from pagedkv.emulator.machine.barriers import Barriers
from pagedkv.emulator.machine.warp import WarpOps
from pagedkv.kernels.paged.config import NUM_THREADS, NUM_WARPS, WARP_SIZE, AttentionConfig

KERNELS = Path(pagedkv.__file__).parent / "kernels" / "paged"
CONFIG = AttentionConfig(head_dim=64, block_size=16, q_kind="float16", kv_kind="float16")
NUM_HEADS, NUM_KV_HEADS, NUM_BLOCKS, SEQ_LENS = 4, 2, 10, (21, 68)
SEQ_IDX, HEAD_IDX = 1, 3
THREAD_BLOCK = SEQ_IDX * NUM_HEADS + HEAD_IDX
KV_HEAD_IDX = HEAD_IDX // (NUM_HEADS // NUM_KV_HEADS)
X = CONFIG.vec_size


class Problem:
    """The arrays of the call."""

    def __init__(self) -> None:
        rng = np.random.default_rng(5)
        size, dims = CONFIG.block_size, CONFIG.head_dim
        self.q = quarters(rng, (len(SEQ_LENS), NUM_HEADS, dims), 12)
        self.k = quarters(rng, (SEQ_LENS[SEQ_IDX], NUM_KV_HEADS, dims), 3)
        self.v = quarters(rng, (SEQ_LENS[SEQ_IDX], NUM_KV_HEADS, dims), 8)
        self.k_cache = np.full((NUM_BLOCKS, NUM_KV_HEADS, dims // X, size, X), np.nan, np.float16)
        self.v_cache = np.full((NUM_BLOCKS, NUM_KV_HEADS, dims, size), np.nan, np.float16)
        ids = rng.permutation(NUM_BLOCKS).astype(np.int32)
        self.block_tables = np.stack([ids[:5], ids[5:]])
        for seq, length in enumerate(SEQ_LENS):
            slots = np.arange(length)
            slots = self.block_tables[seq, slots // size].astype(np.int64) * size + slots % size
            pagedkv.write_kv(self.k[:length], self.v[:length], self.k_cache, self.v_cache, slots, layout="vllm")
        self.seq_lens = np.array(SEQ_LENS, np.int32)

    @property
    def arguments(self) -> tuple[np.ndarray, ...]:
        return self.q, self.k_cache, self.v_cache, self.block_tables, self.seq_lens


def quarters(rng: np.random.Generator, shape: tuple[int, ...], most: int) -> np.ndarray:
    """Multiples of 1/4 up to most / 4, which float16 and all sums of a few hundred products have exactly."""
    return (rng.integers(-most, most + 1, shape) / 4).astype(np.float16)


class Watch:
    """What the warps of one thread block did, in its order.

    Attributes
    ----------
    shuffles : list of (xor mask, which threads took part, float32 before)
        (128,) each.
    barriers : list of (bytes,) uint8
        Shared memory when the thread block passes each barrier.
    loads : dict of str to list of (which threads, byte offsets in the array)
        Of 16 bytes, in the caches.
    """

    def __init__(self) -> None:
        self.shuffles: list[tuple[int, np.ndarray, np.ndarray]] = []
        self.barriers: list[np.ndarray] = []
        self.loads: dict[str, list[tuple[np.ndarray, np.ndarray]]] = {"k_cache": [], "v_cache": []}
        self.layout: Any = None

    @contextmanager
    def looking(self) -> Iterator[None]:
        """Look on while kernels run."""
        own = slice(THREAD_BLOCK * NUM_THREADS, (THREAD_BLOCK + 1) * NUM_THREADS)
        everyone = np.ones(NUM_THREADS, bool)
        shfl, whole, reach, offsets = WarpOps.shfl, Barriers.whole, Barriers._open, Access.global_offsets

        def see_shuffle(
            ops: WarpOps, ins: Any, fixed: bool, mode: str, a: Any, b: Any, c: Any, mask: Any, m: Any
        ) -> Any:
            active = everyone if m is None else m[own].copy()
            if active.any():
                self.shuffles.append((int(b[own][0]), active, a[own].view(np.float32).copy()))
            return shfl(ops, ins, fixed, mode, a, b, c, mask, m)

        def snapshot(barriers: Barriers) -> None:
            frame = barriers.frame
            base, self.layout = int(frame.shared_base[own.start]), frame.layout
            self.barriers.append(frame.shared.data[base : base + frame.shared_limit].copy())

        def see_whole(barriers: Barriers, barrier: Any) -> None:
            snapshot(barriers)
            whole(barriers, barrier)

        def see_open(barriers: Barriers, cta: int, *rest: Any) -> None:
            if cta == THREAD_BLOCK:
                snapshot(barriers)
            reach(barriers, cta, *rest)

        def see_load(access: Access, op: Any, address: Any, m: Any, load: bool, store: bool) -> Any:
            where = offsets(access, op, address, m, load, store)
            off, idx = where
            if load and off is not None and op.size == 16:
                lanes = np.arange(len(access.frame.lanes)) if idx is None else idx
                mine = (lanes >= own.start) & (lanes < own.stop)
                if mine.any():
                    first = int(off[mine][0])
                    [buffer] = [b for b in access.memory.buffers if b.offset <= first < b.offset + b.nbytes]
                    if buffer.name in self.loads:
                        self.loads[buffer.name].append((lanes[mine] - own.start, off[mine] - buffer.offset))
            return where

        with (
            mock.patch.object(WarpOps, "shfl", see_shuffle),
            mock.patch.object(Barriers, "whole", see_whole),
            mock.patch.object(Barriers, "_open", see_open),
            mock.patch.object(Access, "global_offsets", see_load),
        ):
            yield


def line_of(file: str, line: str) -> str:
    """A line of a kernel, which has to be there."""
    if line not in (KERNELS / file).read_text(encoding="utf-8"):
        raise ValueError(f"kernels/paged/{file} has no line {line!r}: quote the one that took its place")
    return line


STEPS = (
    Step(
        "The grid",
        "One thread block, one query head",
        line_of("attention.py", "seq_idx = int64(uint32(cuda.blockIdx.x) // uint32(num_heads))"),
        "Query heads need nothing from each other, so each has a thread block of its own, and none waits for another.",
    ),
    Step(
        "The query",
        "q goes to shared memory",
        line_of("keys.py", "store_vec(where, widen(load_16(q + vec_idx * 16)))"),
        "Every thread will need q again for each key, so it is read from global memory once, and a barrier sees to it "
        "that all of it is there before anyone uses it.",
    ),
    Step(
        "Keys",
        "The block table says where the tokens are",
        line_of(
            "attention.py",
            "physical_block_number = int64(block_tables[seq_idx * table_stride + chunk // BLOCK_SIZE])",
        ),
        "The tokens of a sequence may lie in any blocks, so a warp looks up the block before it reads, once for 16 "
        "tokens.",
    ),
    Step(
        "Keys",
        "Warps take turns over the chunks",
        line_of(
            "attention.py",
            "for chunk in range(start_token + warp_idx * CHUNK_SIZE, last_token, NUM_WARPS * CHUNK_SIZE):",
        ),
        "Taking turns gives each of the four warps nearly the same work, however long the sequence is.",
    ),
    Step(
        "Keys",
        "Lanes load vectors of a key",
        line_of("keys.py", "load_16(k + vec_idx * k_vec_stride)"),
        "Two lanes share a token so that a chunk of 16 keeps all 32 busy, and the layout puts what the lanes of a warp "
        "load together side by side: 512 bytes in one go.",
    ),
    Step(
        "Keys",
        "Each lane multiplies its share",
        line_of("keys.py", "qk[0] = add_products(qk[0], k_vec, q_vec)"),
        "The products of 16-bit elements are added up in float32, because a sum of many terms in 16 bits would lose "
        "the small ones.",
    ),
    Step(
        "Keys",
        "The lanes of a token add up",
        line_of("keys.py", "qk = float32(qk + cuda.shfl_xor_sync(ALL_LANES, qk, mask))"),
        "A shuffle lets a lane read a register of its neighbour, which is faster than going through memory, and after "
        "it both lanes have the whole dot product.",
    ),
    Step(
        "Softmax",
        "Logits go to shared memory",
        line_of("attention.py", "logits[token_idx - start_token] = qk"),
        "Softmax needs the logits of all tokens, which are in the registers of four warps, and shared memory is where "
        "all of them can read them; a slot past the end gets minus infinity, whose exponential is 0.",
    ),
    Step(
        "Softmax",
        "The largest logit",
        line_of("attention.py", "qk_max = block_max(red_smem, larger(qk_max, sink))"),
        "With the largest one subtracted no exponential overflows, and the softmax stays what it is.",
    ),
    Step(
        "Softmax",
        "Exponentials, and their sum",
        line_of("softmax.py", "val = exp_minus(logits[i], qk_max)"),
        "It no longer matters who computed a logit, so thread i takes token i, and puts the exponential where the "
        "logit was, so that nothing needs more memory.",
    ),
    Step(
        "Softmax",
        "Weights",
        line_of("softmax.py", "logits[i] = float32(logits[i] * inv_sum)"),
        "One division gives the inverse of the sum, and a multiplication for each token is cheaper than a division for "
        "each.",
    ),
    Step(
        "Values",
        "Lanes load rows of V",
        line_of("values.py", "v_vec = select(load_vec(v + row_idx * v_row_stride), masks)"),
        "A row is one element of the values of a block's 16 tokens, so a lane gets 8 tokens with one load; slots past "
        "the end are cut off by masks and not by weights of 0, because 0 times NaN is NaN.",
    ),
    Step(
        "Values",
        "Each lane weighs its rows",
        line_of("values.py", "accs[i] = add_products(accs[i], v_vec, logits_vec)"),
        "A lane keeps the sums of its four rows in registers over all chunks of its warp, so nothing is written until "
        "the last one.",
    ),
    Step(
        "Values",
        "The lanes of a row add up",
        line_of("values.py", "accs[i] = float32(accs[i] + cuda.shfl_xor_sync(ALL_LANES, accs[i], mask))"),
        "Two lanes had 8 tokens of a row each, so one shuffle makes them one sum.",
    ),
    Step(
        "The output",
        "The warps add up",
        line_of("values.py", "accs[i] = float32(accs[i] + out_smem[row_idx])"),
        "Each warp has seen other tokens, and half of them hand their sums to the other half through shared memory, "
        "twice, always in the same order, so that the result has the same bits every time.",
    ),
    Step(
        "The output",
        "Warp 0 writes the output",
        line_of("attention.py", "write_row(address(out) + row, accs, v_factor, lane)"),
        "Rounding to 16 bits happens once, here, and not on the way.",
    ),
)


# What the page draws at each step (a method of ThreadBlockView), and what the reader chooses.
SHOWS = (
    *(("grid", ""), ("query", ""), ("blocks", ""), ("chunks", "")),
    *(("keyLoads", "chunk lane"), ("shares", "chunk lane"), ("products", "chunk lane")),
    *(("logits", "chunk"), ("maxima", ""), ("exps", "chunk"), ("weights", "chunk")),
    *(
        ("valueLoads", "chunk lane"),
        ("sums", "chunk lane"),
        ("rowSums", "chunk lane"),
        ("warpSums", "lane"),
        ("output", ""),
    ),
)


def facts(run: dict[str, Any]) -> list[str]:
    """What happened at each step of this run."""
    length, chunks, table = run["seq_len"], len(run["block_table"]), run["block_table"]
    unused = chunks * CONFIG.chunk_size - length
    maximum, total = max(run["warp_maxima"]), sum(run["warp_sums"])
    heaviest = int(np.argmax(run["weights"]))
    return [
        f"Of {run['num_thread_blocks']} thread blocks number {THREAD_BLOCK} has sequence {SEQ_IDX}, {length} tokens, "
        f"and query head {HEAD_IDX}, which reads KV head {KV_HEAD_IDX}.",
        f"{len(run['q']) // X} threads load 16 bytes of q each, and store {X} elements as float32.",
        f"The {length} tokens are in blocks {listed(table)}, in this order; the last one has {unused} unused slots.",
        f"Warp 0 takes chunks 0 and {NUM_WARPS}, the others take one each; a chunk is a block of {CONFIG.block_size} "
        "tokens.",
        f"A lane loads {len(run['k_bytes'][0][0])} vectors of 16 bytes, every other one of its token; the lanes of "
        "unused slots load nothing.",
        f"A lane multiplies {len(run['k_bytes'][0][0])} vectors of {X} elements with those of q, and has one sum.",
        "Lanes 2t and 2t + 1 of a warp exchange their sums and add them.",
        f"Each q . k is multiplied by the scale, 1 / sqrt({CONFIG.head_dim}) = 1/8, and stored: {length} logits, and "
        f"{unused} times minus infinity.",
        f"The largest logit of all is {maximum:.4g}: five shuffles find that of a warp, and two more that of all four.",
        f"Every logit x becomes exp(x - {maximum:.4g}); they add up to {total:.4g}.",
        f"Every exponential is multiplied by 1 / {total:.4g}; token {heaviest} has the largest weight, "
        f"{run['weights'][heaviest]:.3g}.",
        f"Lanes 2r and 2r + 1 read row r, and three more that are {CONFIG.num_rows_per_iter} apart; of the last chunk "
        f"only the vector with tokens {length - length % CONFIG.chunk_size} to {length - 1} is read.",
        "Each of a lane's four sums gets 8 products from a chunk.",
        f"Each warp now has {CONFIG.head_dim} sums, over the tokens of its chunks.",
        "Warps 2 and 3 hand theirs to warps 0 and 1, then warp 1 to warp 0.",
        f"{CONFIG.head_dim} elements of out; the dense formula in float64 differs by {run['error']:g} at most.",
    ]


def whole(values: np.ndarray) -> list[Any]:
    """Multiples of 1/4 as integers."""
    scaled = 4 * values.astype(np.float64)
    assert (scaled == scaled.round()).all()
    return scaled.astype(int).tolist()


def short(values: np.ndarray, digits: int = 5) -> list[Any]:
    """Floats with so many digits; null for minus infinity."""
    if values.ndim > 1:
        return [short(row, digits) for row in values]
    return [float(f"{x:.{digits}g}") if np.isfinite(x) else None for x in values.tolist()]


def by_chunk(loads: list[tuple[np.ndarray, np.ndarray]], num_chunks: int) -> list[list[list[int]]]:
    """Byte offsets of the loads of each lane of each chunk, in their order."""
    found: list[list[list[int]]] = [[[] for _ in range(WARP_SIZE)] for _ in range(num_chunks)]
    each = len(loads) // 2  # in both turns
    for number, (threads, offsets) in enumerate(loads):
        for thread, offset in zip(threads.tolist(), offsets.tolist(), strict=True):
            warp, lane = divmod(thread, WARP_SIZE)
            found[number // each * NUM_WARPS + warp][lane].append(offset)
    return found


def record() -> dict[str, Any]:
    """The run: what is the same for all steps by name, and the steps."""
    problem, watch = Problem(), Watch()
    with watch.looking():
        out = pagedkv.decode_attention(*problem.arguments, layout="vllm", kernel="v1", backend="emulator")
    length, row = SEQ_LENS[SEQ_IDX], problem.block_tables[SEQ_IDX]
    num_chunks = -(-length // CONFIG.chunk_size)
    num_slots = num_chunks * CONFIG.chunk_size
    offsets = watch.layout.offsets

    def shared(barrier: int, name: str, count: int, start: int = 0) -> np.ndarray:
        """An array in shared memory, as it is when the thread block passes a barrier."""
        first = offsets[f"shared_{name}"] + 4 * start
        return watch.barriers[barrier][first : first + 4 * count].view(np.float32)

    first_turn, second_turn, *rest = watch.shuffles
    assert [mask for mask, _, _ in watch.shuffles] == [
        1,
        1,
        *[16, 8, 4, 2, 1, 2, 1] * 2,
        *[1] * CONFIG.num_rows_per_thread,
    ]
    partials = np.concatenate([first_turn[2], second_turn[2][:WARP_SIZE]]).reshape(num_chunks, WARP_SIZE)
    products = (partials + partials[:, np.arange(WARP_SIZE) ^ 1])[:, ::2].reshape(-1)
    logits, exps, weights = (shared(barrier, "logits", num_slots) for barrier in (1, 2, 3))
    assert np.array_equal(logits[:length], products[:length] / np.float32(8))
    accs = np.stack([values for _, _, values in rest[-CONFIG.num_rows_per_thread :]], 1)  # (128, rows of a lane)
    in_warps = (accs + accs[np.arange(NUM_THREADS) ^ 1])[::2].reshape(NUM_WARPS, -1, CONFIG.num_rows_per_thread)
    in_warps = in_warps.transpose(0, 2, 1).reshape(NUM_WARPS, -1)  # (4, head_dim)
    handed = shared(5, "logits", 2 * CONFIG.head_dim).reshape(2, -1)
    assert np.array_equal(handed, in_warps[2:])
    halves = in_warps[:2] + handed
    assert np.array_equal(shared(7, "logits", CONFIG.head_dim), halves[1])
    exact = reference.decode_attention(*problem.arguments, layout="vllm")
    run = {
        "thread_block": THREAD_BLOCK,
        "num_thread_blocks": len(SEQ_LENS) * NUM_HEADS,
        "seq_idx": SEQ_IDX,
        "head_idx": HEAD_IDX,
        "kv_head_idx": KV_HEAD_IDX,
        "seq_len": length,
        "chunk_size": CONFIG.chunk_size,
        "vec_size": X,
        "num_warps": NUM_WARPS,
        "group_size": CONFIG.thread_group_size,
        "v_vecs": CONFIG.num_v_vecs_per_row,
        "rows_per_iter": CONFIG.num_rows_per_iter,
        "block_table": row[:num_chunks].tolist(),
        "q": whole(shared(0, "q_vecs", CONFIG.head_dim)),
        "k": whole(problem.k[:, KV_HEAD_IDX]),
        "v": whole(problem.v[:, KV_HEAD_IDX]),
        "k_bytes": by_chunk(watch.loads["k_cache"], num_chunks),
        "v_bytes": by_chunk(watch.loads["v_cache"], num_chunks),
        "partials": short(partials, 9),
        "products": short(products, 9),
        "logits": short(logits),
        "warp_maxima": short(shared(1, "red_smem", NUM_WARPS)),
        "exps": short(exps),
        "warp_sums": short(shared(2, "red_smem", NUM_WARPS, NUM_WARPS)),
        "weights": short(weights),
        "accs": short(accs),
        "in_warps": short(in_warps),
        "halves": short(halves),
        "out": short(out[SEQ_IDX, HEAD_IDX]),
        "error": float(f"{np.abs(out[SEQ_IDX, HEAD_IDX] - exact[SEQ_IDX, HEAD_IDX]).max():.1g}"),
    }
    steps = [
        {**step._asdict(), "what": what, "show": show, "chooses": chooses}
        for step, what, (show, chooses) in zip(STEPS, facts(run), SHOWS, strict=True)
    ]
    return {**run, "steps": steps}


SCRIPTS: dict[str, Callable[[], str]] = {"v1_run.js": lambda: script("V1_RUN", record())}

if __name__ == "__main__":
    for file, write in SCRIPTS.items():
        (DATA / file).write_text(write(), encoding="utf-8")

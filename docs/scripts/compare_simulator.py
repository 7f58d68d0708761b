"""One kernel in the emulator and in numba's simulator: what each sees of planted mistakes, and how long it takes.

    python docs/scripts/compare_simulator.py

prints the tables of explanation/simulators.md. The simulator takes the place of numba.cuda in a whole process, so this
file starts itself once more for it.
"""

import json
import math
import os
import subprocess
import sys
import time

import numpy as np
from numba import cuda, float32

THREADS, BLOCK_SIZE, HEAD_DIM, MOST_TOKENS = 64, 16, 64, 128
IN_SIMULATOR = os.environ.get("NUMBA_ENABLE_CUDASIM") == "1"


def paged_attention(out, q, k_cache, v_cache, block_tables, seq_lens, scale):
    """One thread block for each head of each sequence, as in vLLM's v1; sums go through shared memory."""
    logits = cuda.shared.array(MOST_TOKENS, float32)
    sums = cuda.shared.array(THREADS, float32)
    seq, head, t = cuda.blockIdx.x, cuda.blockIdx.y, cuda.threadIdx.x
    length = seq_lens[seq]
    top = float32(-math.inf)
    for token in range(t, length, THREADS):
        block, offset = block_tables[seq, token // BLOCK_SIZE], token % BLOCK_SIZE
        score = float32(0)
        for d in range(HEAD_DIM):
            score += q[seq, head, d] * k_cache[block, offset, head, d]
        logits[token] = score * scale
        top = max(top, score * scale)
    sums[t] = top
    cuda.syncthreads()  # tops
    for i in range(THREADS):
        top = max(top, sums[i])
    total = float32(0)
    for token in range(length):
        total += math.exp(logits[token] - top)
    value = float32(0)
    for token in range(length):
        block, offset = block_tables[seq, token // BLOCK_SIZE], token % BLOCK_SIZE
        value += math.exp(logits[token] - top) * v_cache[block, offset, head, t]
    out[seq, head, t] = value / total


# What is wrong, the text that it replaces, and the fault that the emulator raises.
PLANTED = {
    "a missing barrier": ("    cuda.syncthreads()  # tops\n", ""),
    "a race of thread blocks": ("out[seq, head, t]", "out[seq, 0, t]"),
    "a barrier that half of the threads reach": (
        "    cuda.syncthreads()  # tops\n",
        "    if t < 32:\n        cuda.syncthreads()\n    cuda.syncthreads()\n",
    ),
    "shared memory that nobody wrote": ("range(length):\n        total", "range(length + 1):\n        total"),
    "past the end of a shared array": ("for i in range(THREADS):", "for i in range(THREADS + 1):"),
    "a block that is not there": ("v_cache[block,", "v_cache[block + 99,"),
}


def problem(num_seqs=8, num_heads=16, length=100):
    rng = np.random.default_rng(0)
    num_blocks = num_seqs * MOST_TOKENS // BLOCK_SIZE
    q = rng.standard_normal((num_seqs, num_heads, HEAD_DIM), np.float32)
    k_cache, v_cache = rng.standard_normal((2, num_blocks, BLOCK_SIZE, num_heads, HEAD_DIM), np.float32)
    tables = rng.permutation(num_blocks).astype(np.int32).reshape(num_seqs, -1)
    return np.full_like(q, np.nan), q, k_cache, v_cache, tables, np.full(num_seqs, length, np.int32), np.float32(0.125)


def expected(args):
    from pagedkv import reference

    _, q, k_cache, v_cache, tables, lens, scale = args
    return reference.decode_attention(q, k_cache, v_cache, tables, lens, scale=scale)


def outcome(kernel):
    """What one run says, and whether its result is right."""
    args = problem(2, 2, 40)
    try:
        launch(kernel, args)
    except Exception as error:
        return type(error).__name__
    return "nothing, right result" if np.abs(args[0] - expected(args)).max() < 1e-5 else "nothing, wrong result"


def launch(kernel, args):
    grid = args[1].shape[:2]
    if IN_SIMULATOR:
        cuda.jit(kernel)[grid, THREADS](*args)
    else:
        from pagedkv import emulator

        emulator.run(kernel, grid, THREADS, *args)


def measure(repeats, call, make=problem):
    """Processor seconds of a call, the least of some, after one that compiles."""
    seconds = []
    for _ in range(repeats + 1):
        args = make()
        start = time.process_time()
        call(*args)
        seconds.append(time.process_time() - start)
    assert np.abs(args[0] - expected(args)).max() < 1e-5
    return min(seconds[1:])


def v1(out, q, k_cache, v_cache, tables, lens, scale):
    """The kernel of this package, which the simulator cannot run: it has no shuffles of lanes."""
    import pagedkv

    k = k_cache.reshape(*k_cache.shape[:3], -1, 4).transpose(0, 2, 3, 1, 4)
    k, v = np.ascontiguousarray(k), np.ascontiguousarray(v_cache.transpose(0, 2, 3, 1))
    named = {"layout": "vllm", "kernel": "v1", "backend": "emulator"}
    pagedkv.decode_attention(q, k, v, tables, lens, scale=float(scale), out=out, **named)


def looked_at(repeats):
    from pagedkv.testing.edits import edited

    found = {name: outcome(edited(paged_attention, *edit)) for name, edit in PLANTED.items()}
    seconds = measure(repeats, lambda *args: launch(paged_attention, args))
    return {"outcomes": found, "seconds": seconds}


def in_simulator(repeats):
    environment = os.environ | {"NUMBA_ENABLE_CUDASIM": "1"}
    command = [sys.executable, __file__, "--json", str(repeats)]
    return json.loads(subprocess.run(command, env=environment, check=True, capture_output=True, text=True).stdout)


if __name__ == "__main__":
    if IN_SIMULATOR:
        print(json.dumps(looked_at(int(sys.argv[2]))))
    else:
        here, there = looked_at(5), in_simulator(2)
        print("| planted | the emulator | numba's simulator |\n|---|---|---|")
        for name, said in here["outcomes"].items():
            print(f"| {name} | {said} | {there['outcomes'][name]} |")
        print("\n| one call, processor seconds | | times as fast |\n|---|---|---|")
        print(f"| this kernel, numba's simulator | {there['seconds']:.2f} | 1 |")
        for name, seconds in (
            ("this kernel, the emulator with all checks", here["seconds"]),
            ("v1 of this package, the emulator", measure(5, v1)),
        ):
            print(f"| {name} | {seconds:.2f} | {there['seconds'] / seconds:.0f} |")

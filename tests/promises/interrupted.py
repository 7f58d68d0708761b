"""Operations under random interrupts: `python -m tests.promises.interrupted NUMBER [SEED]`.

A timer's signal raises KeyboardInterrupt at a random time of a call, until that has happened NUMBER times. What a call
writes must then be as before or as after it, nothing else may be raised, and calls go on giving the same bits.
"""

import faulthandler
import sys
import threading
import time

import ml_dtypes
import numpy as np

import pagedkv

from ..support.alarm import Alarm

SECONDS_OF_A_HANG = 60
MOST_THREADS = 8  # those of calls, and those of pools that are ending


class Operation:
    """A call, the arrays that it writes, and what they hold before and after it."""

    def __init__(self, call, written):
        self.call, self.written = call, written
        self.before = [x.copy() for x in written]
        for _ in range(3):  # the first one may compile
            start = time.perf_counter()
            self.result = call()
            self.seconds = time.perf_counter() - start
        self.after = [x.copy() for x in written]
        self.restore()

    def restore(self):
        for x, before in zip(self.written, self.before, strict=True):
            x[...] = before

    def is_untouched(self):
        return all(map(same, self.written, self.before))

    def is_done(self):
        return all(map(same, self.written, self.after))


def same(x, y):
    return np.array_equal(x.view(np.uint8), y.view(np.uint8))


def attention(rng, seq_lens, query_len=None, dtype=np.float32):
    num_seqs, num_columns = len(seq_lens), -(-max(seq_lens) // 16)
    tables = rng.permutation(num_seqs * num_columns).astype(np.int32).reshape(num_seqs, -1)
    caches = rng.standard_normal((2, tables.size, 16, 2, 64), np.float32).astype(dtype)
    q = rng.standard_normal((num_seqs * (query_len or 1), 8, 64), np.float32).astype(dtype)
    out = np.full_like(q, 7)
    args = (q, *caches, tables, np.array(seq_lens, np.int32))
    if query_len is None:
        return Operation(lambda: pagedkv.decode_attention(*args, out=out), [out])
    starts = np.arange(num_seqs + 1, dtype=np.int32) * query_len
    return Operation(lambda: pagedkv.prefill_attention(*args, starts, out=out), [out])


def write(rng, **options):
    k_cache, v_cache = np.zeros((2, 64, 16, 2, 64), np.uint8 if options else np.float32)
    k, v = rng.standard_normal((2, 800, 2, 64), np.float32)
    slots = rng.permutation(64 * 16)[:800]
    return Operation(lambda: pagedkv.write_kv(k, v, k_cache, v_cache, slots, **options), [k_cache, v_cache])


def blocks(rng, operation):
    layers = list(rng.standard_normal((8, 16, 16, 1, 64), np.float32))
    pairs = np.stack([np.arange(8), 8 + rng.permutation(8)], axis=1)
    return Operation(lambda: operation(layers[:4], layers[4:], pairs), layers)


def gather(rng):
    k_cache, v_cache = rng.standard_normal((2, 16, 16, 2, 64), np.float32)
    table = rng.permutation(16).astype(np.int32)
    return Operation(lambda: pagedkv.gather_kv(k_cache, v_cache, table, 200), [])


def merge(rng):
    outs, lses = rng.standard_normal((2, 16, 8, 64), np.float32), rng.standard_normal((2, 16, 8), np.float32)
    return Operation(lambda: pagedkv.merge_states(outs, lses), [])


def rotate(rng):
    q, k = rng.standard_normal((400, 8, 64), np.float32), rng.standard_normal((400, 2, 64), np.float32)
    angles = rng.standard_normal((400, 32), np.float32)
    args, out = (q, k, np.cos(angles), np.sin(angles), np.arange(400)), (np.full_like(q, 7), np.full_like(k, 7))
    return Operation(lambda: pagedkv.apply_rotary(*args, out=out), list(out))


def operations(rng):
    return [
        attention(rng, (100, 37)),
        attention(rng, (1500, 900)),  # on several threads
        attention(rng, (1500, 900), dtype=ml_dtypes.bfloat16),
        attention(rng, (100, 50), query_len=40),
        write(rng),
        write(rng, kv_dtype="fp8_e4m3", k_scale=0.5),
        blocks(rng, pagedkv.copy_blocks),
        blocks(rng, pagedkv.swap_blocks),
        gather(rng),
        merge(rng),
        rotate(rng),
    ]


def main(number, seed=0):
    faulthandler.enable()
    foreign = []
    sys.unraisablehook = threading.excepthook = foreign.append
    rng = np.random.default_rng(seed)
    pagedkv.set_num_threads(2)
    todo, alarm = operations(rng), Alarm()
    num_interrupts, num_after = 0, 0
    while num_interrupts < number:
        faulthandler.dump_traceback_later(SECONDS_OF_A_HANG, exit=True)
        operation = todo[rng.integers(len(todo))]
        delay = max(1e-6, rng.uniform(0, 1.3) * operation.seconds)
        if rng.random() < 0.05:
            pagedkv.set_num_threads(int(rng.integers(1, 5)))
        start = time.perf_counter()
        try:
            alarm.arm(delay)
            operation.call()
            alarm.disarm()
        except KeyboardInterrupt:
            num_interrupts += 1
            if not operation.is_untouched():
                num_after += 1
                assert operation.is_done(), f"interrupt {num_interrupts} left something half done"
        else:
            operation.seconds = time.perf_counter() - start
            assert operation.is_done()
        operation.restore()
        assert not foreign, foreign
    for operation in todo:
        result = operation.call()
        pairs = (
            zip(result, operation.result, strict=True) if isinstance(result, tuple) else [(result, operation.result)]
        )
        assert all(x is y is None or same(x, y) for x, y in pairs)
        assert operation.is_done()
    assert len(sys._current_frames()) <= MOST_THREADS, "threads are left over"
    print(f"{num_interrupts} interrupts, {num_after} of them after the writes")


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))

"""Operations whose arrays another thread rewrites: `python -m tests.promises.rewritten NUMBER SEED [score_mod]`.

The thread stores one content after the other in tables, lengths, slots, pairs and the arrays of options, valid ones and
garbage, while NUMBER calls are made. Each must give the result of one of the valid contents, or refuse the garbage. A
score_mod, which has to be compiled first, is among them if asked for.
"""

import faulthandler
import itertools
import sys
import threading

import numpy as np

import pagedkv

NUM_BLOCKS, GARBAGE = 64, 2**30
REFUSALS = (IndexError, ValueError)


class Case:
    """A call, and what is stored in the arrays that it reads: valid contents, then garbage."""

    def __init__(self, call, **contents):
        self.call = call
        self.arrays = {name: np.array(valid[0]) for name, (valid, _) in contents.items()}
        self.contents = [
            (self.arrays[name], [np.array(x, self.arrays[name].dtype) for x in (*valid, *garbage)])
            for name, (valid, garbage) in contents.items()
        ]
        # Arrays are read one after the other: any combination of what is valid may be met.
        self.results = []
        for combination in itertools.product(*(valid for valid, _ in contents.values())):
            for array, content in zip(self.arrays.values(), combination, strict=True):
                array[...] = content
            self.results.append(self.run())

    def run(self):
        result = self.call(**self.arrays)
        return b"".join(x.tobytes() for x in (result if isinstance(result, tuple) else (result,)))


def biased(biases):
    def score_mod(score, q_pos, k_pos, head, seq):
        return score + biases[k_pos % 4]

    return score_mod


def int32s(*rows):
    return [np.array(row, np.int32) for row in rows]


def float32s(rng, shape):
    return [rng.uniform(0.5, 2.0, shape).astype(np.float32) for _ in range(2)]


def tables_of(rng, num_columns):
    valid = [rng.integers(0, NUM_BLOCKS, (2, num_columns)).astype(np.int32) for _ in range(2)]
    return valid, [np.full((2, num_columns), bad, np.int32) for bad in (GARBAGE, -GARBAGE)]


def cases(rng, score_mod):
    k, v = rng.standard_normal((2, NUM_BLOCKS, 16, 2, 64), np.float32)
    codes = rng.integers(0, 120, (2, NUM_BLOCKS, 16, 2, 64)).astype(np.uint8)
    q = rng.standard_normal((40, 8, 64), np.float32)
    lens = np.array([60, 30], np.int32)
    lengths = int32s((60, 30), (17, 64)), int32s((GARBAGE, -1), (-GARBAGE, 3))
    short, wide = tables_of(rng, 4), tables_of(rng, 60)
    fp8 = {"kv_dtype": "fp8_e4m3"}
    new_k, new_v = rng.standard_normal((2, 3, 2, 64), np.float32)
    caches = [np.zeros((NUM_BLOCKS, 16, 2, 64), np.float32) for _ in range(2)]

    def decode(block_tables, seq_lens=lens, **options):
        return pagedkv.decode_attention(q[:2], k, v, block_tables, seq_lens, **options)

    def write(slots):
        for cache in caches:
            cache[...] = 0
        pagedkv.write_kv(new_k, new_v, *caches, slots)
        return tuple(caches)

    def copy(pairs):
        for cache in caches:
            cache[...] = k
        pagedkv.copy_blocks(*caches, pairs)
        return tuple(caches)

    def swap(pairs):
        for cache in caches:
            cache[...] = 0
        pagedkv.swap_blocks((k, v), tuple(caches), pairs)
        return tuple(caches)

    heads = float32s(rng, 8), []
    scales = float32s(rng, 2), [np.full(2, bad, np.float32) for bad in (np.nan, -1)]
    pairs = ([(0, 1), (2, 3)], [(5, 9), (5, 8)]), ([(GARBAGE, 0), (0, GARBAGE)], [(0, 1), (2, 1)])
    starts = int32s((0, 20, 40), (0, 30, 40)), int32s((0, GARBAGE, 40), (0, 40, -GARBAGE))
    todo = [
        Case(decode, block_tables=short, seq_lens=lengths),
        Case(lambda block_tables: decode(block_tables, np.array([960, 900], np.int32)), block_tables=wide),
        Case(lambda **given: decode(short[0][0], **given), alibi_slopes=heads, sinks=heads),
        Case(
            lambda **given: pagedkv.decode_attention(q[:2], *codes, short[0][0], lens, **fp8, **given),
            k_scale=scales,
            v_scale=scales,
        ),
        Case(
            lambda **given: pagedkv.prefill_attention(q, k, v, **given),
            block_tables=short,
            seq_lens=(int32s((60, 30), (33, 64)), lengths[1]),
            query_starts=starts,
        ),
        Case(
            lambda block_table: pagedkv.gather_kv(k, v, block_table, 60), block_table=[[x[0] for x in y] for y in short]
        ),
        Case(write, slots=([(1, 2, 3), (40, -1, 7)], [(2**60, 0, 1), (3, 3, 4)])),
        Case(copy, pairs=pairs),
        Case(swap, pairs=pairs),
    ]
    if score_mod:
        # What it closes over is part of the kernel: nothing that is stored there later is seen.
        biases = np.zeros(4, np.float32)
        frozen = biased(biases)
        case = Case(lambda: decode(short[0][0], score_mod=frozen))
        case.contents.append((biases, [biases + 9, biases * np.nan]))
        todo.append(case)
    return todo


def main(number, seed, *score_mod):
    faulthandler.enable()
    sys.setswitchinterval(1e-5)
    rng = np.random.default_rng(seed)
    pagedkv.set_num_threads(2)
    done, num_refused = threading.Event(), 0
    for case in (todo := cases(rng, score_mod)):
        done.clear()

        def rewrite(case=case):
            while not done.is_set():
                for array, contents in case.contents:
                    for content in contents:
                        array[...] = content

        writer = threading.Thread(target=rewrite, daemon=True)
        writer.start()
        for _ in range(-(-number // len(todo))):
            try:
                assert case.run() in case.results, f"call {todo.index(case)} has a result of no content"
            except REFUSALS:
                num_refused += 1
        done.set()
        writer.join()
    print(f"{number} calls, {num_refused} of them refused")


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), *sys.argv[3:])

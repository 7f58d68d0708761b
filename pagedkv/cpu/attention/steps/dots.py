"""Scores: the dot products of query rows with the keys of a step.

Query rows come in groups of R (1 or 4). A vector has four dims of all four rows of a group, and a key's four dims are
repeated for each row; or it has eight dims of the only row. No sum ever runs along a vector: a dot product is eight
sums s0 .. s7, each over every eighth place of the rows in ascending order, added as
((s0 + s4) + (s1 + s5)) + ((s2 + s6) + (s3 + s7)), whatever R and the machine are.

    queries   (groups, places / 4, R, 4)
    scores    (groups, TILE, R)
"""

from __future__ import annotations

from functools import partial

from .code import ELEMENT_BYTES, FLOAT_BYTES, INT64, LANES, STEP, TILE, Code, Value, num_accumulators, vector
from .step_order import RowAddresses, RowsToPrefetch, prefetch_turn
from .widen import CHUNK_DIMS, RowsToWiden, widen_chunk

PARTS = 8  # sums of a dot product


def passes_of(num_groups: int) -> int:
    """How often a step reads its keys: with many groups, once for each half of a dot product's sums.

    Then the sums of more groups stay in registers, and each load serves more multiply-adds.
    """
    return 2 if num_groups > 2 else 1


def keys_at_once(num_groups: int, group_rows: int) -> int:
    """Keys of a step whose sums with some groups stay in registers."""
    parts = PARTS // passes_of(num_groups)
    return min(STEP, num_accumulators() * LANES // (parts * group_rows * num_groups))


def dot_products(
    code: Code,
    kind: str,
    num_groups: int,
    group_rows: int,
    scores: Value,
    queries: Value,
    keys: RowAddresses,
    num_vectors: Value,
    to_prefetch: RowsToPrefetch | None,
    to_widen: RowsToWiden | None,
) -> None:
    """Store the scores of some groups with the STEP keys of a step, which are whole chunks of `kind`.

    Keys are widened in registers. Between the arithmetic, prefetch the rows of a later step, a few lines at a time,
    since all of them at once would fill the processor's miss buffers, and widen the rows of the next one.
    """
    builder = code.builder
    places, at_once = 4 if group_rows > 1 else PARTS, keys_at_once(num_groups, group_rows)
    lanes, chains, chunk = places * group_rows, PARTS // places, CHUNK_DIMS[kind]
    together = chains // passes_of(num_groups)
    groups = code.rows(queries, code.times(num_vectors, LANES * group_rows * FLOAT_BYTES), num_groups)

    def parts(address: Value) -> list[Value]:
        """A chunk of a key, as vectors of `places`."""
        if kind == "float32":
            return [code.load(address, vector(places), n * FLOAT_BYTES) for n in range(0, chunk, places)]
        widened = widen_chunk(code, kind, address)
        return [code.shuffle(x, range(n, n + places)) for x in widened for n in range(0, LANES, places)]

    def some_keys(block: Value) -> None:
        first = code.times(block, at_once)
        rows = keys.after(code, first)
        addresses = [rows.at(code, t) for t in range(at_once)]

        def turn(chain: int, i: Value, sums: list[Value]) -> list[Value]:
            """Add the products of a chunk that belong to the chains from `chain` on."""
            if to_prefetch is not None:
                prefetch_turn(code, to_prefetch, first, at_once, i, chunk)
            if to_widen is not None and chain == 0:
                to_widen.widen(code, first, at_once, i)
            of_key = code.times(i, chunk * ELEMENT_BYTES[kind])
            at = [builder.add(q, code.times(i, chunk * group_rows * FLOAT_BYTES)) for q in groups]
            own = [n for n in range(chunk // places) if chain <= n % chains < chain + together]
            q = {n: [code.load(x, vector(lanes), n * lanes * FLOAT_BYTES) for x in at] for n in own}
            for t, address in enumerate(addresses):
                found = parts(builder.add(address, of_key))
                for n in own:
                    repeated = code.repeat(found[n], lanes)
                    for g in range(num_groups):
                        mine = (g * at_once + t) * together + n % together
                        sums[mine] = code.fma(q[n][g], repeated, sums[mine])
            return sums

        turns = builder.sdiv(num_vectors, INT64(chunk // LANES))
        zeros = [code.constant(0.0, lanes)] * (num_groups * at_once * together)
        passes = [code.loop(turns, zeros, partial(turn, chain)) for chain in range(0, chains, together)]
        sums = [x for of_sum in zip(*passes, strict=True) for x in of_sum]
        for g in range(num_groups):
            totals = _totals(code, sums[g * at_once * chains : (g + 1) * at_once * chains], chains, group_rows)
            place = builder.add(scores, code.times(first, group_rows * FLOAT_BYTES))
            code.store(totals, place, g * TILE * group_rows * FLOAT_BYTES)

    code.repeatedly(INT64(STEP // at_once), some_keys)


def _totals(code: Code, sums: list[Value], chains: int, group_rows: int) -> Value:
    """The dot products of all keys and rows of a group, as one vector."""
    add = code.builder.fadd
    fours = (
        [add(a, b) for a, b in zip(sums[::2], sums[1::2], strict=True)]
        if chains > 1
        else [code.halve(x, add, PARTS // 2) for x in sums]
    )
    together = code.joined(fours)
    for _ in range(2):
        lanes = together.type.count
        together = add(code.shuffle(together, range(0, lanes, 2)), code.shuffle(together, range(1, lanes, 2)))
    assert together.type.count == group_rows * len(fours)
    return together

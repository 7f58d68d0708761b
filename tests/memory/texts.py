"""Sequences whose state is the list of all their tokens, so that a wrong state cannot hide."""

import numpy as np

from pagedkv import PagedKVCache

P, ROOM = 4, 64


def make_cache(num_states=100, *, num_layers=1, num_blocks=200, max_seqs=100, **options):
    """A cache in blocks of 4 tokens, with so many states."""
    states, memory = {"tokens": ((ROOM,), "float32"), "count": ((1,), "float32")}, num_states * 4 * (ROOM + 1)
    sizes = num_layers, num_blocks, P, 1, 8
    return PagedKVCache(*sizes, max_seqs=max_seqs, states=states, state_memory=memory, **options)


def advanced(states, new):
    """The states behind more tokens of each sequence: what a model computes in a pass."""
    for row, tokens in enumerate(new):
        start = int(states["count"][row, 0])
        for i, token in enumerate(tokens):
            assert states["tokens"][row, start + i] == 0
            states["tokens"][row, start + i] = token
        states["count"][row, 0] = start + len(tokens)
    return states


def texts_of(states):
    """The tokens that states stand for."""
    counts = np.asarray(states["count"])[:, 0].astype(int).tolist()
    rows = np.asarray(states["tokens"])
    assert all(not rows[i, n:].any() for i, n in enumerate(counts))
    return [rows[i, :n].astype(int).tolist() for i, n in enumerate(counts)]


def snapshots(cache):
    """How many tokens each snapshot stands for, ascending."""
    slots = cache._rows.states
    return sorted(slots.lens[slots.are_snapshots].tolist())


def snapshot_digests(cache):
    """The digest of the block that each snapshot is behind."""
    slots = cache._rows.states
    return set(cache.pool._prefix_cache._index.digests(slots._blocks[slots.are_snapshots]).tolist())


def snapshot_texts(cache):
    """The text that each snapshot has, and the tokens in the blocks that lead to it, as far as they are there."""
    slots, found = cache._rows.states, cache.pool._prefix_cache
    if found is None:
        return
    blocks_of = {int(found._serials[block]): block for block in found._leaders()}
    for slot in slots.are_snapshots.nonzero()[0]:
        [text] = texts_of({name: array[slot : slot + 1] for name, array in cache.states.items()})
        tokens, serial = [], int(slots._serials[slot])
        while (block := blocks_of.get(serial)) is not None:
            tokens = [*found._rows()[block].tolist(), *tokens]
            serial = int(found._parents[block])
        yield text[len(text) - len(tokens) :], tokens


def slots_held(cache):
    """How many state slots are in use or have a snapshot."""
    stats = cache.stats()
    return stats.used_states + stats.cached_states


class Texts:
    """The sequences of a cache, with all their tokens."""

    def __init__(self, cache):
        self.cache, self.tokens, self.num_computed = cache, {}, 0

    def start(self, tokens, salt=None):
        """Start a sequence with what is found of a prompt: its handle, and how many tokens that is."""
        seq, num_cached = self.cache.add_found(tokens, salt)
        self.tokens[seq] = list(tokens[:num_cached])
        return seq, num_cached

    def compute(self, *new, lasting=False):
        """A pass over (sequence, tokens) pairs."""
        cache, seqs, tokens = self.cache, [seq for seq, _ in new], [list(more) for _, more in new]
        states = cache.read_states(seqs)
        assert texts_of(states) == [self.tokens[seq] for seq in seqs]
        cache.append(seqs, [*map(len, tokens)], [token for more in tokens for token in more])
        cache.write_states(seqs, advanced(states, tokens))
        cache.commit(seqs, lasting=lasting)
        for seq, more in zip(seqs, tokens, strict=True):
            self.tokens[seq] = self.tokens[seq] + more
            self.num_computed += len(more)
        cache.check()

    def prompt(self, tokens, *stops, salt=None):
        """Start a prompt and compute it in chunks that end at the stops, and at its last full block: handle, hit."""
        seq, hit = self.start(tokens, salt)
        last = (len(tokens) - 1) // P * P
        for stop in sorted({*stops, last, len(tokens)}):
            if stop > len(self.tokens[seq]):
                self.compute((seq, tokens[len(self.tokens[seq]) : stop]), lasting=stop < len(tokens))
        return seq, hit

    def decode(self, seq, tokens):
        """Compute tokens one by one."""
        for token in tokens:
            self.compute((seq, [token]))

    def fork(self, seq):
        """Another sequence like one."""
        [other] = self.cache.fork(seq)
        self.tokens[other] = self.tokens[seq]
        return other

    def truncate(self, seq, length):
        """Cut a sequence down."""
        self.cache.truncate(seq, length)
        self.tokens[seq] = self.tokens[seq][:length]

    def free(self, *seqs):
        """End sequences."""
        self.cache.free([*seqs])
        for seq in seqs:
            del self.tokens[seq]

    def check(self):
        """Every sequence has the state of its text, and every snapshot that of the tokens in its blocks."""
        self.cache.check()
        seqs = [*self.tokens]
        assert texts_of(self.cache.read_states(seqs)) == [self.tokens[seq] for seq in seqs]
        assert slots_held(self.cache) <= self.cache.stats().num_states
        for text, tokens in snapshot_texts(self.cache):
            assert text == tokens

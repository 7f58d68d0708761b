"""A twin of PagedKVCache in plain Python: lists of blocks, one sequence and one block at a time."""

from collections import Counter
from dataclasses import dataclass, field
from itertools import count

import numpy as np

from pagedkv.errors import OutOfBlocksError
from pagedkv.memory.prefix.digests import root_digest


@dataclass(eq=False)
class Block:
    """A block in use, or one that can be found: its digest, its tokens, its number and that of the block before it.

    And the block that was stored last behind it.
    """

    digest: bytes | None = None
    tokens: tuple = ()
    serial: int = 0
    parent: object = None
    behind: object = None


@dataclass(eq=False)
class Seq:
    """A sequence: the ids of its tokens, how many of the first are known, and how many blocks were found or stored."""

    salt: object
    tokens: list = field(default_factory=list)
    known: int = 0
    found: int = 0
    blocks: list = field(default_factory=list)


class Twin:
    def __init__(self, num_blocks, block_size, hash_of):
        self.num_blocks, self.block_size, self.hash_of = num_blocks, block_size, hash_of
        self.seqs: dict[object, Seq] = {}
        self.index: dict[bytes, Block] = {}
        self.waiting: list[Block] = []  # without references, the first to be evicted first
        self.serials = count(1)
        self.queried = self.hit = 0

    # -- what there is
    def refs(self):
        return Counter(block for seq in self.seqs.values() for block in seq.blocks)

    @property
    def num_free(self):
        return self.num_blocks - len(self.refs())

    def num_of(self, length):
        return -(-length // self.block_size)

    def step(self, seq_tokens, i, digest):
        """The tokens of block i, and their digest after another one."""
        tokens = tuple(seq_tokens[i * self.block_size : (i + 1) * self.block_size])
        return tokens, self.hash_of(digest + np.array(tokens, np.int32).tobytes())

    def look_up(self, tokens, salt):
        digest, parent, found = root_digest(salt), ("root", salt), []
        for i in range(len(tokens) // self.block_size):
            content, digest = self.step(tokens, i, digest)
            block = self.index.get(digest)
            if block is None or (block.tokens, block.parent) != (content, parent):
                break
            found.append(block)
            parent = block.serial
        return found

    def part(self, found, rest):
        """A block that begins with at least half a block of the rest, and with how much of it."""
        block = found[-1].behind if found else None
        if block is None or block.digest is None or block.parent != found[-1].serial:
            return None, 0
        n = 0
        while n < min(len(rest), self.block_size - 1) and rest[n] == block.tokens[n]:
            n += 1
        return block, n

    # -- what the pool does
    def take(self, num_new, revived=()):
        """New blocks, and the longest waiting ones lose what they hold for them."""
        for block in revived:
            self.waiting.remove(block)
        blank = self.num_blocks - len(self.refs()) - len(self.waiting) - len(revived)
        for _ in range(num_new - blank):
            self.forget(self.waiting.pop(0))
        return [Block() for _ in range(num_new)]

    def forget(self, block):
        """And all that is found behind it."""
        for other in [other for other in self.index.values() if other.parent == block.serial]:
            self.waiting.remove(other)
            self.forget(other)
        del self.index[block.digest]
        block.digest = None

    def release(self, blocks):
        """After sequences have dropped them."""
        refs = self.refs()
        freed = {block for block in blocks if not refs[block] and block.digest is not None}
        self.waiting += sorted(freed, key=lambda block: -block.serial)

    # -- calls
    def add(self, name, tokens, salt=None, *, known=True):
        """How many tokens are found, or None if there is no room."""
        found = self.look_up(tokens, salt) if known else []
        refs, num_found = self.refs(), len(found) * self.block_size
        if num_found:
            if num_found < len(tokens):
                part, num_more = self.part(found, tokens[num_found:-1])
            else:
                found, part, num_more = found[:-1], found[-1], self.block_size - 1
                num_found -= self.block_size
            blank = self.num_blocks - len(refs) - len(self.waiting)
            if 2 * num_more >= self.block_size and (refs[part] or self.num_of(len(tokens)) - len(found) <= blank):
                num_found += num_more
        num_new = self.num_of(len(tokens)) - len(found)
        revived = [block for block in found if not refs[block]]
        if num_new > self.num_free - len(revived):
            raise OutOfBlocksError("")
        new = self.take(num_new, revived)
        if known:
            self.queried, self.hit = self.queried + len(tokens), self.hit + num_found
        self.seqs[name] = Seq(salt, list(tokens), len(tokens) if known else 0, len(found), [*found, *new])
        return num_found

    def hold(self, name, tokens, salt):
        found = self.look_up(tokens, salt)
        refs = self.refs()
        self.take(0, [block for block in found if not refs[block]])
        length = len(found) * self.block_size
        self.seqs[name] = Seq(salt, list(tokens[:length]), length, len(found), found)
        return length

    def append(self, new, *, known=True):
        """Append new[name] to each sequence; known tokens stay so only behind known ones."""
        refs, size = self.refs(), self.block_size
        writers = Counter()
        for name, tokens in new.items():
            seq = self.seqs[name]
            if tokens and len(seq.tokens) % size:
                writers[seq.blocks[len(seq.tokens) // size]] += 1
        num_new = sum(
            self.num_of(len(self.seqs[name].tokens) + len(tokens)) - len(self.seqs[name].blocks)
            for name, tokens in new.items()
        )
        num_copied = {block: n - (n == refs[block]) for block, n in writers.items()}
        num_new += sum(num_copied.values())
        if num_new > self.num_free:
            raise OutOfBlocksError("")
        written = [block for block, n in writers.items() if n == refs[block] and block.digest is not None]
        if num_new + len(written) <= self.num_free:
            num_new += len(written)
            num_copied |= {block: num_copied[block] + 1 for block in written}
        else:
            for block in written:
                self.forget(block)
        self.take(num_new)
        for name, tokens in new.items():
            seq = self.seqs[name]
            length = len(seq.tokens)
            if tokens and length % size:
                block = seq.blocks[length // size]
                if num_copied[block]:
                    num_copied[block] -= 1
                    seq.blocks[length // size] = Block()
            if known and seq.known == length:
                seq.known += len(tokens)
            seq.tokens += tokens
            seq.blocks += [Block() for _ in range(self.num_of(len(seq.tokens)) - len(seq.blocks))]
        self.release(written)

    def commit(self, names):
        size = self.block_size
        for name in names:
            seq = self.seqs[name]
            while seq.found < seq.known // size:
                above = seq.blocks[seq.found - 1] if seq.found else None
                parent = above.serial if above else ("root", seq.salt)
                content, digest = self.step(seq.tokens, seq.found, above.digest if above else root_digest(seq.salt))
                own, other = seq.blocks[seq.found], self.index.get(digest)
                if other is not None and (other.tokens, other.parent) != (content, parent):
                    if other not in self.waiting:
                        seq.known = seq.found * size
                        break
                    self.waiting.remove(other)
                    self.forget(other)
                    other = None
                if other is None:
                    own.digest, own.tokens, own.serial, own.parent = digest, content, next(self.serials), parent
                    self.index[digest] = other = own
                    if above:
                        above.behind = own
                if other in self.waiting:
                    self.waiting.remove(other)
                seq.blocks[seq.found] = other
                seq.found += 1

    def fork(self, name, forks):
        seq = self.seqs[name]
        for fork in forks:
            self.seqs[fork] = Seq(seq.salt, seq.tokens.copy(), seq.known, seq.found, seq.blocks.copy())

    def reorder(self, names, parents):
        dropped = [block for name in names for block in self.seqs[name].blocks]
        seqs = [self.seqs[names[parent]] for parent in parents]
        copies = [Seq(seq.salt, seq.tokens.copy(), seq.known, seq.found, seq.blocks.copy()) for seq in seqs]
        self.seqs |= zip(names, copies, strict=True)
        self.release(dropped)

    def truncate(self, lengths):
        dropped = []
        for name, length in lengths.items():
            seq = self.seqs[name]
            dropped += seq.blocks[self.num_of(length) :]
            del seq.tokens[length:], seq.blocks[self.num_of(length) :]
            seq.known, seq.found = min(seq.known, length), min(seq.found, length // self.block_size)
        self.release(dropped)

    def free(self, names):
        self.truncate(dict.fromkeys(names, 0))
        for name in names:
            del self.seqs[name]

    def reset(self, pins):
        self.free(pins)
        for block in self.index.values():
            block.digest = None
        self.index.clear()
        self.waiting.clear()
        for seq in self.seqs.values():
            seq.known = seq.found = 0

"""A small allocator in plain Python, right and with mistakes, as users would test with `AllocatorMachine`."""

from collections import deque

from pagedkv.testing import AllocatorMachine


class BlockManager:
    """Blocks of sequences in lists, with reference counts; forks share blocks, and copy them before they write."""

    def __init__(self, num_blocks, block_size):
        self.block_size = block_size
        self.free_blocks = deque(range(num_blocks))
        self.ref_counts = [0] * num_blocks
        self.tables, self.lengths = [], []

    def take(self):
        block = self.free_blocks.popleft()
        self.ref_counts[block] = 1
        return block

    def release(self, block):
        self.ref_counts[block] -= 1
        if self.ref_counts[block] == 0:
            self.free_blocks.append(block)

    def require(self, count):
        if count > len(self.free_blocks):
            raise MemoryError(f"{count} blocks are needed")

    def num_of(self, length):
        return -(-length // self.block_size)

    def add(self, length):
        self.require(self.num_of(length))
        self.tables.append([self.take() for _ in range(self.num_of(length))])
        self.lengths.append(length)
        return len(self.tables) - 1

    def append(self, seq, count):
        table, length = self.tables[seq], self.lengths[seq]
        num_new = self.num_of(length + count) - len(table)
        copies = length % self.block_size > 0 and self.ref_counts[table[-1]] > 1
        self.require(num_new + copies)
        copied = []
        if copies:
            source = table[-1]
            table[-1] = self.take()
            copied = [(source, table[-1])]
            self.release(source)
        table += [self.take() for _ in range(num_new)]
        self.lengths[seq] += count
        return copied

    def fork(self, seq):
        for block in self.tables[seq]:
            self.ref_counts[block] += 1
        self.tables.append(self.tables[seq].copy())
        self.lengths.append(self.lengths[seq])
        return len(self.tables) - 1

    def truncate(self, seq, length):
        table = self.tables[seq]
        while len(table) > self.num_of(length):
            self.release(table.pop())
        self.lengths[seq] = length

    def free(self, seq):
        for block in self.tables[seq]:
            self.release(block)
        self.tables[seq] = []


class BlockManagerMachine(AllocatorMachine):
    manager_type = BlockManager

    def start(self, num_blocks, block_size):
        self.manager = self.manager_type(num_blocks, block_size)

    def add(self, tokens):
        return self.manager.add(len(tokens))

    def append(self, seq, tokens):
        for source, destination in self.manager.append(seq, len(tokens)):
            self.copy_block(source, destination)

    def fork(self, seq):
        return self.manager.fork(seq)

    def truncate(self, seq, length):
        self.manager.truncate(seq, length)

    def free(self, seq):
        self.manager.free(seq)

    def num_free(self):
        return len(self.manager.free_blocks)

    def block_table(self, seq):
        return self.manager.tables[seq]

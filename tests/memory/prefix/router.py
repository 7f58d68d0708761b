"""Router: a listener that follows the findable blocks of a cache by its events."""

from pagedkv.memory import BlockRemoved, BlockStored


class Router:
    """The findable blocks, built from events: by digest, the parent's digest and the tokens."""

    def __init__(self):
        self.blocks = {}
        self._last = None

    def __call__(self, event):
        if event is self._last:  # an interrupt makes the cache deliver it again
            return
        self._last = event
        if isinstance(event, BlockStored):
            parent, size = event.parent_block_hash, event.block_size
            assert parent is None or parent in self.blocks
            assert len(event.token_ids) == len(event.block_hashes) * size
            for i, digest in enumerate(event.block_hashes):
                assert digest not in self.blocks
                self.blocks[digest] = parent, event.token_ids[i * size : (i + 1) * size]
                parent = digest
        elif isinstance(event, BlockRemoved):
            for digest in event.block_hashes:
                del self.blocks[digest]
        else:
            self.blocks.clear()

    def text_of(self, digest):
        """The tokens of a block and of all before it."""
        text = []
        while digest is not None:
            assert digest in self.blocks, "a block is left that nothing leads to"
            digest, tokens = self.blocks[digest]
            text[:0] = tokens
        return text

    def agrees_with(self, cache, salts=(None,)):
        """`find` finds each of these blocks behind one of these salts, and there are no others to find."""
        assert len(self.blocks) == len(cache.pool._prefix_cache.findable())
        for digest in self.blocks:
            text = self.text_of(digest)
            assert not salts or any(cache.find([*text, 0], salt) >= len(text) for salt in salts)

"""Router: a listener that follows by its events what can be found in a cache."""

from pagedkv.memory import AllBlocksCleared, BlockRemoved, BlockStored


class Router:
    """The findable blocks, built from events: by digest, the parent's digest and the tokens.

    `keys` has what each block depends on besides them, `states` the digests of those that a snapshot is behind.
    """

    def __init__(self):
        self.blocks, self.keys, self.states = {}, {}, set()
        self._last = None

    def __call__(self, event):
        if event is self._last:  # an interrupt makes the cache deliver it again
            return
        self._last = event
        if isinstance(event, AllBlocksCleared):
            self.blocks.clear()
            self.states.clear()
        elif event.group_idx == 1:
            self._of_states(event)
        elif isinstance(event, BlockStored):
            parent, size = event.parent_block_hash, event.block_size
            assert parent is None or parent in self.blocks
            assert len(event.token_ids) == len(event.block_hashes) * size
            for i, digest in enumerate(event.block_hashes):
                assert digest not in self.blocks
                self.blocks[digest] = parent, event.token_ids[i * size : (i + 1) * size]
                self.keys[digest] = event.extra_keys and event.extra_keys[i]
                parent = digest
        else:
            for digest in event.block_hashes:
                assert digest not in self.states
                del self.blocks[digest]

    def _of_states(self, event):
        if isinstance(event, BlockStored):
            [digest] = event.block_hashes
            assert digest not in self.states
            assert event.kv_cache_spec_kind == "mamba"
            assert (event.parent_block_hash, event.token_ids) == self.blocks[digest]
            assert event.extra_keys == (self.keys[digest] and [self.keys[digest]])
            self.states.add(digest)
        for digest in event.block_hashes if isinstance(event, BlockRemoved) else []:
            self.states.remove(digest)

    def text_of(self, digest):
        """The tokens of a block and of all before it."""
        text = []
        while digest is not None:
            assert digest in self.blocks, "a block is left that nothing leads to"
            digest, tokens = self.blocks[digest]
            text[:0] = tokens
        return text

    def find(self, tokens, salt, size):
        """How much of a prompt a cache with states finds: a beginning of full blocks with a snapshot behind it."""
        behind = {(parent, self.keys[digest], *its): digest for digest, (parent, its) in self.blocks.items()}
        digest, key, found = None, None if salt is None else (salt,), 0
        for end in range(size, len(tokens), size):
            digest, key = behind.get((digest, key, *tokens[end - size : end])), None
            if digest is None:
                break
            found = end if digest in self.states else found
        return found

    def agrees_with(self, cache, salts=(None,)):
        """`find` finds each of these blocks behind one of these salts, and there are no others to find."""
        assert len(self.blocks) == len(cache.pool._prefix_cache.findable())
        for digest in self.blocks:
            text = self.text_of(digest)
            assert not salts or any(cache.find_blocks([*text, 0], salt) >= len(text) for salt in salts)

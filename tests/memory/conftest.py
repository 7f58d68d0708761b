"""A fixture with a small table."""

import pytest

from pagedkv.memory import BlockPool, SequenceTable


@pytest.fixture
def table() -> SequenceTable:
    """Blocks of 4 tokens: 12 of them, 5 for one sequence, 4 sequences."""
    return SequenceTable(BlockPool(12), block_size=4, max_seqs=4, max_blocks=5)

"""The rows of a sequence table: handles, blocks, lengths, and what a call changes in them."""

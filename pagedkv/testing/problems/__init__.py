"""Problems of attention, merging and writing, and the limits within which they are drawn."""

"""Pictures: the map of a pool as text and as HTML, and whether matplotlib is here for the others."""

"""How rows of queries, keys and dims are cut on CUDA cores; only numbers."""

from __future__ import annotations

from dataclasses import dataclass

from ..config import NUM_THREADS, CoresConfig

VECTOR = 4  # elements
FLOAT_BYTES = 4


@dataclass(frozen=True, slots=True)
class CoresShape:
    """A tile of query rows, and one of as many keys.

    Attributes
    ----------
    config : CoresConfig
    """

    config: CoresConfig

    @property
    def rows(self) -> int:
        """Query rows of a thread block, and keys of a tile."""
        return 32 if self.config.head_dim <= 256 else 16

    @property
    def lanes(self) -> int:
        """Lanes that share a row."""
        return NUM_THREADS // self.rows

    @property
    def keys_of_lane(self) -> int:
        return self.rows // self.lanes

    @property
    def row_vectors(self) -> int:
        return self.config.head_dim // VECTOR

    @property
    def vectors(self) -> int:
        """Vectors of O of a lane; the last one may reach past the row."""
        return -(-self.row_vectors // self.lanes)

    @property
    def row_bytes(self) -> int:
        """Bytes from a row in shared memory to the next one."""
        return (self.row_vectors + 1) * VECTOR * FLOAT_BYTES

    @property
    def tile_bytes(self) -> int:
        return self.rows * self.row_bytes

    @property
    def p_bytes(self) -> int:
        """Bytes of a row of P, with a float of padding."""
        return (self.rows + 1) * FLOAT_BYTES

    @property
    def nbytes(self) -> int:
        return 2 * self.tile_bytes + self.rows * self.p_bytes

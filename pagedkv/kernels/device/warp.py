"""Numbers of a warp."""

WARP_SIZE = 32
ALL_LANES = 0xFFFFFFFF  # the mask of a warp-wide operation

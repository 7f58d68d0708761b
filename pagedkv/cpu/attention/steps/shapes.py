"""Numbers that the steps share."""

TILE = 64  # tokens whose softmax is taken at once
STEP = 8  # tokens whose rows are taken at once
LANES = 16  # float32 in a vector
FLOAT_BYTES = 4
INT_BYTES = 8
CACHE_LINE = 64

"""Limits of a SplitConfig."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .limit import Limit, Row, otherwise

if TYPE_CHECKING:
    from ..config import SplitConfig

through_shared: Limit[SplitConfig] = Limit(
    "1 if lanes hand words to each other through shared memory, 0 for shuffles",
    (
        Row(lambda c: not c.on_tensor_cores, 0, "float32 caches keep tokens apart: few words change lanes."),
        Row(
            lambda c: c.architecture < 9,
            1,
            "ptxas puts a branch for diverged lanes before each shuffle in a loop, and keeps registers free for it: "
            "720 bytes at D = 128, G = 8 for 8.0, and 2152 at D = 256.",
        ),
        Row(
            lambda c: c.architecture > 9 and c.head_dim > 256,
            1,
            "72 bytes at D = 512, G = 8 for 10.0, and 36 with a softcap.",
        ),
        Row(otherwise, 0, "Shuffles take fewer instructions: 6.98 instead of 8.29 at D = 512, G = 8 for 9.0."),
    ),
)

staged_dims: Limit[SplitConfig] = Limit(
    "most dims of more than 16 heads whose rows wait in shared memory",
    (
        Row(lambda c: c.q_bytes == 2, 256, "More dims have two warps for O, and the warps of a team share heads."),
        Row(otherwise, 128, "With the terms of a float32 q, stages of 256 dims take 148 KiB of shared memory."),
    ),
)

heads: Limit[SplitConfig] = Limit(
    "most query heads of a thread block",
    (
        Row(
            lambda c: c.staged and c.head_dim > 128 and c.architecture < 9,
            32,
            "Shared memory: 64 heads of 256 dims leave room for one thread block (90 KiB), 32 heads for two (72 KiB).",
        ),
        Row(lambda c: c.staged, 64, "Four warps of 16 heads, which is what an mma has rows for."),
        Row(
            lambda c: not c.on_tensor_cores and (c.head_dim > 256 or c.architecture < 9),
            2,
            "56 bytes with 4 heads at D = 256 for 8.0; none at D = 512 for 9.0, with 244 registers.",
        ),
        Row(
            lambda c: not c.on_tensor_cores,
            4,
            "8 heads at D = 128 for 9.0 take all 255 registers, and 97 instructions.",
        ),
        Row(
            lambda c: c.head_dim > 256,
            8,
            "No spill at D = 512, G = 16 for 9.0, with 253 registers, and 9.25 instead of 6.98 instructions.",
        ),
        Row(
            lambda c: c.head_dim > 128 and c.architecture != 9,
            8,
            "20 bytes at D = 256, G = 16 for 10.0, with a softcap too; for 8.0 no spill, with 253 registers.",
        ),
        Row(
            lambda c: c.head_dim > 128 and c.modified and c.q_bytes == 4,
            8,
            "24 bytes at D = 256, G = 16 with a softcap for 9.0.",
        ),
        Row(otherwise, 16, "An mma has 16 rows."),
    ),
)

head_shares: Limit[SplitConfig] = Limit(
    "warps that share the query heads of more than 16",
    (
        Row(lambda c: not c.staged, 1, "Up to 16 heads, each warp has all of them."),
        Row(lambda c: c.num_heads > 32, 4, "An mma has 16 rows, and there are up to 64 heads."),
        Row(lambda c: c.head_dim > 128, 4, "No spill with two warps of 12 heads at G = 24, but 31.19 instructions."),
        Row(
            otherwise,
            2,
            "Fewer warps read the same rows from shared memory: 51.5 instead of 37.75 instructions with 4 at D = 128, "
            "G = 24 for 9.0.",
        ),
    ),
)

dims_of_warp: Limit[SplitConfig] = Limit(
    "most dims of O of a warp",
    (Row(otherwise, 256, "48 bytes at D = 512, G = 8 for 9.0."),),
)

checks_splits: Limit[SplitConfig] = Limit(
    "1 if a check comes before the loop, and a block id that it refuses takes its whole split along",
    (
        Row(
            lambda c: c.architecture >= 9 or c.modified or c.staged or not c.on_tensor_cores,
            0,
            "Masks fit, and a block id that is refused takes only its own tokens along. They cost instructions: 11.06 "
            "instead of 9.69 at D = 128, G = 8 with a check for 9.0.",
        ),
        Row(
            otherwise,
            1,
            "With masks in the loop 80 bytes at D = 64, G = 16 for 8.0, 444 at D = 128, G = 16, 396 at D = 256, G = 8 "
            "(340 if they are behind a test of a flag), and 84 at D = 512, G = 8.",
        ),
    ),
)

reduces_warp: Limit[SplitConfig] = Limit(
    "1 if a warp broadcasts its number by redux.sync, 0 if by a shuffle, whose result is no uniform value before 9.0",
    (
        Row(
            lambda c: c.through_shared and c.modified and not c.staged,
            1,
            "With a softcap for 8.0 332 bytes at D = 128, G = 16 and 28.31 instead of 23.31 instructions, 420 bytes at "
            "G = 12 with a float32 q, 512 at G = 16 in fp8_e4m3, and 56 at D = 64, G = 16.",
        ),
        Row(
            otherwise,
            0,
            "No spill with 1, but 19.5 instead of 19.12 instructions at D = 128, G = 16 with a check for 8.0.",
        ),
    ),
)

forgets: Limit[SplitConfig] = Limit(
    "1 if what only the end of the work needs is read again, from shared memory, after the inner loop",
    (
        Row(
            lambda c: (
                (not c.on_tensor_cores and c.architecture < 9 and c.head_dim == 512)
                and (c.num_heads == 2 and c.modified and c.checked)
            ),
            0,
            "8 bytes at D = 512, G = 2 with a softcap and a check for 8.0, 64 with wide offsets too, and 25.25 instead "
            "of 24.5 instructions.",
        ),
        Row(
            otherwise,
            1,
            "16 bytes at D = 128, G = 16 in bfloat16 for 10.0, and 60 at D = 512, G = 8 with a softcap for 8.0.",
        ),
    ),
)

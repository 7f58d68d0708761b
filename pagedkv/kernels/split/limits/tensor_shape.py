"""Limits of a TensorShape."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .limit import Limit, Row, otherwise

if TYPE_CHECKING:
    from ..shape import TensorShape

tiles: Limit[TensorShape] = Limit(
    "tiles of a step",
    (
        Row(
            lambda s: s.config.row_bytes <= 128,
            2,
            "14.0 instead of 12.12 instructions with 1 at D = 64, G = 8 for 9.0, though a thread block more.",
        ),
        Row(otherwise, 1, "832 bytes with 2 at D = 128, G = 16 with a float32 q for 9.0."),
    ),
)

q_in_registers: Limit[TensorShape] = Limit(
    "most fragments of Q in registers; more of them wait in shared memory",
    (
        Row(
            lambda s: s.config.architecture < 9,
            0,
            "The slots of through_shared take the registers that few fragments would have: with 4 of them 176 bytes at "
            "D = 64, G = 16 with a softcap for 8.0, and 964 with 12 at D = 256, G = 8.",
        ),
        Row(
            lambda s: (
                s.is_fp8 and s.head_tiles == 2 and s.is_plain and s.config.architecture == 9 and not s.config.staged
            ),
            0,
            "12 bytes at D = 64, G = 16 in fp8_e4m3 for 9.0, where four thread blocks leave 128 registers a thread; 20 "
            "in fp8_e5m2.",
        ),
        Row(lambda s: s.terms == 1, 4, "92 bytes with 8 fragments at D = 256, G = 8 for 9.0."),
        Row(
            lambda s: s.is_fp8 and s.head_tiles == 1,
            12,
            "Two thread blocks either way: 23.92 instead of 21.83 instructions with 4 at D = 192, G = 8 in fp8_e4m3 "
            "with a float32 q for 9.0. With 16, all 255 registers at D = 256.",
        ),
        Row(
            lambda s: s.is_fp8 or s.config.staged,
            4,
            "Another thread block is worth more than Q in registers: with 16, 216 registers instead of 153 at D = 128, "
            "G = 24 with a float32 q for 9.0, and two thread blocks instead of three.",
        ),
        Row(
            lambda s: s.is_plain and s.config.architecture == 9,
            16,
            "Terms of q are worth a thread block less. 1656 bytes with 32 fragments at D = 256, G = 16 for 9.0.",
        ),
        Row(otherwise, 12, "88 bytes with 16 fragments at D = 128, G = 16, a float32 q and a softcap for 9.0."),
    ),
)

scales_logits: Limit[TensorShape] = Limit(
    "1 if logits are in units of log(2) before their maximum is found",
    (
        Row(
            lambda s: s.config.heads_of_warp > 8 and s.config.head_dim > 128 and not s.config.modified,
            1,
            "Both factors take registers: 24 bytes at D = 256, G = 16 for 9.0.",
        ),
        Row(
            otherwise,
            0,
            "One instruction multiplies and subtracts the pivot: 9.69 instead of 9.44 instructions at D = 128, G = 8 "
            "for 9.0.",
        ),
    ),
)

keeps_q_address: Limit[TensorShape] = Limit(
    "1 if a shuffle hides from ptxas how the address of Q is made, so that it does not make it again in each step",
    (
        Row(
            lambda s: s.is_plain,
            1,
            "ptxas would find the address again in each step: 14.31 instead of 14.19 instructions at D = 128, G = 16 "
            "for 9.0.",
        ),
        Row(
            lambda s: (
                (s.config.architecture == 9 and s.config.checked and s.is_fp8 and s.is_normalised)
                and (s.config.head_dim > 128 and s.head_tiles == 2)
            ),
            1,
            "8 bytes at D = 256, G = 16 in fp8_e4m3 with a bfloat16 or float32 q and a check for 9.0.",
        ),
        Row(otherwise, 0, "8 bytes at D = 256, G = 16 in fp8_e4m3 with a float16 q and a check for 9.0."),
    ),
)

keeps_lane: Limit[TensorShape] = Limit(
    "1 if a shuffle hides how t is made",
    (
        Row(
            lambda s: s.is_plain and s.terms > 1 and s.head_tiles == 2,
            1,
            "ptxas would find t again in each step: 44.5 instead of 43.12 instructions at D = 64, G = 16 in fp8_e4m3 "
            "with a float32 q for 9.0.",
        ),
        Row(
            lambda s: (
                s.config.architecture < 9 and s.is_fp8 and s.config.head_dim == 72 and s.config.q_kind == "float16"
            ),
            1,
            "8 bytes at D = 72, G = 8 in fp8_e4m3 for 8.0, 16 in fp8_e5m2; none at D = 56, 88, 104 and 120.",
        ),
        Row(otherwise, 0, "40 bytes at D = 256, G = 8 with a float32 q for 9.0."),
    ),
)

keeps_key_token: Limit[TensorShape] = Limit(
    "1 if a shuffle hides how the token of a tile is made whose key a lane loads",
    (
        Row(
            lambda s: s.config.masks_blocks and s.config.architecture >= 9,
            1,
            "ptxas would find it again in each step: 184 instructions for 177 at D = 128, G = 8 on 9.0; on 10.0 it "
            "takes up to 8 registers less.",
        ),
        Row(
            lambda s: (
                s.config.architecture == 9
                and (
                    (s.config.head_dim > 128 or (s.config.row_bytes == 8 and s.terms == 1))
                    or (s.head_tiles == 2 and (s.terms == 1 or s.is_fp8))
                )
            ),
            1,
            "So it would there: 8.09 instructions for 7.88 at D = 256, G = 8 for 9.0, and 41.62 for 40.5 at D = 64, G "
            "= 16 in fp8_e4m3; 208 bytes in flight for 240 at D = 192, G = 8, and 80 for 96 at D = 8 in fp8_e4m3.",
        ),
        Row(
            otherwise,
            0,
            "ptxas keeps it: with a shuffle 9.69 instead of 9.44 instructions at D = 128, G = 8 for 9.0, 17.42 instead "
            "of 17.08 at D = 96, G = 16 with a float32 q, and 13.0 instead of 12.81 at D = 128, G = 8 for 8.0.",
        ),
    ),
)

keeps_places: Limit[TensorShape] = Limit(
    "1 if shuffles hide how the place of a lane's rows in a stage is made",
    (
        Row(
            lambda s: s.is_fp8 and s.config.architecture > 9,
            0,
            "130 registers instead of 128 at D = 64, G = 48 in fp8_e4m3 for 10.0, and a thread block fewer.",
        ),
        Row(
            otherwise,
            1,
            "ptxas would find it again in each step: 39.12 instead of 37.75 instructions at D = 128, G = 24 for 9.0.",
        ),
    ),
)

in_flight: Limit[TensorShape] = Limit(
    "KiB of stages in flight on a multiprocessor; two stages are always",
    (
        Row(
            lambda s: (
                (s.config.architecture < 9 and s.config.head_dim == 128)
                and (s.config.num_heads > 32 and s.min_blocks == 3)
            ),
            96,
            "Shared memory has room for two thread blocks, not three: with 64, 48 KiB at D = 128, G = 48 for 8.0.",
        ),
        Row(
            otherwise,
            64,
            "With 32, 48 KiB instead of 96 at D = 128, G = 48 in fp8_e4m3 for 9.0. With 128, shared memory has room "
            "for one thread block instead of two: 64 KiB either way at D = 256, G = 48 for 9.0, and 48 instead of 64 "
            "at D = 128, G = 24 for 8.0.",
        ),
    ),
)

chunk: Limit[TensorShape] = Limit(
    "bytes of a row in a buffer of registers",
    (
        Row(
            lambda s: s.config.staged,
            128,
            "Rows are in shared memory: a buffer lives for a few instructions. 65.0 instead of 62.5 with 256 at "
            "D = 128, G = 48 in bfloat16 for 10.0.",
        ),
        Row(
            otherwise,
            256,
            "One buffer for K and one for V at D = 128 in 16 bits: 10.62 instead of 9.44 instructions with 128 at G = "
            "8 for 9.0. With 512, 760 bytes at D = 256, G = 16.",
        ),
    ),
)

registers_of_3: Limit[TensorShape] = Limit(
    "most registers of O, Q and buffers with which three thread blocks fit on a multiprocessor",
    (
        Row(lambda s: s.is_fp8, 96, "Widening fp8 takes registers: 168 in all at D = 64, G = 16 for 10.0."),
        Row(
            lambda s: s.terms == 1 and s.num_chunks == 1,
            132,
            "O of 16 heads of 128 dims, Q and two buffers: 165 registers in all for 9.0.",
        ),
        Row(
            lambda s: s.config.row_bytes == 256 and s.head_tiles == 1,
            132,
            "With 90 203 registers instead of 168 at D = 128, G = 8 with a float32 q for 9.0, 9.94 instead of 9.81 "
            "instructions, and two thread blocks instead of three.",
        ),
        Row(
            otherwise,
            90,
            "So do terms of q, and more chunks: with 132, and so three thread blocks, 40 bytes at D = 256, G = 8 for "
            "9.0, and 88 for 10.0.",
        ),
    ),
)

min_blocks: Limit[TensorShape] = Limit(
    "thread blocks on a multiprocessor",
    (
        Row(
            lambda s: s.config.staged and s.is_plain and s.config.head_dim <= 128 and s.terms == 1 and not s.is_fp8,
            3,
            "There is only one buffer: 160 registers in all at D = 128, G = 24 for 9.0.",
        ),
        Row(
            lambda s: s.config.staged,
            2,
            "No spill with 3 at D = 128, G = 48 with a softcap for 9.0, with 158 registers.",
        ),
        Row(
            lambda s: (
                (s.config.architecture < 9 and s.is_fp8 and s.config.head_dim == 72)
                and (s.config.q_kind != "float16" or s.config.group_size == 2)
            ),
            2,
            "32 bytes with 3 at D = 72, G = 8 in fp8_e5m2 for 8.0 with a bfloat16 q, and 40 at G = 2 with a float16 q, "
            "though t is kept.",
        ),
        Row(
            lambda s: s.config.architecture < 9 and s.registers <= 112 and not (s.config.modified or s.config.checked),
            3,
            "165 registers in all at D = 128, G = 8 for 8.0.",
        ),
        Row(
            lambda s: s.config.architecture < 9,
            2,
            "No spill with 3 at D = 128, G = 16 for 8.0, but 19.0 instead of 18.75 instructions.",
        ),
        Row(
            lambda s: s.registers <= 80 and s.config.architecture == 9 and s.is_plain,
            4,
            "With 3, 145 registers instead of 128 at D = 64, G = 16 in fp8_e4m3 with a float32 q for 9.0, 43.75 "
            "instead of 43.12 instructions, and a thread block fewer.",
        ),
        Row(
            lambda s: s.registers <= 80 and s.config.architecture == 9,
            3,
            "160 bytes with 4 at D = 64, G = 16 in fp8_e4m3 with a check for 9.0, and 20 with a softcap.",
        ),
        Row(
            lambda s: s.registers <= registers_of_3(s) and s.is_plain,
            3,
            "108 bytes with 4 at D = 128, G = 8 for 9.0.",
        ),
        Row(
            otherwise,
            2,
            "24 bytes with 3 at D = 128, G = 8 with a softcap for 9.0; at D = 256, G = 8 no spill, but 9.06 instead of "
            "8.72 instructions. A thread has 255 registers with 2 and with 1.",
        ),
    ),
)

"""Limits of a RowShape, on CUDA cores."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .limit import Limit, Row, otherwise

if TYPE_CHECKING:
    from ..cuda_cores import RowShape

vectors: Limit[RowShape] = Limit(
    "most vectors of a lane and row, on CUDA cores",
    (
        Row(
            otherwise,
            4,
            "32 lanes have 4 each at D = 512. With 8, 199 registers instead of 150 at D = 40, G = 2 for 9.0, and two "
            "thread blocks instead of three.",
        ),
    ),
)

requests: Limit[RowShape] = Limit(
    "vectors of K of a lane in a step, on CUDA cores",
    (
        Row(
            lambda r: r.config.architecture < 9,
            4,
            "Shuffles in loops take registers: 56 bytes with 8 at D = 256, G = 2 with a check for 8.0, and 384 at D = "
            "512.",
        ),
        Row(
            otherwise,
            8,
            "128 bytes of K and as many of V are in flight for each lane. With 4, 53.5 instead of 50.81 instructions "
            "at D = 128, G = 4 for 9.0; with 16, all 255 registers, and a thread block fewer.",
        ),
    ),
)

min_blocks_on_cuda_cores: Limit[RowShape] = Limit(
    "thread blocks on a multiprocessor, on CUDA cores",
    (
        Row(
            lambda r: r.config.architecture < 9,
            2,
            "48 bytes with 3 at D = 256, G = 2 with a check for 8.0, and 388 at D = 512.",
        ),
        Row(
            lambda r: r.registers <= 80 and r.config.has_options,
            3,
            "8 bytes with 4 at D = 64, G = 2 with a check for 9.0.",
        ),
        Row(lambda r: r.registers <= 80, 4, "196 bytes with 5 at D = 64, G = 2 for 9.0."),
        Row(
            lambda r: r.registers <= 96 and not r.config.has_options,
            3,
            "240 bytes with 4 at D = 128, G = 4 for 9.0.",
        ),
        Row(otherwise, 2, "12 bytes with 3 at D = 256, G = 4 with a softcap for 9.0."),
    ),
)

wide_distances: Limit[RowShape] = Limit(
    "1 if the distances of ALiBi take 64 bits, on CUDA cores",
    (
        Row(
            lambda r: r.config.architecture == 9,
            1,
            "200 registers instead of 168 at D = 128, G = 4 with a softcap for 9.0, and two thread blocks instead of "
            "three.",
        ),
        Row(
            otherwise,
            0,
            "35.25 instead of 34.75 instructions at D = 64, G = 4 with a softcap for 8.0, and 169 registers instead of "
            "168, so two thread blocks instead of three.",
        ),
    ),
)

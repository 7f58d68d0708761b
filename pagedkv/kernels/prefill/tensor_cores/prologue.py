"""What the arguments of a kernel on tensor cores mean for the rows of a thread block; computed before the loop."""

from __future__ import annotations

from ...device.cache_rows import make_scale_of
from ...device.halves import software_factor
from ...device.intrinsics.thread import address, bits_float
from ...device.language import float32, int64, uint32
from ...device.logits import LOG2E, positive
from ...device.source import Steps, device_function
from ...device.visible import first_key, last_key
from ..arguments import KeySpan, TileOutput
from ..config import TensorConfig
from .tile import TileShape


def make_prologue(config: TensorConfig, shape: TileShape) -> Steps:
    """The device functions ``output_of``, ``span_of`` and ``factors_of``."""
    ROWS, KEYS, GROUP_SIZE, MODIFIED = shape.rows, shape.keys, config.group_size, config.modified
    FACTOR = float32(software_factor(config.kv_kind, config.hardware_fp8) if config.q_kind == "float16" else 1.0)

    scale_of = make_scale_of(config.kv_kind)

    @device_function
    def output_of(out, strides, lse, sinks, v_scale, v_number, item, kv_head, num_heads):
        """Where the rows of the item's sequence and a KV head go."""
        head = uint32(kv_head * GROUP_SIZE)
        where = address(out) + int64(item.start) * strides[0] + int64(head) * strides[1]
        row = int64(item.start) * num_heads + int64(head)
        v_factor = scale_of(v_scale, v_number, kv_head)
        return TileOutput(where, strides[0], strides[1], lse, row, num_heads, sinks, head, float32(v_factor * FACTOR))

    @device_function
    def span_of(item, visible):
        """The first key that a row of the item sees, and the KeySpan of its rows."""
        first_token = uint32(item.first_row // uint32(GROUP_SIZE))
        last_row = min(uint32(item.first_row + (ROWS - 1)), uint32(item.num_rows - 1))
        first_position = uint32(item.context + first_token)
        last_position = uint32(item.context + uint32(last_row // uint32(GROUP_SIZE)))
        low, last = first_key(first_position, visible), last_key(last_position, visible, item.seq_len)
        low_of_last, everyone = first_key(last_position, visible), last_key(first_position, visible, item.seq_len)
        unmasked = uint32(uint32(uint32(low_of_last + (KEYS - 1)) // uint32(KEYS)) * uint32(KEYS))
        end = uint32(uint32(uint32(everyone + 1) // uint32(KEYS)) * uint32(KEYS))
        num_unmasked = uint32(end - unmasked) if end > unmasked else uint32(0)
        return low, KeySpan(uint32(uint32(low // uint32(KEYS)) * uint32(KEYS)), last, unmasked, num_unmasked)

    @device_function
    def factors_of(scale, k_scale, k_number, kv_head):
        """The factor of products, and the one that takes logits to units of log(2)."""
        k_factor = scale_of(k_scale, k_number, kv_head)
        factor = float32(float32(bits_float(uint32(scale)) * k_factor) * FACTOR)
        unit = float32(1) if MODIFIED else float32(abs(factor) * LOG2E)
        return factor, positive(unit)

    return Steps(output_of, span_of, factors_of)

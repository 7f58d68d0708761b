"""Pictures as SVG: the map of a pool, and the bytes and banks that lanes access."""

from .lane_map import LaneAccess, draw_banks, draw_bytes
from .svg import Svg

__all__ = ["LaneAccess", "Svg", "draw_banks", "draw_bytes"]

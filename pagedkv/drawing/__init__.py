"""Pictures: the map of a pool, the bytes and banks that lanes take, and whether matplotlib is here for the others."""

from .lane_map import LaneAccess, draw_banks, draw_bytes
from .svg import Svg

__all__ = ["LaneAccess", "Svg", "draw_banks", "draw_bytes"]

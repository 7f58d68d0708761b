"""vprintf: what a kernel prints in the format of CUDA's printf, after the thread block and the thread of each call."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from typing import Any

import numpy as np

from ..ptx.instruction import Instruction
from ..ptx.types import GLOBAL_BASE, VIEW_DTYPE
from ..state.faults import MemoryFault
from ..state.frame import Mask
from ..state.memory import INITIALISED
from ..translation.mem_op import MemOp
from .access import Access

_CONVERSION = re.compile(r"%([-+ #0]*)(\*|\d+)?(\.(?:\*|\d*))?(hh|h|ll|l|j|z|t|L)?([diouxXpeEfFgGaAcs%])")
_WIDE = ("ll", "l", "j", "z", "t")
_PIECE = 256


def argument_views(form: str) -> list[str]:
    """The views of the arguments that a format takes, in their order; "str" for the address of a string."""
    views = []
    for _, width, precision, length, kind in _CONVERSION.findall(form):
        views += ["s32"] * ((width == "*") + (precision == ".*"))
        if kind in "di":
            views.append("s64" if length in _WIDE else "s32")
        elif kind in "ouxX":
            views.append("u64" if length in _WIDE else "u32")
        elif kind != "%":
            views.append({"c": "s32", "p": "u64", "s": "str"}.get(kind, "f64"))
    return views


def formatted(form: str, values: Iterator[Any]) -> str:
    """The text of a printf; a value is an int, a float, or a str for %s."""

    def one(match: re.Match[str]) -> str:
        flags, width, precision, length, kind = (part or "" for part in match.groups())
        if kind == "%":
            return "%"
        width = str(next(values)) if width == "*" else width
        precision = f".{next(values)}" if precision == ".*" else precision
        value = next(values)
        if precision.startswith(".-"):  # as if it were not there
            precision = ""
        if width.startswith("-"):
            flags, width = flags + "-", width[1:]
        if kind == "c":  # C makes it an unsigned char
            value = bytes([value & 0xFF]).decode(errors="replace")
        if kind in "diouxXp":
            return _integer(flags, int(width or 0), precision, kind, _narrow(value, length, kind))
        if kind in "eEfFgG" and not np.isfinite(value):
            flags = flags.replace("0", "")
        if kind in "aA":
            value = re.sub(r"\.?0+p", "p", value.hex()) if np.isfinite(value) else str(value)
            value, precision, kind = (value.upper() if kind == "A" else value), "", "s"
        return f"%{flags}{width}{precision}{kind}" % value

    return _CONVERSION.sub(one, form)


def _narrow(value: int, length: str, kind: str) -> int:
    """An int as a char or a short, which a format asks for."""
    if length not in ("hh", "h"):
        return value
    bits = 8 if length == "hh" else 16
    value &= (1 << bits) - 1
    return value - (1 << bits) if kind in "di" and value >> (bits - 1) else value


def _integer(flags: str, width: int, precision: str, kind: str, value: int) -> str:
    digits = format(abs(value), {"o": "o", "x": "x", "X": "X", "p": "x"}.get(kind, "d"))
    if precision:
        least = int(precision[1:] or 0)
        digits = digits.rjust(least, "0") if value or least else ""
    sign = ""
    if kind in "di":
        sign = "-" if value < 0 else "+" if "+" in flags else " " if " " in flags else ""
    elif kind == "p" or ("#" in flags and kind in "xX" and value):
        sign = "0X" if kind == "X" else "0x"
    elif "#" in flags and kind == "o" and not digits.startswith("0"):
        digits = "0" + digits
    if "-" in flags:
        return (sign + digits).ljust(width)
    if "0" in flags and not precision:
        digits = digits.rjust(width - len(sign), "0")
    return (sign + digits).rjust(width)


class Printer:
    """The vprintf of one batch. Each thread has its arguments in a buffer, at their natural alignment."""

    def __init__(self, access: Access) -> None:
        self._access, self._frame = access, access.frame

    def vprintf(self, ins: Instruction, form: np.ndarray, buffer: np.ndarray, m: Mask) -> np.ndarray:
        """Print for each lane, in their order, and return the number of arguments that each has printed."""
        f = self._frame
        counts = np.zeros(f.num_lanes, np.uint32)
        lanes = f.lanes if m is None else np.flatnonzero(m)
        texts: dict[int, str] = {}
        for address in np.unique(form[lanes]).tolist():
            mine = lanes[form[lanes] == address]
            text = self._string(address, ins, int(mine[0]))
            columns = self._arguments(ins, text, buffer, mine)
            counts[mine] = len(columns)
            for lane, *values in zip(mine.tolist(), *columns, strict=True):
                texts[lane] = formatted(text, iter(values))
        for lane in sorted(texts):
            block = f.cta_coordinates(int(f.cta[lane]))
            sys.stdout.write(f"thread block {block}, thread {f.thread_coordinates(lane)}: {texts[lane]}")
        return counts

    def _arguments(self, ins: Instruction, form: str, buffer: np.ndarray, lanes: np.ndarray) -> list[list[Any]]:
        """For each argument of a format, its values by lane."""
        active = np.zeros(self._frame.num_lanes, np.bool_)
        active[lanes] = True
        columns: list[list[Any]] = []
        offset = 0
        for kind in argument_views(form):
            view = "u64" if kind == "str" else kind
            size = VIEW_DTYPE[view].itemsize
            offset = (offset + size - 1) // size * size
            register = np.zeros(self._frame.num_lanes, VIEW_DTYPE[view])
            op = MemOp(ins, "load", "generic", size)
            self._access.ld_generic(op, buffer + np.uint64(offset), view, active, (register,))
            values = register[lanes].tolist()
            if kind == "str":
                values = [
                    self._string(address, ins, lane) for address, lane in zip(values, lanes.tolist(), strict=True)
                ]
            columns.append(values)
            offset += size
        return columns

    def _string(self, address: int, ins: Instruction, lane: int) -> str:
        """The bytes in global memory up to the next zero."""
        memory, begin = self._access.memory, address - GLOBAL_BASE
        end = begin
        while 0 <= end < memory.extent:
            piece = slice(end, min(end + _PIECE, memory.extent))
            memory.fetch(np.arange(piece.start, piece.stop), 1)
            stops = np.flatnonzero((memory.space.data[piece] == 0) | (memory.space.shadow[piece] != INITIALISED))
            if len(stops):
                end += int(stops[0])
                if memory.space.shadow[end] == INITIALISED:
                    return bytes(memory.space.data[begin:end]).decode(errors="replace")
                break
            end = piece.stop
        what = "vprintf of a string that no zero ends"
        self._frame.fail(MemoryFault, what, ins, lane, address, memory.describe(address))

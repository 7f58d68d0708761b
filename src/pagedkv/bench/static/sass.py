"""What the machine code of a kernel (SASS) says about its loads from global memory.

There is no public description of the encoding. From compute capability 7.0 on an instruction has 16 bytes: the low 12
bits are the opcode; a load has its width in bits 73 to 75, and in bits 110 to 112 the scoreboard that it releases when
its data is there; bits 116 to 121 are the scoreboards that an instruction waits for before it starts. A copy from
global to shared memory has its width where a load has it, or one bit higher from 10.0 on; who waits for all groups of
copies but the last n has n in bits 38 to 43. A branch has the predicate that it depends on in bits 12 to 15, and in
bits 34 to 81 how far it goes, in words of 4 bytes from its end; from 9.0 on the lowest 8 bits of that are bits 16 to
23. After Jia et al., "Dissecting the NVIDIA Volta GPU architecture via microbenchmarking", 2018.
"""

from __future__ import annotations

import struct
from typing import NamedTuple

_INSTRUCTION_BYTES = 16
_LOADS = (0x381, 0x981)  # LDG, without and with a descriptor
_COPY, _END_OF_GROUP, _WAIT = 0xFAE, 0x9AF, 0x91A  # LDGSTS, LDGDEPBAR, DEPBAR
_BARRIER = 0xB1D  # BAR
_BRANCH = 0x947  # BRA
_MMA = 0x23C  # HMMA
_ALWAYS = 7
_WIDTHS = (1, 1, 2, 2, 4, 8, 16)
_NUM_SCOREBOARDS = 6


def code_of(cubin: bytes, entry: str) -> bytes:
    """The instructions of a kernel.

    Parameters
    ----------
    cubin : bytes
        A 64-bit ELF file.
    entry : str
        Symbol of the kernel.

    Raises
    ------
    ValueError
        There is no such kernel in the file.
    """
    (offset,) = struct.unpack_from("<Q", cubin, 0x28)
    size, count, names = struct.unpack_from("<HHH", cubin, 0x3A)
    headers = [struct.unpack_from("<IIQQQQ", cubin, offset + i * size) for i in range(count)]
    wanted, text = f".text.{entry}\0".encode(), headers[names][4]
    for name, _, _, _, start, length in headers:
        if cubin[text + name :].startswith(wanted):
            return cubin[start : start + length]
    raise ValueError(f"cubin must have the kernel {entry}")


class Loads(NamedTuple):
    """The loads of a stretch of code.

    Attributes
    ----------
    in_flight : int
        The most bytes that a thread has asked for and not yet waited for.
    narrowest, widest : int
        Bytes of one load.
    """

    in_flight: int
    narrowest: int
    widest: int


def loads_of(code: bytes, narrowest: int = 1) -> list[Loads]:
    """The loads from global memory between barriers of the thread block.

    Instructions are taken in the order of their addresses, as if no branch was taken; a load is in flight until the
    first instruction that waits for its scoreboard. A loop whose loads go on into its next turn is counted as one turn.

    Parameters
    ----------
    code : bytes
    narrowest : int
        Loads of fewer bytes do not count.

    Returns
    -------
    list of Loads
        One for each stretch up to a barrier or the end, in their order; those without a load are left out.
    """
    waiting = [0] * _NUM_SCOREBOARDS
    result: list[Loads] = []
    is_new = True
    for start in range(0, len(code), _INSTRUCTION_BYTES):
        word = int.from_bytes(code[start : start + _INSTRUCTION_BYTES], "little")
        opcode, width, scoreboard = word & 0xFFF, word >> 73 & 7, word >> 110 & 7
        for i in range(_NUM_SCOREBOARDS):
            if word >> 116 + i & 1:
                waiting[i] = 0
        if opcode == _BARRIER:
            is_new = True
        elif opcode in _LOADS and _WIDTHS[width] >= narrowest and scoreboard < _NUM_SCOREBOARDS:
            waiting[scoreboard] += _WIDTHS[width]
            last = Loads(0, _WIDTHS[width], 0) if is_new else result.pop()
            least, most = min(last.narrowest, _WIDTHS[width]), max(last.widest, _WIDTHS[width])
            result.append(Loads(max(last.in_flight, sum(waiting)), least, most))
            is_new = False
    return result


def copies_of(code: bytes, capability: tuple[int, int]) -> Loads | None:
    """The copies from global to shared memory (cp.async), as `loads_of`: in flight until their group is waited for.

    Parameters
    ----------
    code : bytes
    capability : tuple of int
        Compute capability.

    Returns
    -------
    Loads or None
        None if there are no copies.
    """
    groups, widths, most = [0], [], 0
    for start in range(0, len(code), _INSTRUCTION_BYTES):
        word = int.from_bytes(code[start : start + _INSTRUCTION_BYTES], "little")
        if word & 0xFFF == _COPY:
            widths.append(_width(word, capability))
            groups[-1] += widths[-1]
            most = max(most, sum(groups))
        elif word & 0xFFF == _END_OF_GROUP:
            groups.append(0)
        elif word & 0xFFF == _WAIT:
            groups = groups[-1 - (word >> 38 & 63) :]
    return Loads(most, min(widths), max(widths)) if widths else None


def _width(word: int, capability: tuple[int, int]) -> int:
    """Bytes that a load or a copy asks for; 0 for other instructions."""
    if word & 0xFFF == _COPY:
        return _WIDTHS[word >> (74 if capability >= (10, 0) else 73) & 7]
    return _WIDTHS[word >> 73 & 7] if word & 0xFFF in _LOADS else 0


class Loop(NamedTuple):
    """A loop, on the shortest way through it.

    Attributes
    ----------
    instructions : int
    bytes_loaded : int
        Of global memory, by a thread.
    widest : int
        Bytes of one load.
    """

    instructions: int
    bytes_loaded: int
    widest: int


def loop_of(code: bytes, capability: tuple[int, int], narrowest: int) -> Loop | None:
    """The loop with the widest loads, and of these the most, in a turn that takes every branch which makes it shorter.

    If there are loops with products of tensor cores, it is one of these. Of several such loops it is the longest: the
    one that does most with what it loads.

    Parameters
    ----------
    code : bytes
    capability : tuple of int
        Compute capability.
    narrowest : int
        Loads of fewer bytes do not count.

    Returns
    -------
    Loop or None
        None if no loop loads anything.
    """
    words = [int.from_bytes(code[i : i + 16], "little") for i in range(0, len(code), _INSTRUCTION_BYTES)]
    targets = {at: _target(at, word, capability) for at, word in enumerate(words) if word & 0xFFF == _BRANCH}
    ranges = [(first, last) for last, first in targets.items() if 0 <= first < last]
    multiplying = [(first, last) for first, last in ranges if any(x & 0xFFF == _MMA for x in words[first:last])]
    loops = [_shortest(words, targets, *range_, narrowest, capability) for range_ in multiplying or ranges]
    loading = [loop for loop in loops if loop.bytes_loaded]
    return min(loading, key=lambda loop: (-loop.widest, -loop.bytes_loaded, -loop.instructions), default=None)


def _target(at: int, word: int, capability: tuple[int, int]) -> int:
    """The instruction that a branch goes to."""
    distance = word >> 34 & (1 << 48) - 1
    distance -= distance >> 47 << 48
    if capability >= (9, 0):
        distance = distance << 8 | word >> 16 & 0xFF
    return at + 1 + 4 * distance // _INSTRUCTION_BYTES


def _shortest(
    words: list[int], targets: dict[int, int], first: int, last: int, narrowest: int, capability: tuple[int, int]
) -> Loop:
    ways: dict[int, Loop] = {first: Loop(0, 0, 0)}  # the shortest way to an instruction
    for at in range(first, last):
        if at not in ways:
            continue
        word, way = words[at], ways[at]
        width = _width(word, capability)
        width = width if width >= narrowest else 0
        after = Loop(way.instructions + 1, way.bytes_loaded + width, max(way.widest, width))
        following = [at + 1]
        if first < targets.get(at, first) <= last and targets[at] > at:
            following = [targets[at]] if word >> 12 & 15 == _ALWAYS else [at + 1, targets[at]]
        for then in following:
            ways[then] = min(ways.get(then, after), after)
    way = ways.get(last, Loop(0, 0, 0))
    return way._replace(instructions=way.instructions + 1)

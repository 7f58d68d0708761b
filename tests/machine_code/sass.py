"""Reads loads from global memory, copies and loops off a kernel's machine code (SASS).

NVIDIA does not document the encoding. From compute capability 7.0 on, an instruction is 16 bytes. Its low 12 bits are
the opcode, and bits 116 to 121 the scoreboards that it waits for before it starts. A load has its width in bits 73 to
75, and in bits 110 to 112 the scoreboard that it releases when its data arrives. Bits 77 to 80 are 7 in a load that is
to see what other thread blocks have written (ld.global.cg): it is told apart. A copy from global to shared memory
has its width in the same bits, from 10.0 on one bit higher; a wait for all groups of copies but the last n has n in
bits 38 to 43. A branch has its predicate in bits 12 to 15, another one in bits 87 to 90, and in bit 91 whether it is
for lanes that have diverged; and in bits 34 to 81 its distance in words of 4 bytes from
its own end; from 9.0 on, the distance has 8 more low bits, in bits 16 to 23. Registers are in bits 16 to 23 (the
result), 24 to 31, 32 to 39 and 64 to 71; a wgmma has n / 8 - 1 in bits 53 to 57. Bit 47 tells a wait for wgmma from the
fence before them. After Jia et al., "Dissecting the NVIDIA Volta GPU architecture via microbenchmarking", 2018.
"""

from __future__ import annotations

import struct
from typing import NamedTuple

_INSTRUCTION_BYTES = 16
_LOADS = (0x381, 0x981)  # LDG, without and with a descriptor
_STRONG = 7
_COPY, _END_OF_GROUP, _WAIT = 0xFAE, 0x9AF, 0x91A  # LDGSTS, LDGDEPBAR, DEPBAR
_BARRIER, _NAMED_BARRIER = 0xB1D, 0x51D  # BAR, whose number is a constant or in a register
_BRANCH, _UNIFORM_BRANCH = 0x947, 0x547  # BRA, and BRA.U, whose predicate is in bits 24 to 27
_EXIT = 0x94D
_WGMMA = (0x9F0, 0xDF0)  # HGMMA, with A in shared memory and in registers
_MMA, _LOAD_MATRICES = (0x23C, *_WGMMA), 0x83B  # HMMA, LDSM
_WARPGROUP = 0x9C5  # WARPGROUP.ARRIVE and .DEPBAR
_MUFU, _EX2 = 0x308, 2  # and which function it computes, in bits 74 to 77
_MOVE, _MULTIPLY_AND_ADD, _ZERO = 0x002, 0x024, 255  # MOV and IMAD, in the low 9 bits; register RZ
_MOVE_REGISTER = 0x202  # of another vector register, and not of a uniform one or a constant
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
        The file has no such kernel.
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
    """The loads in a stretch of code.

    Attributes
    ----------
    in_flight : int
        The most bytes that a thread has requested but not yet waited for.
    narrowest, widest : int
        Bytes of one load.
    """

    in_flight: int
    narrowest: int
    widest: int


def loads_of(code: bytes, narrowest: int = 1, *, strong: bool = False) -> list[Loads]:
    """The loads from global memory, split at barriers of the thread block.

    Goes through instructions by address, as if no branch were taken. A load is in flight until the first instruction
    that waits for its scoreboard. If the loads of a loop last into its next turn, only one turn counts.

    Parameters
    ----------
    code : bytes
    narrowest : int
        Loads of fewer bytes do not count.
    strong : bool
        Only loads of what other thread blocks have written in the same launch count, instead of all others.

    Returns
    -------
    list of Loads
        One for each stretch that has loads, in order.
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
        elif _is_load(word, strong) and _WIDTHS[width] >= narrowest and scoreboard < _NUM_SCOREBOARDS:
            waiting[scoreboard] += _WIDTHS[width]
            last = Loads(0, _WIDTHS[width], 0) if is_new else result.pop()
            least, most = min(last.narrowest, _WIDTHS[width]), max(last.widest, _WIDTHS[width])
            result.append(Loads(max(last.in_flight, sum(waiting)), least, most))
            is_new = False
    return result


def copies_of(code: bytes, capability: tuple[int, int]) -> Loads | None:
    """The copies from global to shared memory (cp.async), in flight until the code waits for their group.

    Parameters
    ----------
    code : bytes
    capability : tuple of int
        Compute capability.

    Returns
    -------
    Loads or None
        None if the code has no copies.
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


def _is_load(word: int, strong: bool) -> bool:
    return word & 0xFFF in _LOADS and (word >> 77 & 15 == _STRONG) == strong


def _width(word: int, capability: tuple[int, int]) -> int:
    """Bytes that a copy, or a load of what no thread writes meanwhile, requests; 0 for other instructions."""
    if word & 0xFFF == _COPY:
        return _WIDTHS[word >> (74 if capability >= (10, 0) else 73) & 7]
    return _WIDTHS[word >> 73 & 7] if _is_load(word, strong=False) else 0


class Loop(NamedTuple):
    """A turn of a loop, on the shortest path.

    Attributes
    ----------
    instructions : int
    bytes_loaded : int
        From global memory, by a thread.
    widest : int
        Bytes of one load.
    """

    instructions: int
    bytes_loaded: int
    widest: int


def loop_of(code: bytes, capability: tuple[int, int], narrowest: int) -> Loop | None:
    """The loop with the widest loads, and of those with the most, on its shortest path.

    Loads of what other thread blocks have written do not count. If any loops use tensor cores, only they count. Between
    equals the longest wins, as it does most with what it loads.

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
        None if no loop has loads.
    """
    words = [int.from_bytes(code[i : i + 16], "little") for i in range(0, len(code), _INSTRUCTION_BYTES)]
    targets = _targets(words, capability)
    ranges = _loops(words, targets)
    multiplying = [(first, last) for first, last in ranges if any(x & 0xFFF in _MMA for x in words[first:last])]
    loops = [_shortest(words, targets, *range_, narrowest, capability) for range_ in multiplying or ranges]
    loading = [loop for loop in loops if loop.bytes_loaded]
    return min(loading, key=lambda loop: (-loop.widest, -loop.bytes_loaded, -loop.instructions), default=None)


def _targets(words: list[int], capability: tuple[int, int]) -> dict[int, int]:
    """By index of a branch, the one that it jumps to."""
    branches = (at for at, word in enumerate(words) if word & 0xFFF in (_BRANCH, _UNIFORM_BRANCH))
    return {at: _target(at, words[at], capability) for at in branches}


def _is_always_taken(word: int) -> bool:
    if word & 0xFFF == _UNIFORM_BRANCH:
        return word >> 24 & 15 == _ALWAYS
    return word >> 12 & 15 == _ALWAYS and word >> 87 & 31 == _ALWAYS


def _following(at: int, words: list[int], targets: dict[int, int]) -> list[int]:
    """The instructions further on that may come after one: none if it ends the kernel, or always jumps back."""
    leaves = at in targets or words[at] & 0xFFF == _EXIT
    following = [] if leaves and _is_always_taken(words[at]) else [at + 1]
    return [*following, targets[at]] if targets.get(at, 0) > at else following


def _target(at: int, word: int, capability: tuple[int, int]) -> int:
    """The index of the instruction that a branch jumps to."""
    distance = word >> 34 & (1 << 48) - 1
    distance -= distance >> 47 << 48
    if capability >= (9, 0):
        distance = distance << 8 | word >> 16 & 0xFF
    return at + 1 + 4 * distance // _INSTRUCTION_BYTES


def _loops(words: list[int], targets: dict[int, int]) -> list[tuple[int, int]]:
    """The first and last instruction of each loop.

    Not every jump back ends one: what ptxas moves behind the end of a kernel jumps back, too. Ways are followed forward
    alone: a loop that is entered at its end would not be seen.
    """
    return [
        (first, last) for last, first in targets.items() if 0 <= first < last and _leads(words, targets, first, last)
    ]


def _leads(words: list[int], targets: dict[int, int], first: int, last: int) -> bool:
    """Whether one instruction may come after another one, further on."""
    reached = {first}
    for at in range(first, last):
        if at in reached:
            reached.update(_following(at, words, targets))
    return last in reached


def _shortest(
    words: list[int], targets: dict[int, int], first: int, last: int, narrowest: int, capability: tuple[int, int]
) -> Loop:
    ways: dict[int, Loop] = {first: Loop(0, 0, 0)}  # the shortest path to an instruction
    for at in range(first, last):
        if at not in ways:
            continue
        word, way = words[at], ways[at]
        width = _width(word, capability)
        width = width if width >= narrowest else 0
        after = Loop(way.instructions + 1, way.bytes_loaded + width, max(way.widest, width))
        for then in _following(at, words, targets):
            ways[then] = min(ways.get(then, after), after)
    return ways[last]._replace(instructions=ways[last].instructions + 1)


class Products(NamedTuple):
    """A turn of a loop on tensor cores that skips no copy, on the shortest such path.

    Attributes
    ----------
    instructions, mma, load_matrices, copies : int
        All of them, and those that multiply, that load operands from shared memory (ldmatrix), and that copy to it.
    """

    instructions: int
    mma: int
    load_matrices: int
    copies: int


def products_of(code: bytes, capability: tuple[int, int]) -> Products | None:
    """The loop with the most instructions that multiply, the shortest of several, and none around another such loop.

    The turn before the last copies nothing, and is shorter than the others: paths with the most copies count.

    Parameters
    ----------
    code : bytes
    capability : tuple of int
        Compute capability.

    Returns
    -------
    Products or None
        None if no loop multiplies.
    """
    words = [int.from_bytes(code[i : i + 16], "little") for i in range(0, len(code), _INSTRUCTION_BYTES)]
    targets = _targets(words, capability)
    first, last = _densest(words, targets)
    if not last:
        return None
    ways = {first: (0, 0, 0, 0)}  # to an instruction: copies, less than none, then what is counted
    for at in range(first, last):
        if at not in ways:
            continue
        opcode, (copies, instructions, mma, matrices) = words[at] & 0xFFF, ways[at]
        after = (
            copies - (opcode == _COPY),
            instructions + 1,
            mma + (opcode in _MMA),
            matrices + (opcode == _LOAD_MATRICES),
        )
        for then in _following(at, words, targets):
            ways[then] = min(ways.get(then, after), after)
    copies, instructions, mma, matrices = ways[last]
    return Products(instructions + 1, mma, matrices, -copies)


def _densest(words: list[int], targets: dict[int, int]) -> tuple[int, int]:
    """The shortest loop with the most products, as its first and last instruction's indices; (0, 0) if none has any.

    A loop around another one that has products does not count.
    """
    counted = [(sum(x & 0xFFF in _MMA for x in words[a:b]), a - b, a, b) for a, b in _loops(words, targets)]
    counted = [each for each in counted if each[0]]
    inner = [x for x in counted if not any(x[2] <= y[2] and y[3] < x[3] for y in counted)]
    return max(inner, default=(0, 0, 0, 0))[2:]


def moves_between(code: bytes, capability: tuple[int, int]) -> int:
    """Moves of operands between the wgmma of the loop that `products_of` finds, of accumulators and of A.

    From one product to the next, some cost more than a product does.

    Parameters
    ----------
    code : bytes
    capability : tuple of int
        Compute capability.
    """
    words = [int.from_bytes(code[i : i + 16], "little") for i in range(0, len(code), _INSTRUCTION_BYTES)]
    first, last = _densest(words, _targets(words, capability))
    products = [at for at in range(first, last) if words[at] & 0xFFF in _WGMMA]
    operands = {register for at in products for register in _operands(words[at])}
    between = words[products[0] : products[-1]] if products else []
    return sum(not operands.isdisjoint(_moved(word)) for word in between)


class Overlap(NamedTuple):
    """What a turn of the loop on warpgroups does before its products, and outside of its waits for them.

    Attributes
    ----------
    before : int
        Instructions from the last barrier before the first wgmma to this one.
    exponentials : int
        Those that do not stand between the first wait for products and the last one, by their addresses.
    """

    before: int
    exponentials: int


def overlap_of(code: bytes, capability: tuple[int, int]) -> Overlap:
    """The Overlap of the loop that `products_of` finds, which has wgmma.

    Parameters
    ----------
    code : bytes
    capability : tuple of int
        Compute capability.
    """
    words = [int.from_bytes(code[i : i + 16], "little") for i in range(0, len(code), _INSTRUCTION_BYTES)]
    first, last = _densest(words, _targets(words, capability))
    product = next(at for at in range(first, last) if words[at] & 0xFFF in _WGMMA)
    barrier = max(at for at in range(first, product) if words[at] & 0xFFF in (_BARRIER, _NAMED_BARRIER))
    waits = [at for at in range(first, last) if words[at] & 0xFFF == _WARPGROUP and words[at] >> 47 & 1]
    exponentials = [at for at in range(first, last) if words[at] & 0xFFF == _MUFU and words[at] >> 74 & 15 == _EX2]
    return Overlap(product - barrier, sum(not waits[0] < at < waits[-1] for at in exponentials))


def _operands(word: int) -> list[int]:
    """The registers of a wgmma: n / 2 accumulators, and those of A if it is no descriptor."""
    target, a, n = word >> 16 & 0xFF, word >> 24 & 0xFF, 8 * ((word >> 53 & 31) + 1)
    return [*range(target, target + n // 2), *(range(a, a + 4) if word & 0xFFF == _WGMMA[1] else ())]


def _moved(word: int) -> tuple[int, ...]:
    """The registers between which an instruction moves a value: none if it is no move."""
    target, a, b, c = (word >> bit & 0xFF for bit in (16, 24, 32, 64))
    if word & 0x1FF == _MULTIPLY_AND_ADD and a == _ZERO:
        return target, c
    if word & 0x1FF == _MOVE:
        return (target, b) if word & 0xFFF == _MOVE_REGISTER else (target,)
    return ()

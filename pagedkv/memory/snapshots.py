"""Snapshots: to which lengths sequences with states can go back, and which of their states prompts can find."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from ..commit import Write
from .ids import NO_BLOCKS, UNUSED, Int64Array
from .rows import SequenceRows


def plan_snapshots(rows: SequenceRows, which: Int64Array, lasting: npt.NDArray[np.bool]) -> list[Write]:
    """Let prompts find the states of rows that stand for full blocks which can be found."""
    if rows.states is None or rows.chains is None:
        return []
    size, lens = rows.block_size, rows.lens[which]
    above = rows.ends(which, np.maximum(lens - size, 0))
    there = (lens > 0) & (rows.chains.num_found[which] * size == lens)
    there &= (above != UNUSED) | (lens == size)  # a window passed it since another row's snapshot here has gone
    which = which[there]
    ends, salts = rows.ends(which, lens[there]), rows.chains.salts[which]
    return rows.states.plan_snapshots(which, ends, above[there], salts, lasting[there])


def lens_with_state(rows: SequenceRows, row: int) -> Int64Array:
    """The lengths to which a row can be cut down, ascending: 0, those of its snapshots, and that of its state or more.

    Tokens behind its state are not computed yet. A state that is lost has no length.
    """
    assert rows.states is not None
    one, length, snapshots = np.array([row]), int(rows.lens[row]), NO_BLOCKS
    if rows.chains is not None and (num_found := int(rows.chains.num_found[row])):
        chain = rows.ends(one.repeat(num_found), np.arange(1, num_found + 1) * rows.block_size)
        snapshots = rows.states.along(chain)[0] * rows.block_size
    stands_for = int(rows.states.lens_of(one)[0])
    own = NO_BLOCKS if stands_for < 0 else np.arange(stands_for, length + 1)
    return np.union1d(snapshots, np.append(own, 0))


def require_lens(rows: SequenceRows, which: Int64Array, lens: Int64Array) -> None:
    """Raise ValueError unless there is a state for each row at its new length, at most what it has now."""
    assert rows.states is not None
    stands_for = rows.states.lens_of(which)
    possible = (lens == 0) | ((stands_for >= 0) & (stands_for <= lens))
    for i in (~possible).nonzero()[0].tolist():
        there = lens_with_state(rows, int(which[i]))
        place = int(there.searchsorted(lens[i]))
        if lens[i] not in there:
            nearest = " and ".join(map(str, there[place - 1 : place + 1]))
            raise ValueError(
                f"length must be one for which sequence {rows.handles.of(which)[i]} has a state, got {lens[i]}: "
                f"it has one for {nearest}"
            )


def require_written(rows: SequenceRows, which: Int64Array) -> None:
    """Raise ValueError unless the state of each row stands for all its tokens."""
    assert rows.states is not None
    lens, stands_for = rows.lens[which], rows.states.lens_of(which)
    wrong = (stands_for != lens).nonzero()[0]
    if len(wrong):
        i = wrong[0]
        seq = rows.handles.of(which)[i]
        if stands_for[i] < 0:
            raise ValueError(
                f"the state of sequence {seq} is lost, since write_states was interrupted: truncate it to "
                f"{lens_with_state(rows, int(which[i]))[-1]}, and compute what follows again"
            )
        raise ValueError(
            f"seqs must have states that stand for all their tokens, but that of sequence {seq} stands for "
            f"{stands_for[i]} of {lens[i]}: call write_states after the pass, and then commit"
        )

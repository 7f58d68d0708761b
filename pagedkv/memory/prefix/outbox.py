"""Outbox: the events of a prefix cache that its listener has yet to get."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from ...commit import Write
from ..groups import LayerGroups
from ..ids import Int64Array
from .digests import Digests
from .events import BlockRemoved, BlockStored, Event, Listener

_KINDS = {True: "full_attention", False: "sliding_window"}  # of layers, by whether they see all tokens
_STATES = "mamba"  # vLLM's name for states of every kind


class Outbox:
    """Makes events, keeps them with the change that they report, and delivers them after it.

    Parameters
    ----------
    listener : callable
        Called with each event.
    medium : str
        The medium that events name: where the caches are.
    groups : LayerGroups
    block_size : int
        P.
    has_states : bool
        Whether sequences have states; their snapshots are a group of their own then, behind those of layers.
    """

    def __init__(
        self, listener: Listener, medium: str, groups: LayerGroups, block_size: int, *, has_states: bool
    ) -> None:
        self._listener, self._medium, self._block_size = listener, medium, block_size
        self._kinds = [(_KINDS[group.window is None], group.window) for group in groups.groups]
        if has_states:
            self._kinds.append((_STATES, None))
        self._events: list[list[Event]] = [[]]

    @property
    def group_of_states(self) -> int:
        """The group of snapshots, if sequences have states."""
        return len(self._kinds) - 1

    def plan(self, events: list[Event]) -> list[Write]:
        """Add events to those that are yet to be delivered."""
        return [(self._events, 0, self._events[0] + events)]

    def emit(self) -> None:
        """Call the listener with each event, and raise the first of its exceptions after the last event.

        An event for which it raises an exception counts as delivered; one that an interrupt cuts short comes again.
        """
        errors, events = [], self._events[0]
        while events:
            try:
                self._listener(events[0])
            except Exception as error:
                errors.append(error)
            del events[0]
        if errors:
            try:
                raise errors[0]
            finally:
                del errors  # they refer to this frame

    def removed(self, digests: Digests, groups: Int64Array) -> list[Event]:
        """An event for the blocks of each group: (n,) digests, and their groups."""
        return [
            BlockRemoved(digests[groups == group].tolist(), self._medium, self._spec(group).get("group_idx"))
            for group in np.unique(groups).tolist()
        ]

    def stored(
        self,
        by_group: dict[int, Int64Array],
        tokens: npt.NDArray[np.int32],
        digests: list[bytes],
        firsts: list[int],
        heads: list[bytes | None],
        salts: npt.NDArray[np.object_] | None,
    ) -> list[Event]:
        """An event for each run of successive blocks of a sequence in a group.

        Parameters
        ----------
        by_group : dict
            For each group, which of the n blocks of a commit it stores, ascending.
        tokens : (n, P) int32
        digests : list of bytes
            n of them.
        firsts : list of int
            Which of the blocks are the first of their sequence in the commit.
        heads : list of (bytes or None)
            The digest of the block before each of these, None at the beginning of the sequence.
        salts : (num_firsts,) object, or None
        """
        events: list[Event] = []
        head_of = dict(zip(firsts, heads, strict=True))
        salt_of = {} if salts is None else dict(zip(firsts, salts, strict=True))
        for group, stored in by_group.items():
            before = -1
            for i in stored.tolist():
                if i - 1 != before or i in head_of:
                    parent = head_of[i] if i in head_of else digests[i - 1]
                    salt = salt_of.get(i) if parent is None else None
                    keys: list[tuple[str | bytes, ...] | None] | None = None if salt is None else [(salt,)]
                    spec = {"medium": self._medium, "extra_keys": keys, **self._spec(group)}
                    event = BlockStored([], parent, [], self._block_size, **spec)
                    events.append(event)
                elif event.extra_keys is not None:
                    event.extra_keys.append(None)
                event.block_hashes.append(digests[i])
                event.token_ids.extend(tokens[i].tolist())
                before = i
        return events

    def _spec(self, group: int) -> dict[str, Any]:
        """What an event says of its group, if there are several."""
        if len(self._kinds) == 1:
            return {}
        kind, window = self._kinds[group]
        return {"group_idx": group, "kv_cache_spec_kind": kind, "kv_cache_spec_sliding_window": window}

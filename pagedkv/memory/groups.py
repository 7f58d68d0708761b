"""Groups of layers: those of equal window and shape share a block table, and all groups share the pool's blocks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, overload

import numpy as np
import numpy.typing as npt

from ..cached_property import cached_property
from .arguments import MAX_INT32, MAX_INT64, as_int

Counts = npt.NDArray[np.int64]
Shape = tuple[int, int]  # Hkv and D

# The size of a group is the one that takes the least memory at this length, where each further group counts for as much
# as this part of the memory: every step plans and copies a table for each.
_USUAL_LENGTH = 8192
_COST_OF_GROUP = 0.002
_NO_WINDOW = 2**61  # further back than any token; small enough to add to
_Kind = tuple[int | None, Shape | None]  # of a layer: its window and its shape


class Group(NamedTuple):
    """Layers that need the same tokens, so that one block table serves them all.

    Attributes
    ----------
    window : int or None
        Tokens that a query sees, its own among them; None for all before it.
    layers : tuple of int
        The layers with K and V in this group's blocks, at most `LayerGroups.group_size` of them.
    shape : tuple of int, or None
        num_kv_heads and head_dim of these layers; None where all layers of the model have the same.
    """

    window: int | None
    layers: tuple[int, ...]
    shape: Shape | None = None


@dataclass(frozen=True, eq=False)
class LayerGroups:
    """How the layers of a model share one pool of blocks, and how many blocks a sequence needs in it.

    A block has the same bytes in every group, as many as the largest group needs, and a block id belongs to one group
    at a time: no memory is set aside for one kind of layer. The i-th layer of a group has the i-th part of its blocks.
    Groups of smaller layers have more of them; what is left of their blocks stays unused.

    Attributes
    ----------
    groups : tuple of Group
        In the order of their first layers.
    group_of, place_of : tuple of int
        For each layer, the index of its group and its place in that.
    group_size : int
        S, the most layers that a group has.
    leader : int
        The first group without a window, or else the first of the largest window.
    block_size : int
        P, tokens per block.
    """

    groups: tuple[Group, ...]
    group_of: tuple[int, ...]
    place_of: tuple[int, ...]
    group_size: int
    leader: int
    block_size: int
    _before: Counts  # (G,) tokens that a query sees before its own; of the leader at least P

    @classmethod
    def of(
        cls,
        windows: Any,
        num_layers: int,
        block_size: int,
        *,
        max_seq_len: int | None = None,
        same_as: Mapping[int, int] | None = None,
        group_size: int | None = None,
        shapes: Sequence[Shape] = (),
    ) -> LayerGroups:
        """Form the groups.

        Parameters
        ----------
        windows : int, None, or list or tuple of them
            One for all layers, or one for each: how many tokens a query sees, its own among them; None for all.
        num_layers, block_size : int
            Layers of the model, and P.
        max_seq_len : int or None
            Tokens that a sequence can have: a window of as many is none.
        same_as : mapping of int to int, or None
            Layers that read the K and V of an earlier layer, and which: they take no memory.
        group_size : int or None
            S, at most as many as have the same window; None for the one that takes the least memory. With several
            shapes S layers of the largest one have room in a block.
        shapes : sequence of (int, int)
            num_kv_heads and head_dim of each layer, where they differ.

        Raises
        ------
        TypeError, ValueError
            An argument is not as described.

        Examples
        --------
        >>> from pagedkv.memory import LayerGroups
        >>> layers = LayerGroups.of([6, None, 6, None], 4, block_size=4)
        >>> layers.groups
        (Group(window=6, layers=(0, 2), shape=None), Group(window=None, layers=(1, 3), shape=None))
        >>> layers.held(40), layers.peak(40, chunk=16)
        (13, 17)

        Layers without a window whose K and V take half as much:

        >>> shapes = [(4, 64), (1, 128), (4, 64), (1, 128)]
        >>> for group in LayerGroups.of([6, None, 6, None], 4, block_size=4, shapes=shapes).groups:
        ...     print(group)
        Group(window=6, layers=(0,), shape=(4, 64))
        Group(window=None, layers=(1, 3), shape=(1, 128))
        Group(window=6, layers=(2,), shape=(4, 64))
        """
        max_seq_len = None if max_seq_len is None else as_int("max_seq_len", max_seq_len, minimum=1)
        windows = _windows(windows, num_layers, max_seq_len)
        of_layers = shapes if len({*shapes}) > 1 else [None] * num_layers
        kinds: list[_Kind] = [*zip(windows, of_layers, strict=True)]
        same_as = _same_as(same_as, kinds)
        classes: dict[_Kind, list[int]] = {}
        for layer, kind in enumerate(kinds):
            if layer not in same_as:
                classes.setdefault(kind, []).append(layer)
        widest = max(_width(shape) for _, shape in classes)
        largest = max(_width(kind[1]) * len(layers) for kind, layers in classes.items())
        if group_size is None:
            counts = {kind: len(layers) for kind, layers in classes.items()}
            rooms = {_width(kind[1]) * i for kind, count in counts.items() for i in range(1, count + 1)}
            room = min(sorted(x for x in rooms if x >= widest), key=lambda room: _cost(room, block_size, counts))
        else:
            room = as_int("group_size", group_size, minimum=1) * widest
            if room > largest:
                of_one = "the layers of one window" if widest == 1 else "the layers of the largest shape that fit"
                raise ValueError(f"group_size must be at most {largest // widest}, {of_one}, got {group_size}")
        parts = [
            Group(window, tuple(part.tolist()), shape)
            for (window, shape), layers in classes.items()
            for part in np.array_split(layers, -(-len(layers) // (room // _width(shape))))
        ]
        groups = tuple(sorted(parts, key=lambda group: group.layers[0]))
        where = {layer: (g, i) for g, group in enumerate(groups) for i, layer in enumerate(group.layers)}
        places = [where[same_as.get(layer, layer)] for layer in range(num_layers)]
        before = np.array([_NO_WINDOW if window is None else window - 1 for window, *_ in groups], np.int64)
        leader = int(before.argmax())
        # A commit looks at the block before those that it stores, wherever in a block a hit or a truncation has ended.
        before[leader] = max(before[leader], block_size)
        return cls(
            groups,
            group_of=tuple(g for g, _ in places),
            place_of=tuple(i for _, i in places),
            group_size=max(len(group.layers) for group in groups),
            leader=leader,
            block_size=block_size,
            _before=before,
        )

    def __str__(self) -> str:
        """How many groups there are of each window, and of how many layers of which shape."""
        if not self.has_shapes:
            return windows_in_words(group.window for group in self.groups)
        most: dict[_Kind, int] = {}
        for window, layers, shape in self.groups:
            most[window, shape] = max(most.get((window, shape), 0), len(layers))
        return ", ".join(
            f"{windows_in_words(g.window for g in self.groups if (g.window, g.shape) == (window, shape))} and "
            f"{size} {'layer' if size == 1 else 'layers'} of {shape}"
            for (window, shape), size in most.items()
        )

    @cached_property
    def has_windows(self) -> bool:
        """Whether a group has one."""
        return any(group.window is not None for group in self.groups)

    @cached_property
    def has_shapes(self) -> bool:
        """Whether layers have several shapes."""
        return self.groups[0].shape is not None

    @cached_property
    def leader_is_full(self) -> bool:
        """Whether there is a group without a window."""
        return self.groups[self.leader].window is None

    @property
    def num_padding(self) -> int:
        """How many layers more the groups have room for than there are, if all have one shape."""
        return len(self.groups) * self.group_size - sum(len(group.layers) for group in self.groups)

    def first_columns(self, num_computed: Any, keep: int = 0) -> Counts:
        """The first column of a table that the next tokens still see, for each group.

        The window is counted from the last block boundary, so that a sequence passes a block when it begins one, and
        holds what a prefix of all its full blocks needs. `_most_columns` and `SequenceRows.plan_pass` rely on it.

        Parameters
        ----------
        num_computed : int, or array of int64
            Tokens whose queries are computed.
        keep : int
            Tokens left of the window that must stay, because as many may be taken back.

        Returns
        -------
        (G, ...) array of int64
        """
        return self.seen_columns(np.asarray(num_computed) // self.block_size * self.block_size - keep)

    def seen_columns(self, num_tokens: Any) -> Counts:
        """The first column that the query behind num_tokens tokens sees, for each group: (G, ...) int64."""
        return np.maximum(np.subtract.outer(-self._before, np.negative(num_tokens)), 0) // self.block_size

    def shortest(self, first: Counts) -> Counts:
        """The least length but 0 at which no query sees a column before `first`, (G, ...) int64, of its group; (...)"""
        before = self._before.reshape(-1, *(1 for _ in first.shape[1:]))
        return np.asarray(np.where(first > 0, first * self.block_size + before, 0).max(axis=0))

    def peaks(self, num_tokens: Any, chunk: Any = 1, keep: int = 0) -> Counts:
        """As `peak`, for each group, (G, ...) int64; `chunk` may be an array like `num_tokens`."""
        columns = -(-np.asarray(num_tokens, np.int64) // self.block_size)
        return np.asarray(np.minimum(self._bounds(chunk, keep, columns.ndim), columns))

    @overload
    def peak(self, num_tokens: int, chunk: int = 1, keep: int = 0) -> int: ...
    @overload
    def peak(self, num_tokens: Counts, chunk: int = 1, keep: int = 0) -> Counts: ...
    def peak(self, num_tokens: int | Counts, chunk: int = 1, keep: int = 0) -> int | Counts:
        """The most blocks of all groups that a sequence holds while it is computed.

        Parameters
        ----------
        num_tokens : int, or array of int64
            Tokens of the sequence at its end.
        chunk : int
            The most tokens that one step computes of it.
        keep : int
            As in `first_columns`.

        Returns
        -------
        int, or array of int64 like `num_tokens`
        """
        if not self.has_windows:
            return len(self.groups) * -(-num_tokens // self.block_size)
        total: Any = self.peaks(num_tokens, chunk, keep).sum(axis=0)
        return total if total.ndim else int(total)

    @overload
    def held(self, num_tokens: int, keep: int = 0) -> int: ...
    @overload
    def held(self, num_tokens: Counts, keep: int = 0) -> Counts: ...
    def held(self, num_tokens: int | Counts, keep: int = 0) -> int | Counts:
        """The blocks of all groups that a sequence of this length holds while it decodes, one token a step."""
        return self.peak(num_tokens, 1, keep)

    def growth(self, num_computed: Any, num_tokens: Any, chunk: int, keep: int = 0) -> int:
        """The most blocks that sequences need besides those that they hold, until all their tokens are computed.

        Parameters
        ----------
        num_computed, num_tokens : int, or arrays of int64
            How many tokens of each are computed, and how many it has: more.
        chunk, keep : int
            As in `peak`.
        """
        columns = -(-num_computed // self.block_size)
        if not self.has_windows:
            return len(self.groups) * int(np.sum(-(-num_tokens // self.block_size) - columns))
        peaks = self.peaks(num_tokens, np.minimum(chunk, num_tokens - num_computed), keep)
        return int((peaks - columns + self.first_columns(num_computed, keep)).sum())

    def longest(self, num_blocks: int, chunk: int = 1, keep: int = 0) -> int:
        """The most tokens for which `peak` is at most `num_blocks`; 2**63 - 1 if it is for all."""
        bounds = sorted(self._bounds(chunk, keep).tolist())
        for i, bound in enumerate(bounds):
            growing = len(bounds) - i
            if bound * growing > num_blocks:
                return num_blocks // growing * self.block_size
            num_blocks -= bound
        return MAX_INT64

    def _bounds(self, chunk: Any, keep: int, num_axes: int = 0) -> Counts:
        """The most blocks that a sequence of any length holds in each group, with axes for several sequences behind."""
        before = self._before.reshape(-1, *(1 for _ in range(num_axes)))
        return np.asarray(_most_columns(before + keep, self.block_size, chunk))


def windows_in_words(windows: Iterable[int | None]) -> str:
    """How many there are of each window."""
    counts = sorted(Counter(windows).items(), key=lambda item: item[0] or 0)
    return ", ".join(f"{count} of window {w}" if w else f"{count} without a window" for w, count in counts)


def _most_columns(before: Any, block_size: int, chunk: Any = 1) -> Any:
    """The most blocks of a group that a sequence holds at once, if a query sees `before` tokens before its own.

    A window is counted from the last block boundary (see `LayerGroups.first_columns`). So many blocks are left of it;
    up to block_size - 1 computed tokens and a chunk are right of it.
    """
    return -(-before // block_size) - (1 - chunk) // block_size + 1


def _width(shape: Shape | None) -> int:
    """What a token takes in a layer: the elements of K, or 1 if all layers have one shape."""
    return 1 if shape is None else shape[0] * shape[1]


def _cost(room: int, block_size: int, counts: dict[_Kind, int]) -> float:
    """What groups cost if a token has so much room in a block, in the unit of `_width`."""
    columns = -(-_USUAL_LENGTH // block_size)
    num_groups = blocks = 0
    for (window, shape), count in counts.items():
        groups = -(-count // (room // _width(shape)))
        num_groups += groups
        blocks += groups * (columns if window is None else min(columns, _most_columns(window - 1, block_size)))
    return room * blocks * (1 + _COST_OF_GROUP * num_groups)


def _windows(windows: Any, num_layers: int, max_seq_len: int | None) -> list[int | None]:
    """The window of each layer, None if it hides nothing."""
    if not isinstance(windows, (list, tuple)):
        if not (windows is None or isinstance(windows, (int, np.integer))):
            raise TypeError(
                "windows must be an int or None, or a list or tuple with one for each layer, got "
                f"{type(windows).__name__}{': pass its tolist()' if hasattr(windows, 'tolist') else ''}"
            )
        windows = [windows] * num_layers
    if len(windows) != num_layers:
        raise ValueError(f"windows must be one for all layers, or a list of {num_layers}, got {len(windows)}")
    checked = [
        None if window is None else as_int("windows", window, minimum=1, maximum=MAX_INT32) for window in windows
    ]
    return [None if w is None or (max_seq_len is not None and w >= max_seq_len) else w for w in checked]


def _same_as(same_as: Mapping[int, int] | None, kinds: list[_Kind]) -> dict[int, int]:
    """Check which layers read the K and V of which others."""
    if same_as is not None and not isinstance(same_as, Mapping):
        raise TypeError(f"same_as must be a dict from layers to earlier layers, got {type(same_as).__name__}")
    given = {as_int("same_as", layer): as_int("same_as", other) for layer, other in (same_as or {}).items()}
    checked: dict[int, int] = {}
    for layer, other in sorted(given.items()):
        as_int("same_as", layer, maximum=len(kinds) - 1)
        if other >= layer:
            raise ValueError(f"same_as must name an earlier layer for layer {layer}, got {other}")
        if other in checked:
            raise ValueError(f"same_as must name layers with K and V, but {other}, for layer {layer}, has none itself")
        for what, asked, has in zip(("window", "shape"), kinds[layer], kinds[other], strict=True):
            if asked != has:
                raise ValueError(
                    f"same_as must name a layer of the same {what} for layer {layer}, which has {asked}, but {other} "
                    f"has {has}"
                )
        checked[layer] = other
    return checked

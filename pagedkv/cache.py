"""PagedKVCache: a pool, its sequences, and the K and V of all layers as one object."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Mapping, Sequence
from types import ModuleType
from typing import Any

import numpy as np
import numpy.typing as npt

from .arrays import between_graphs
from .calls import CACHES
from .commit import Write
from .commit import commit as store
from .layouts import KvFormat
from .memory import snapshots, starts
from .memory.arguments import MAX_INT32, as_int, bool_per_seq, per_layer, per_seq
from .memory.contents import Contents, found
from .memory.device.arrays import Arrays
from .memory.device.batch import Batch, Batches
from .memory.device.layer_caches import LayerCaches, bytes_of_block
from .memory.device.state_arrays import StateArrays, bytes_of_state, specs_of
from .memory.groups import LayerGroups
from .memory.guard import consistent, exclusive
from .memory.pool import BlockPool
from .memory.prefix.cache import PrefixCache, require_block_size
from .memory.prefix.digests import Hash, blake2b_128
from .memory.prefix.events import Listener
from .memory.prefix.eviction import LRU, Eviction
from .memory.prefix.prompt import Added, Prompt, ids_of, known_prompt, prompt_of
from .memory.sequences import Sequences
from .memory.sizing import Capacity, shapes_of
from .memory.states import StateSlots, lost
from .memory.stats import Stats, pool_map
from .operations.attention import decode_attention, prefill_attention
from .operations.caches import write_kv
from .operations.plan import attend
from .typing import KvDtype, Layout
from .validation import cache_pair
from .validation.require import integer

# What a cache passes to the operations itself.
_OWN = {*CACHES, "layout", "kv_dtype", "k_scale", "v_scale"}
_OWN_OF_BATCHES = {*_OWN, "block_tables", "seq_lens", "query_starts", "max_seq_len"}


class PagedKVCache(Sequences):
    """The paged K and V of all layers of a model, and the sequences in it.

    A block id names the same block in every layer of a group: layers with the same window and shape form groups, whose
    blocks have the same bytes and come from the same pool, and come back as soon as no query to come sees a key in
    them. As in
    `SequenceTable`, every method changes all or nothing; a mutation in the middle of another thread's raises
    RuntimeError, a read waits for it. A cache cannot be copied or pickled: TypeError.

    Parameters
    ----------
    num_layers : int
        Layers of the model, at least 1.
    num_blocks, block_size : int
        N and P; num_blocks is None if `memory` is given.
    num_kv_heads, head_dim : int, or list of int
        Hkv and D of all layers, or a list with one for each.
    dtype : dtype-like
        float32, float16 or bfloat16: a name, or a dtype of NumPy, torch or CuPy.
    layout : str
        "NHD", "HND" or "vllm".
    memory : str, int, float or None
        In place of num_blocks: "2GiB", bytes, or a share of the free memory of the device, such as 0.9; for K, V and
        states, unless `state_memory` is given.
    kv_dtype : str or None
        "fp8_e4m3" or "fp8_e5m2" to store the cache in 8 bits, as uint8, instead, or "int8", as int8 with a float32
        scale for each row.
    k_scale, v_scale : scale, or list of them, or None
        Scales of an fp8 cache: one for all layers, or a list with one for each. A scale is a number, or an array of one
        or of the layer's num_kv_heads floats, which the cache copies.
    max_seqs : int
        Sequences alive at a time.
    windows : int, None, or list of them
        How many tokens a query sees in each layer, its own among them, or in all; None for all before it. A window
        counts from the last block boundary, so that a layer holds at most 1 + ceil((window - 1) / P) blocks of a
        sequence while it decodes, or 2 if all windows are 1.
    keep : int
        Tokens left of the windows that stay, for drafts that are rolled back after others were appended. `truncate` can
        always take back the last `append`.
    states : dict of str to (shape, dtype), or None
        What other layers keep of a sequence in place of K and V, such as a convolution window and a recurrent matrix:
        the arrays of one sequence, for all layers together. Shapes are tuples, dtypes those that `dtype` takes. See
        `read_states`.
    state_memory : str, int, float or None
        Memory for states, as `memory`; None for two states for each of max_seqs, but not more memory than K and V take,
        and at least two. Each sequence needs one, so that it may lower max_seqs; the others hold states that prompts
        can find.
    same_as : dict of int to int, or None
        Layers that read the K and V of an earlier layer, and which: they take no memory, and have its scales.
    group_size : int or None
        Layers of a group, of those with the largest K and V; None for the size that takes the least memory.
    max_seq_len : int or None
        Tokens that one sequence can have, rounded up to whole blocks; None for as many as the pool has. Block tables on
        a device have room for max_seq_len from the beginning, others grow with the longest sequence.
    array_module : module or str
        The framework of the arrays: numpy, torch or cupy.
    device : device of torch, or None
        Where torch's arrays are; None for torch's default device. CuPy's are on its current device.
    prefix_cache : bool
        Whether full blocks can be found by their tokens. `eviction`, `hash_of` and `events` are for that.
    eviction : callable
        Makes an `Eviction` for num_blocks blocks: `pagedkv.memory.LRU`, or one of yours.
    hash_of : callable
        A hash function from bytes to 16 bytes.
    events : callable or None
        Called with each `BlockStored`, `BlockRemoved` and `AllBlocksCleared` at the end of the call that causes it.

    Attributes
    ----------
    pool : BlockPool
    prefix_cache : bool
    groups : tuple of Group
        The window and the layers of each group, and their shape if layers have several. With several groups, slots and
        block tables have an axis for groups in front.
    k_caches, v_caches : tuple of array
        K and V of each layer, shaped as the layout says, zero at first. Layers of different groups share memory. With
        several shapes they are strided views of blocks in which the layers of a group lie side by side.
    k_scales, v_scales : tuple of array
        The scales of the rows of an int8 cache in each layer, likewise; empty for other caches.
    states : dict of str to array
        The states of all slots, ``(num_states, *shape)`` each, zero at first; empty without `states`.

    Raises
    ------
    TypeError, ValueError
        An argument is not as described here.
    ModuleNotFoundError
        `array_module` is not installed; the message names the extra that brings it.
    BackendUnavailableError
        `array_module` is CuPy, and it finds no GPU.
    MemoryError
        K and V take more than is free.

    Examples
    --------
    A prompt, as one layer writes it:

    >>> import numpy as np
    >>> from pagedkv import PagedKVCache
    >>> cache = PagedKVCache(num_layers=1, num_blocks=8, block_size=4, num_kv_heads=2, head_dim=64)
    >>> seq, num_cached = cache.add([1, 2, 3, 4, 5, 6])
    >>> slots = cache.slots(seq, num_cached, 6)
    >>> slots
    array([0, 1, 2, 3, 4, 5])
    >>> k = v = np.ones((6, 2, 64), np.float32)
    >>> cache.write(0, k, v, slots)
    >>> cache.commit([seq])

    A decode step:

    >>> slots = cache.append([seq], tokens=[7])
    >>> cache.write(0, k[:1], v[:1], slots)
    >>> batch = cache.batch([seq])
    >>> batch.block_tables, batch.seq_lens
    (array([[0, 1]], dtype=int32), array([7], dtype=int32))
    >>> cache.attend(0, np.ones((1, 8, 64), np.float32), batch).shape
    (1, 8, 64)

    Another prompt finds the full block that it shares with the first one, and adds the rest in chunks:

    >>> other = [1, 2, 3, 4, 9, 9, 9]
    >>> cache.find(other), cache.can_add(other)
    (4, True)
    >>> second, num_cached = cache.add_found(other)
    >>> cache.append([second], 3, tokens=other[num_cached:])
    array([ 8,  9, 10])
    >>> print(cache.plot())
    +ab.....
    A-Z sequences, a-z with empty slots  + shared  . free; 1 block a character

    A pin keeps blocks that no sequence has any more, until `unpin`; `reset` forgets all that can be found:

    >>> cache.pin("system prompt", [1, 2, 3, 4])
    4
    >>> cache.free([seq, second])
    >>> cache.stats().used
    1
    >>> cache.unpin("system prompt")
    >>> cache.reset()
    >>> cache.find(other)
    0
    """

    def __init__(
        self,
        num_layers: int,
        num_blocks: int | None,
        block_size: int,
        num_kv_heads: int | Sequence[int],
        head_dim: int | Sequence[int],
        dtype: Any = "float32",
        layout: Layout = "NHD",
        *,
        memory: str | int | float | None = None,
        kv_dtype: KvDtype | None = None,
        k_scale: Any = None,
        v_scale: Any = None,
        max_seqs: int = 256,
        max_seq_len: int | None = None,
        windows: int | list[int | None] | tuple[int | None, ...] | None = None,
        keep: int = 0,
        states: Mapping[str, tuple[tuple[int, ...], Any]] | None = None,
        state_memory: str | int | float | None = None,
        same_as: dict[int, int] | None = None,
        group_size: int | None = None,
        array_module: ModuleType | str = "numpy",
        device: Any = None,
        prefix_cache: bool = True,
        eviction: Callable[[int], Eviction] = LRU,
        hash_of: Hash = blake2b_128,
        events: Listener | None = None,
    ) -> None:
        num_layers = as_int("num_layers", num_layers, minimum=1)
        shapes = shapes_of(num_layers, num_kv_heads, head_dim)
        block_size = as_int("block_size", block_size, minimum=1, maximum=MAX_INT32)
        arrays = Arrays(array_module, device)
        kv_format = KvFormat.of(dtype, kv_dtype)
        sizes_of_groups: dict[str, Any] = {"max_seq_len": max_seq_len, "same_as": same_as, "group_size": group_size}
        groups = LayerGroups.of(windows, num_layers, block_size, **sizes_of_groups, shapes=shapes)
        keep = as_int("keep", keep, maximum=MAX_INT32)
        block_bytes = bytes_of_block(groups, shapes, kv_format, layout, block_size)
        specs = {} if states is None else specs_of(states)
        sizes: dict[str, Any] = {"block_bytes": block_bytes, "state_bytes": bytes_of_state(specs)}
        sizes |= {"num_blocks": num_blocks, "memory": memory, "max_seqs": max_seqs, "state_memory": state_memory}
        num_blocks, num_states, max_seqs = Capacity.of(arrays, **sizes)
        # Each group needs a block.
        num_blocks = as_int("num_blocks", num_blocks, minimum=len(groups.groups), maximum=MAX_INT32)
        if max_seq_len is None:
            max_blocks = min(groups.longest(num_blocks, 1, keep) // block_size, MAX_INT32 // block_size)
        else:
            max_blocks = -(-as_int("max_seq_len", max_seq_len, minimum=1) // block_size)
        self._options: list[dict[str, Any]] = [{"layout": layout, "kv_dtype": kv_dtype} for _ in range(num_layers)]
        shape_of = shapes if len(shapes) > 1 else shapes * num_layers
        for name, scale in (("k_scale", k_scale), ("v_scale", v_scale)):
            for options, of_layer, (heads, _) in zip(
                self._options, per_layer(name, scale, num_layers), shape_of, strict=True
            ):
                kept = cache_pair.kept_scale(name, of_layer, kv_format, heads)
                options[name] = arrays.asarray(kept) if isinstance(kept, np.ndarray) else kept
        for layer, other in (same_as or {}).items():
            self._options[layer] = self._options[other]  # whose scales made what it reads
        if prefix_cache:
            require_block_size(block_size)
        # Before the pool, whose arrays may take minutes to fill: the system refuses too large caches at once.
        self._layer_caches = LayerCaches(arrays, layout, num_blocks, block_size, shapes, groups, kv_format)
        self.k_caches, self.v_caches, *scales = zip(*self._layer_caches.layers, strict=True)
        self.k_scales: tuple[Any, ...] = scales[0] if scales else ()
        self.v_scales: tuple[Any, ...] = scales[1] if scales else ()
        self._state_arrays = StateArrays(arrays, specs, num_states)
        self.states = self._state_arrays.by_name
        found = None
        if prefix_cache:
            hooks: dict[str, Any] = {"eviction": eviction, "hash_of": hash_of, "listener": events}
            hooks |= {"medium": "GPU" if arrays.on_device else "CPU", "has_states": bool(specs)}
            found = PrefixCache(num_blocks, block_size, groups, **hooks)
        tables: dict[str, Any] = {"prefix_cache": found, "groups": groups, "keep": keep, "num_states": num_states}
        super().__init__(BlockPool(num_blocks), block_size, max_seqs, max_blocks, **tables)
        self.prefix_cache, self._arrays = prefix_cache, arrays
        self._pins: dict[str, int] = {}
        self._same_as = dict(same_as or {})
        # Layers with equal ones share plans: their caches have the same shape, strides and scales.
        ours, kinds = object(), range(num_layers) if k_scale is not None or v_scale is not None else shape_of
        self._kinds: list[Hashable] = [(ours, kind) for kind in kinds]
        self._batches = Batches(self, arrays, grows=max_seq_len is None)

    def __repr__(self) -> str:
        shapes = Counter(tuple(cache.shape) for cache in self.k_caches)
        layers = " and ".join(f"{count} layers of {shape}" for shape, count in shapes.items())
        what, of_groups = f"{layers} {self.k_caches[0].dtype}", self.layer_groups
        groups = f"; groups of layers: {of_groups}" if of_groups.has_windows or of_groups.has_shapes else ""
        return f"PagedKVCache({what}{groups}; {self.num_seqs} sequences, {self.num_free} blocks free)"

    @exclusive
    def add(self, tokens: Any, salt: str | bytes | None = None) -> Added:
        """Start a sequence, which shares the blocks that the prefix cache finds of its first tokens.

        Parameters
        ----------
        tokens : int, or (num_tokens,) ints
            How many tokens it begins with, or their ids, from 0 to 2**31 - 1.
        salt : str, bytes or None
            Sequences share blocks only if their salts are equal. Put everything else that K and V depend on into it,
            such as an adapter or an image.

        Returns
        -------
        Added
            The handle, and how many of the tokens are in the cache, at most all but the last. Write the K and V of the
            others to ``slots(seq, num_cached, num_tokens)``.

        Raises
        ------
        TypeError
            `salt` is neither a str nor bytes nor None.
        ValueError
            There are more than max_seq_len tokens, or an id is out of range.
        CapacityError
            max_seqs sequences are alive.
        OutOfBlocksError
            Too few blocks are free.
        """
        return self._start(prompt_of(tokens, salt))

    @exclusive
    def add_found(
        self,
        tokens: Any,
        salt: str | bytes | None = None,
        *,
        reserve: int = 0,
        chunk: int | None = None,
        preempted: bool = False,
        last: list[int] | None = None,
        find: bool = True,
    ) -> Added:
        """Start a sequence with the tokens that the prefix cache finds, so that `append` can add the others in chunks.

        It starts only if there is room for all tokens, as in `add`, but takes no blocks for those that are not found.

        Parameters
        ----------
        tokens, salt
            As in `add`.
        reserve : int
            Blocks that must stay free besides.
        chunk : int or None
            The most tokens that one `append` will add, so that windows give blocks back in between; None for all.
        preempted : bool
            Whether a preempted request starts again: `stats` counts its tokens separately.
        last : list of one int, or None
            Gets the handle as the sequence starts, since an interrupt may come before this returns.
        find : bool
            False to start with no tokens whatever the prefix cache has; others will find those of this sequence.

        Returns
        -------
        Added
            The handle, and the length of the sequence: how many of the tokens are in the cache.

        It raises what `add` raises.
        """
        chunk = None if chunk is None else as_int("chunk", chunk, minimum=1)
        how = {"preempted": preempted, "find_any": find}
        return self._start(known_prompt(tokens, salt), as_int("reserve", reserve), chunk, last, **how)

    @between_graphs
    @exclusive
    def append(self, seqs: Any, n: Any = 1, tokens: Any = None) -> Any:
        """Add n tokens to the end of each sequence, and copy shared blocks that they would be written to.

        Blocks that windows have passed before the new tokens come back first, even if too few are free then.

        Parameters
        ----------
        seqs : handles
            (num_seqs,), each named once.
        n : int, or (num_seqs,) ints
            New tokens of every sequence, or of each; at least 0.
        tokens : (num_new_tokens,) ints, or None
            Their ids, in the order of the sequences. Without them no other sequence can find the blocks that they are
            in, nor later blocks of these sequences.

        Returns
        -------
        (num_new_tokens,) int64
            Their slots, in the order of the sequences; with several groups (num_groups, num_new_tokens).

        Raises
        ------
        ValueError, KeyError
            A sequence would be longer than max_seq_len, is named twice, or was freed; wrong tokens.
        OutOfBlocksError
            Too few blocks are free.
        RuntimeError
            The current stream of the device is being captured in a CUDA graph.
        """
        ids = None if tokens is None else ids_of(tokens)
        rows = self._rows.handles.find_distinct(seqs)
        self._release_passed(rows, n, ids)
        plan = self._rows.plan_copying(self._layer_caches.read, self._rows.plan_append, rows, n, ids)
        self._layer_caches.copy(plan.copies)
        slots = self._arrays.asarray(plan.slots)
        self.pool._commit(plan.writes, undo=lambda: self._plan_take_back(seqs, n))
        return slots

    @between_graphs
    @consistent
    def read_states(self, seqs: Any) -> dict[str, Any]:
        """Copy the states of sequences out, for a pass over the tokens behind those that they stand for.

        Parameters
        ----------
        seqs : handles
            (num_seqs,), in any order.

        Returns
        -------
        dict of str to array
            New arrays by the names in `states`, ``(num_seqs, *shape)`` each, of the cache's array module; zeros for a
            sequence without a state, as one has that begins with no token found.

        Raises
        ------
        ValueError
            The cache has no states, or `write_states` was interrupted for one of the sequences: see `state_lens`.
        KeyError
            A sequence was freed, or never existed.

        Examples
        --------
        A pass over the tokens behind the state; here it keeps the sum of all tokens:

        >>> from pagedkv import PagedKVCache
        >>> size = {"num_layers": 1, "num_blocks": 8, "block_size": 4, "num_kv_heads": 1, "head_dim": 8}
        >>> cache = PagedKVCache(**size, states={"sum": ((1,), "float32")})
        >>> seq, num_cached = cache.add([1, 2, 3, 4, 5, 6])
        >>> states = cache.read_states([seq])
        >>> states["sum"] += sum([1, 2, 3, 4, 5, 6][num_cached:])
        >>> cache.write_states([seq], states)
        >>> cache.commit([seq])
        >>> slots = cache.append([seq], tokens=[7])
        >>> cache.state_lens([seq]), cache.read_states([seq])["sum"]
        (array([6]), array([[21.]], dtype=float32))
        """
        slots = self._with_states()
        rows = self._rows.handles.find(seqs)
        if np.count_nonzero(are_lost := slots.lens_of(rows) < 0):
            raise lost(self._rows.handles.of(rows[are_lost])[0])
        return self._state_arrays.read(slots.of_row[rows])

    @between_graphs
    @exclusive
    def write_states(self, seqs: Any, values: Any) -> None:
        """Store the states of sequences after a pass: they stand for all tokens that these have now.

        Sequences that shared a state no longer do, and no snapshot is overwritten that still has room. If an interrupt
        or an error of the device stops the copying, the states of some of these sequences may be lost: `state_lens` is
        -1 for them.

        Parameters
        ----------
        seqs : handles
            (num_seqs,), each named once.
        values : mapping of str to array
            By the names in `states`, ``(num_seqs, *shape)`` each in the order of `seqs`, of the cache's array module,
            dtypes and device.

        Raises
        ------
        TypeError, ValueError
            `values` are other states than the cache has; a sequence is named twice; the cache has no states.
        KeyError
            A sequence was freed, or never existed.
        RuntimeError
            The current stream of the device is being captured in a CUDA graph.
        """
        slots = self._with_states()
        rows = self._rows.handles.find_distinct(seqs)
        values = self._state_arrays.checked(values, len(rows))
        plan = slots.plan_write(rows, self._rows.lens[rows])
        index = self._arrays.asarray(plan.slots)  # which may raise, while no state is lost yet
        store(plan.begin)
        self._state_arrays.write(index, values)
        store(plan.end)
        self.pool._commit([])  # emits the events

    @consistent
    def state_lens(self, seqs: Any) -> npt.NDArray[np.int64]:
        """How many tokens the states of sequences stand for, (num_seqs,) int64.

        0 for a sequence that has none yet, and -1 for one whose `write_states` was interrupted: `truncate` it.

        Raises
        ------
        ValueError, KeyError
            The cache has no states; a sequence was freed, or never existed.
        """
        slots = self._with_states()
        return slots.lens_of(self._rows.handles.find(seqs))

    @consistent
    def lens_with_state(self, seq: int) -> npt.NDArray[np.int64]:
        """The lengths to which `truncate` can take a sequence with states, ascending, (n,) int64.

        They are 0, those for which it has a snapshot, and that of its state or more: tokens behind it are not computed.

        Raises
        ------
        ValueError, KeyError
            The cache has no states; the sequence was freed, or never existed.
        """
        self._with_states()
        return snapshots.lens_with_state(self._rows, int(self._rows.handles.find(as_int("seq", seq, minimum=None))[0]))

    @between_graphs
    @exclusive
    def commit(self, seqs: Any, *, lasting: Any = False) -> None:
        """Declare that the K and V of all tokens of these sequences are written in all layers.

        Their queries are computed, too, and none of the tokens is a draft: blocks that windows have passed come back.
        From now on new sequences find their full blocks, as far as the tokens are known by id. Where a block with the
        same tokens was committed before, these sequences share that one and release their own.

        With states, sequences whose last block is full then leave a snapshot: the state from which a prompt goes on
        that begins with all their tokens.

        Parameters
        ----------
        seqs : handles
            (num_seqs,), each named once.
        lasting : bool, or (num_seqs,) bools
            Whether the snapshots stay when the sequences leave their next ones; else only those do that a prompt has
            found by then.

        Raises
        ------
        ValueError, KeyError
            A sequence is named twice, or was freed, or has a state that does not stand for all its tokens; there are
            not as many `lasting`.
        TypeError
            `lasting` are not bools.
        """
        rows = self._rows.handles.find_distinct(seqs)
        if self._rows.states is None:
            self.pool._commit(self._rows.plan_commit(rows))
        else:
            stay = bool_per_seq("lasting", lasting, len(rows))
            snapshots.require_written(self._rows, rows)
            self.pool._commit(self._rows.plan_commit(rows))
            store(snapshots.plan_snapshots(self._rows, rows, stay))
            self.pool._commit([])  # emits the events
        self._release_passed(rows)  # another change: a block that the first one stores waits for its eviction then

    @consistent
    def find(self, tokens: Any, salt: str | bytes | None = None) -> int:
        """How many of these tokens `add` would find in the cache; nothing changes."""
        return starts.find(self._rows, known_prompt(tokens, salt)).num_tokens

    @consistent
    def find_blocks(self, tokens: Any, salt: str | bytes | None = None) -> int:
        """How many of these tokens are in full blocks that can be found, at most all but the last.

        With states, `find` may find fewer: it needs a snapshot, too. The blocks behind that are computed again.
        """
        hit = starts.find(self._rows, known_prompt(tokens, salt))
        return hit.num_columns * self.block_size if self._rows.states is None else hit.num_matched

    @consistent
    def can_add(
        self, tokens: Any, salt: str | bytes | None = None, *, reserve: int = 0, chunk: int | None = None
    ) -> bool:
        """Whether `add` has room for these tokens and leaves `reserve` blocks free; with a `chunk`, `add_found`.

        Reserve one block for each running sequence, for example, so that all of them can go on decoding.
        """
        chunk = None if chunk is None else as_int("chunk", chunk, minimum=1)
        return starts.can_add(self._rows, prompt_of(tokens, salt), as_int("reserve", reserve), chunk)

    @exclusive
    def pin(self, name: str, tokens: Any, salt: str | bytes | None = None) -> int:
        """Keep the full blocks that are found of these tokens until `unpin` or `reset`.

        A pin counts as one of max_seqs sequences, and its blocks are in use.

        Parameters
        ----------
        name : str
            A new name.
        tokens, salt
            As in `add`.

        Returns
        -------
        int
            How many tokens are kept: those of a block at least.

        Raises
        ------
        ValueError, CapacityError
            A pin has this name already, or there is no full block to keep; max_seqs sequences are alive.
        TypeError
            `name` is not a str, or `tokens` are not ids.
        """
        if not isinstance(name, str):
            raise TypeError(f"name must be a str, got {type(name).__name__}")
        if name in self._pins:
            raise ValueError(f"name must be a new one, got {name!r}, which is pinned: unpin it first")
        seq, length, writes = starts.plan_pin(self._rows, known_prompt(tokens, salt))
        self.pool._commit([*writes, (vars(self), "_pins", self._pins | {name: seq})])
        return length

    @exclusive
    def unpin(self, name: str) -> None:
        """Release the blocks of a pin, which can be found until they are needed.

        Raises
        ------
        KeyError
            No pin has this name.
        """
        if not isinstance(name, str) or name not in self._pins:
            raise KeyError(f"no pin is called {name!r}")
        left = self._pins.copy()
        del left[name]
        self.pool._commit([*self._rows.plan_free(self._pins[name]), (vars(self), "_pins", left)])

    @exclusive
    def reset(self) -> None:
        """Make all blocks unfindable and drop all pins, after a change of the model's weights for example.

        Sequences go on, also those that are swapped out, but no block that they have now will ever be found, and
        `attend` refuses earlier batches.
        """
        pins: dict[str, int] = {}
        writes = self._rows.plan_reset([*self._pins.values()])
        self.pool._commit([*writes, (vars(self), "_pins", pins), self._batches.plan_expiry()])

    @between_graphs
    def slots(self, seq: int, start: int, stop: int) -> Any:
        return self._arrays.asarray(super().slots(seq, start, stop))

    @between_graphs
    def batch(self, seqs: Any, query_lens: Any = None) -> Batch:
        """The block tables and lengths of sequences, read at one instant, and where their query rows are.

        On the host they are new arrays. On a device they are views of buffers that stay in place: rows that have
        changed are copied, and the next call overwrites them in stream order. These tables have room for the longest
        length rounded up to a power of two, at least 256 tokens, so that their shape changes as seldom as the plan of
        an attention call. A cache without max_seq_len moves the buffers when they become too small. `attend` takes no
        batch but the last one there.

        Parameters
        ----------
        seqs : handles
            (num_seqs,).
        query_lens : int, or (num_seqs,) ints, or None
            How many of the last tokens of every sequence, or of each, are computed; None for one, as in a decode step.

        Raises
        ------
        ValueError, KeyError
            A sequence has fewer tokens than query tokens, or was freed.
        RuntimeError
            On a device: another call of this thread is running, or the current stream is being captured in a CUDA
            graph while something has to be copied there.
        """
        return self._batches.of(seqs, query_lens)

    @between_graphs
    def write(self, layer: int, k: Any, v: Any, slots: Any, **options: Any) -> None:
        """Write the keys and values of new tokens into their slots in one layer, as `write_kv` does.

        Parameters
        ----------
        layer : int
        k, v : (num_tokens, num_kv_heads, head_dim) array
        slots : (num_tokens,) int64 array
            As `append` or `slots` returned them; with several groups (num_groups, num_tokens), or those of the layer.
        **options
            `backend` and `check` of :func:`~pagedkv.write_kv`; the cache knows its layout, kv_dtype and scales.
        """
        _require_not_own("write", _OWN, options)
        caches, ours = self._layer(layer)
        if layer in self._same_as:
            raise ValueError(
                f"layer must have K and V of its own, got {layer}, which reads those of {self._same_as[layer]}"
            )
        if len(self.groups) > 1 and getattr(slots, "ndim", 1) == 2:
            if len(slots) != len(self.groups):
                raise ValueError(
                    f"slots must have shape (num_groups, num_tokens) with num_groups = {len(self.groups)}, or be those "
                    f"of the layer, (num_tokens,), got {tuple(slots.shape)}"
                )
            slots = slots[self._rows.groups.group_of[layer]]
        write_kv(k, v, slots=slots, **dict(zip(CACHES, caches, strict=False)), **ours, **options)

    @between_graphs
    def attend(self, layer: int, q: Any, batch: Batch, **options: Any) -> Any:
        """Let the query tokens of a batch attend to their sequences in one layer.

        Parameters
        ----------
        layer : int
        q : (num_tokens, num_heads, head_dim) array
            The rows of all sequences in the order of the batch; see `Batch.query_starts`. Padding may follow unless
            each sequence has one row.
        batch : Batch
            From `batch`, after the keys and values of all its tokens were written.
        **options
            Options of :func:`~pagedkv.decode_attention`, which computes a batch with one row for each sequence, or of
            :func:`~pagedkv.prefill_attention`; not layout, kv_dtype, scales and max_seq_len, which are known. `window`
            is that of the layer unless it is given.

        Returns
        -------
        (num_tokens, num_heads, head_dim) array, and with return_lse=True the LSE

        Raises
        ------
        ValueError
            `window` is None or more than the cache keeps for the layer, `q` has not the rows of the batch, the batch is
            of a cache with other groups, or a query sees tokens that have been released.
        RuntimeError
            The cache was reset after the batch was made, or, on a device, has made another one.
        """
        _require_not_own("attend", _OWN_OF_BATCHES, options)
        caches, ours = self._layer(layer)
        if not isinstance(batch, Batch):
            raise TypeError(f"batch must be a Batch, made by batch(seqs), got {type(batch).__name__}")
        batch.require_current()
        shape: tuple[int, ...] = getattr(q, "shape", ())
        if len(shape) == 3 and (shape[0] < batch.num_tokens or (batch.is_decode and shape[0] > batch.num_tokens)):
            raise ValueError(
                f"q must have num_tokens = {batch.num_tokens} rows, those of the batch, got {shape[0]}: "
                "batch(seqs, query_lens) says how many each sequence has, one if query_lens is not given"
            )
        if len(batch.where) != len(self.groups):
            raise ValueError(
                f"batch must be made by this cache, with block tables of {len(self.groups)} groups of layers, got "
                f"{len(batch.where)}"
            )
        group = self._rows.groups.group_of[layer]
        where, stored = batch.where[group], ours | {"max_seq_len": batch.max_seq_len}
        if self._rows.windows is not None:
            options = self._with_window(layer, options)
        operation: Callable[..., Any] = decode_attention if batch.is_decode else prefill_attention
        kind = self._kinds[layer]
        try:
            return attend(operation, batch.plans, kind, q, caches, where, stored, options)
        except IndexError:
            if (window := options.get("window")) is not None and self.groups[group].window is not None:
                batch.require_held(group, window, self.block_size)
            raise

    @consistent
    def stats(self) -> Stats:
        """How the blocks are used, read at one instant."""
        return Stats.of(self, self._layer_caches.block_bytes, self._state_arrays.slot_bytes)

    @consistent
    def plot(self, width: int = 64) -> str:
        """A map of the pool in characters, `width` to a line: who holds each block, and which are shared.

        With states a line says how many sequences and snapshots have.
        """
        return pool_map(self).to_text(as_int("width", width, minimum=1))

    @consistent
    def _repr_html_(self) -> str:
        return f"{self.stats().to_html()}{pool_map(self).to_html()}"

    def asarray(self, x: npt.NDArray[Any]) -> Any:
        """Convert a NumPy array to the cache's framework and device; on the host without a copy."""
        return self._arrays.asarray(x)

    def _with_states(self) -> StateSlots:
        """The slots of states, or ValueError."""
        if self._rows.states is None:
            raise ValueError("this cache has no states: make one with states={name: (shape, dtype), ...}")
        return self._rows.states

    def _layer(self, layer: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arrays of a layer, and the options that say how they are stored."""
        layer = as_int("layer", layer, maximum=len(self.k_caches) - 1)
        return self._layer_caches.views[layer], self._options[layer]

    def _with_window(self, layer: int, options: dict[str, Any]) -> dict[str, Any]:
        """Add the window of a layer, and refuse a larger one."""
        kept = self.groups[self._rows.groups.group_of[layer]].window
        window = options.setdefault("window", kept)
        if kept is not None and (window is None or integer("window", window) > kept):
            raise ValueError(
                f"window must be at most {kept} in layer {layer}, whose tokens before that have been released, got "
                f"{window}: leave it out, or give the cache larger windows"
            )
        return options

    def _start(
        self,
        prompt: Prompt,
        reserve: int | None = None,
        chunk: int | None = None,
        last: list[int] | None = None,
        *,
        preempted: bool = False,
        find_any: bool = True,
    ) -> Added:
        """Start a sequence with a prompt, or, if `reserve` is given, with what is found of it; see `add_found`."""
        rows = self._rows
        how: dict[str, Any] = {"reserve": reserve, "chunk": chunk, "preempted": preempted, "find_any": find_any}
        plan = rows.plan_copying(self._layer_caches.read, starts.plan_add, rows, prompt, **how)
        added = Added(plan.seq, plan.num_cached)
        if last is not None:
            plan.writes.append((last, 0, plan.seq))
        self._layer_caches.copy(plan.copies)
        self.pool._commit(plan.writes, undo=lambda: rows.plan_free(plan.seq))
        return added

    @consistent
    def _contents(self, seqs: Any) -> list[Contents]:
        """What stores copy of sequences, (num_seqs,) handles, each named once."""
        return [Contents.of(self._rows, row) for row in self._rows.handles.find_distinct(seqs).tolist()]

    @consistent
    def _found(self, ids: npt.NDArray[np.int32], root: bytes) -> tuple[npt.NDArray[np.int64], dict[int, int]]:
        return found(self._rows, ids, root)

    def _plan_take_back(self, seqs: Any, n: Any) -> list[Write]:
        """Shorten sequences by the tokens that `append` has added."""
        rows = self._rows.handles.find_distinct(seqs)
        return self._rows.plan_drop(rows, self._rows.lens[rows] - per_seq("n", n, len(rows)))


def _require_not_own(method: str, own: set[str], options: Mapping[str, Any]) -> None:
    """Raise TypeError for an option that the cache passes itself."""
    if known := own & options.keys():
        raise TypeError(f"{method}() takes no {min(known)}: the cache passes its own")

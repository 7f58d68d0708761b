"""PagedCache: a cache for ``model.generate``, over a PagedKVCache."""

from __future__ import annotations

import weakref
from collections.abc import Collection
from contextlib import suppress
from inspect import Parameter, signature
from itertools import compress
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np
import numpy.typing as npt
import torch
from transformers import PreTrainedModel
from transformers.cache_utils import Cache

from ...cache import PagedKVCache
from ...errors import CapacityError
from ...memory.arguments import as_int
from ...memory.handles import NO_HANDLE
from .attention import CachedPass
from .cache_layers import begin_states, cache_layers
from .models import (
    dtype_of_values,
    kv_shape,
    kv_states,
    kv_windows,
    num_ranks,
    require_supported,
    uncompiled,
)
from .options import require_known
from .running import LayerTurns

if TYPE_CHECKING:
    from ...stores import SwapSpace

_FROM_MASK = (
    "generate makes them from attention_mask, which must have a column for each token, those in the cache too; call "
    "reset() before another text"
)


def require_options(kind: type, options: Collection[str]) -> None:
    """Raise TypeError for options that PagedKVCache does not take, or that the class sets itself."""
    of_cache = signature(PagedKVCache).parameters.keys() - {"num_layers", "num_kv_heads", "head_dim", "states"}
    own = [name for name, x in signature(kind).parameters.items() if x.kind != Parameter.VAR_KEYWORD]
    require_known(kind.__name__, options, [*own, *sorted(of_cache - {*own})])


def make_kv_cache(model: PreTrainedModel, num_blocks: int | None, block_size: int, **options: Any) -> PagedKVCache:
    """Make a PagedKVCache for a model; if ranks share the model, of as many blocks as each of them has room for."""
    num_layers, num_kv_heads, head_dim = kv_shape(model)
    where = {"dtype": dtype_of_values(model), "array_module": torch, "device": model.device}
    states = kv_states(model).arrays(model.dtype)
    options = where | kv_windows(model).options | {"states": states or None} | options
    sizes: Any = num_layers, num_blocks, block_size, num_kv_heads, head_dim
    made = PagedKVCache(*sizes, **options)
    if num_ranks(model) > 1:
        from .ranks import fewest_blocks  # it imports torch.distributed

        fewest = fewest_blocks(made.pool.num_blocks, model.device)
        if fewest < made.pool.num_blocks:
            del made
            made = PagedKVCache(num_layers, fewest, *sizes[2:], **options | {"memory": None})
    return made


def make_swap_space(model: PreTrainedModel, cache: PagedKVCache, store: Any) -> SwapSpace | None:
    """Make a SwapSpace for a model's cache, if there is a store; refused where ranks share the model."""
    if store is None:
        return None
    if num_ranks(model) > 1:
        raise ValueError(
            "swap must be None for a model on several ranks: each of them would measure other times, and take other "
            "steps than the others"
        )
    from ...stores import SwapSpace  # which nobody else needs

    return SwapSpace(cache, store)


class PagedCache(Cache):
    """A paged cache for generate: ``model.generate(..., past_key_values=PagedCache(model, memory="1GiB"))``.

    Each row of the batch is a sequence of a PagedKVCache: padding takes no slots, beams share blocks, and rejected
    drafts are truncated. One cache serves one call of generate, or several that continue the same rows; `reset` makes
    it ready for others.

    Parameters
    ----------
    model : PreTrainedModel
        A model after :func:`use_pagedkv`.
    num_blocks : int or None
        N; None if `memory` is given.
    block_size : int
        P, tokens per block.
    **options
        `memory`, `kv_dtype`, `max_seqs` (rows, beams included) and others of :class:`~pagedkv.PagedKVCache`. The
        windows and states of the layers are those of the model.

    Attributes
    ----------
    kv : PagedKVCache
    seqs : list of int
        The sequence of each row of the batch, after the first forward pass.

    Raises
    ------
    TypeError, ValueError
        As for :class:`~pagedkv.PagedKVCache`; TypeError, when it is copied or pickled.

    Notes
    -----
    Before it begins, a forward pass that needs more blocks than are free raises OutOfBlocksError, and one that makes a
    row longer than the whole cache ValueError; the cache does not change. The next call undoes a pass that fails later
    or is interrupted.

    Examples
    --------
    >>> import torch
    >>> from transformers import LlamaConfig, LlamaForCausalLM
    >>> from pagedkv.integrations.transformers import PagedCache, use_pagedkv
    >>> heads = {"hidden_size": 512, "num_attention_heads": 8, "num_key_value_heads": 2}
    >>> model = LlamaForCausalLM(LlamaConfig(vocab_size=64, num_hidden_layers=1, intermediate_size=64, **heads)).eval()
    >>> use_pagedkv(model)
    >>> cache = PagedCache(model, num_blocks=16)
    >>> ids = torch.tensor([[1, 5, 3]])
    >>> texts = model.generate(ids, past_key_values=cache, max_new_tokens=2, min_new_tokens=2, pad_token_id=0)
    >>> texts.shape
    torch.Size([1, 5])
    >>> cache.reset()
    """

    turns: LayerTurns  # of the layers in the pass in progress

    def __init__(self, model: PreTrainedModel, num_blocks: int | None = None, block_size: int = 16, **options: Any):
        require_options(type(self), options)
        require_supported(uncompiled(model))
        self._made_for = *kv_shape(model), model.dtype
        self._windows, self._states = kv_windows(model), kv_states(model)
        self.kv = make_kv_cache(model, num_blocks, block_size, **{"prefix_cache": False} | options)
        self.seqs: list[int] = []
        # Lengths of a row with padding, as transformers counts them: models ask for it before their first layer.
        self.length = self._next_length = 0
        self._before: npt.NDArray[np.int32] | None = None  # lengths of rows, while a pass has not ended
        self._others: list[list[int]] = [[]]  # sequences that are not yet rows, or no more
        self._filled_by = weakref.ref(model)
        # States of the pass in progress, which the layers change.
        self._changing: dict[str, torch.Tensor] = {}
        super().__init__(layers=cache_layers(model, self))

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        """Refuse copy and pickle."""
        raise TypeError(
            "a PagedCache cannot be copied or pickled, since both would own the same blocks: crop(-n) goes back to a "
            "beginning, batch_repeat_interleave(n) makes rows that share it, and requests of an Engine share it as well"
        )

    def require_suits(self, model: PreTrainedModel) -> None:
        """Raise ValueError unless this model has filled the cache so far, or could fill it if it is empty."""
        self._undo()
        if self.seqs:
            if self._filled_by() is not model:
                raise ValueError("this PagedCache has tokens of another model: call reset(), or make one of its own")
            return
        self._filled_by = weakref.ref(model)
        name, remedy = type(model).__name__, "each model needs a PagedCache(model, ...) of its own"
        if (asks := (*kv_shape(model), model.dtype)) != self._made_for:
            made_for = f"(layers, KV heads, head_dim, dtype) = {self._made_for}"
            raise ValueError(f"this PagedCache is for {made_for}, and {name} has {asks}: {remedy}")
        if kv_windows(model) != self._windows:
            raise ValueError(f"this PagedCache is for layers of other windows than {name} has: {remedy}")
        if kv_states(model) != self._states:
            raise ValueError(f"this PagedCache is for layers of other states than {name} has: {remedy}")

    def require_positions(
        self, position_ids: torch.Tensor | None, num_rows: int, length: int, attention_mask: torch.Tensor | None
    ) -> None:
        """Raise ValueError unless the positions of new tokens follow those cached in their row.

        Positions may count padding or not. generate drops a mask that hides nothing, and then only the positions show
        its width. `begin` refuses batches that are wrong for other reasons.
        """
        # Positions of images and sound have several axes.
        is_wrong = num_rows <= 0 or length <= 0 or len(self.seqs) not in (0, num_rows)
        if position_ids is None or position_ids.ndim != 2 or is_wrong:
            return
        if position_ids.shape[1] != length or len(position_ids) not in (1, num_rows):
            got = tuple(position_ids.shape)
            raise ValueError(
                f"position_ids must have shape (rows, tokens) = ({num_rows}, {length}), got {got}: {_FROM_MASK}"
            )
        is_token = np.ones((num_rows, length), np.bool)
        if attention_mask is not None:
            is_token = self._read_mask(attention_mask, num_rows, length)[:, -length:]
        positions = position_ids.expand(num_rows, length).numpy(force=True)
        cached = self.kv.seq_lens(self.seqs) if self.seqs else np.zeros(num_rows, np.int32)
        tokens, columns = cached[:, None] + is_token.cumsum(1) - 1, self.length + np.arange(length)
        if not any(((positions == right) | ~is_token).all() for right in (tokens, columns)):
            row, column = np.argwhere((positions != tokens) & is_token)[0]
            raise ValueError(
                f"position_ids must go on behind the {cached[row]} tokens that this PagedCache has of row {row}, with "
                f"{tokens[row, column]}, got {positions[row, column]}: {_FROM_MASK}"
            )

    def begin(self, num_rows: int, length: int, attention_mask: torch.Tensor | None) -> CachedPass:
        """Make room for the new tokens of every row, and return the pass for the model's layers.

        Parameters
        ----------
        num_rows, length : int
            The shape of the model's input.
        attention_mask : (num_rows, cached tokens + length) tensor or None
            0 for padding, which is on the left.
        """
        new: Any = length  # an int for all rows, by which append recognises a decode step
        is_token = None
        if num_rows == 0:
            raise ValueError("the batch must have at least one row, got none")
        if length <= 0:
            raise ValueError(
                f"the batch must have a new token behind the {self.length} that this PagedCache has, got none: call "
                "reset() before another text"
            )
        if attention_mask is not None:
            of_input = self._read_mask(attention_mask, num_rows, length)[:, -length:]
            if not of_input.all():
                new, is_token = of_input.sum(1).tolist(), attention_mask[:, -length:].bool().flatten()
        self._undo()
        if self.seqs and len(self.seqs) != num_rows:
            raise ValueError(
                f"this PagedCache has {len(self.seqs)} rows, and the batch {num_rows}: call reset() before another one"
            )
        try:
            if not self.seqs:
                self._start(num_rows)
            seqs = self.seqs
            # Before anything changes: what comes next undoes this pass, wherever an interrupt has ended it.
            self.seqs, self._before, self._next_length = seqs, self.kv.seq_lens(seqs), self.length + length
            try:
                longest, most = int((self._before + new).max()), self.kv.max_seq_len
                if longest > most:
                    raise ValueError(
                        f"a row must have at most {most} tokens, for which this PagedCache has room, got {longest}: "
                        "make one with more memory, num_blocks or max_seq_len"
                    )
                slots = self.kv.append(seqs, new)
            except BaseException:
                self._undo()
                raise
        except CapacityError as error:
            num_tokens = num_rows * length if is_token is None else sum(new)
            error.add_note(
                f"This pass brings {num_tokens} tokens of {num_rows} rows to {len(self.seqs)} rows in a PagedCache of "
                f"{self.kv.pool.num_blocks} blocks of {self.kv.block_size}: make one with more memory or num_blocks, "
                "and with as large a max_seqs as there are rows, and a state_memory for them if layers have a state; "
                "reset() frees the rows of an earlier generate."
            )
            raise
        batch = self.kv.batch(seqs, new)
        if self._states.layers:
            self._changing = self.kv.read_states(seqs)
            begin_states(self.layers, self._changing, is_continued=bool(self._before.any()))
        if is_token is None:
            return CachedPass(self.kv, slots, batch, layers=self._windows.layers)
        rows = is_token.nonzero()[:, 0]
        of_all = slots.new_full((*slots.shape[:-1], len(is_token)), -1)
        slots = of_all.index_copy(-1, rows, slots)
        return CachedPass(self.kv, slots, batch, rows, self._windows.layers)

    def _read_mask(self, attention_mask: torch.Tensor, num_rows: int, length: int) -> npt.NDArray[np.bool]:
        """Which tokens a mask shows, on the host; raise unless it shows all cached ones, and pads on the left."""
        if not isinstance(attention_mask, torch.Tensor):
            raise TypeError(
                f"attention_mask must be a (rows, tokens) tensor, 0 for padding, got {type(attention_mask).__name__}: "
                "give what the tokenizer returns; what each layer sees beyond that, paged attention knows itself"
            )
        shape = tuple(attention_mask.shape)
        if shape != (num_rows, self.length + length):
            raise ValueError(
                f"attention_mask must have shape (rows, tokens) = ({num_rows}, {self.length} cached + {length}), got "
                f"{shape}: call reset() before another text"
            )
        shown: npt.NDArray[np.bool] = (attention_mask != 0).numpy(force=True)
        if len(self.seqs) == num_rows:
            cached = self.kv.seq_lens(self.seqs) if self._before is None else self._before
            if (of_cached := shown[:, :-length].sum(1).tolist()) != cached.tolist():
                raise ValueError(
                    f"attention_mask must show all tokens that this PagedCache has, {cached.tolist()} of its rows, and "
                    f"no others, got {of_cached}: padding keeps its columns, and cached tokens cannot be hidden"
                )
        of_input = shown[:, -length:]
        if (behind := np.flatnonzero(of_input.any(1) & ~of_input[:, -1])).size:
            raise ValueError(
                f"attention_mask must show the last token of row {behind[0]}, and shows others: generate goes on "
                'behind the last column, so pad on the left, with tokenizer.padding_side = "left"'
            )
        return shown

    def _start(self, num_rows: int) -> None:
        first, before = [NO_HANDLE], np.zeros(num_rows, np.int32)
        others: list[list[int]] = [[]]
        try:
            self.kv.add_found([], last=first)
            self.kv.fork(first, num_rows - 1, last=others)
            # As in `begin`: what comes next undoes this, if an interrupt comes.
            self.seqs, self._before = [*first, *others[0]], before
        except BaseException:
            if first[0] != NO_HANDLE:
                self.kv.free([*first, *others[0]])
            raise

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the new keys and values unchanged, since `paged_attention` writes them.

        Raises
        ------
        RuntimeError
            The model does not use pagedkv.
        """
        if self._before is None:  # no pass has begun
            raise RuntimeError("this model does not fill a PagedCache: call use_pagedkv(model) first")
        self.turns.update(layer_idx)
        return key_states, value_states

    def end(self) -> None:
        """Record that the pass has written the new tokens of every row."""
        if self._states.layers:
            self.kv.write_states(self.seqs, self._changing)
            self._let_go_of_states()
        self.length, self._before = self._next_length, None

    def _undo(self) -> None:
        """Truncate the tokens of a pass that did not end, or those that `crop` drops; free what is no row."""
        self._free_others()
        if self._before is None:
            return
        self._let_go_of_states()
        if self._states.layers and (self.kv.state_lens(self.seqs) != self._before).any():
            raise RuntimeError(
                "the last pass was interrupted while it stored the states of this PagedCache's rows, which are lost: "
                "call reset() before another text"
            )
        self.kv.truncate(self.seqs, self._before)
        self._before = None
        if self.length == 0:
            self.reset()

    def reset(self) -> None:
        """Free all sequences, so that the cache can serve other rows."""
        self._let_go_of_states()
        self._free_others()
        with suppress(KeyError):  # an interrupted call has freed them
            self.kv.free(self.seqs)
        self.seqs, self.length, self._before = [], 0, None

    def _free_others(self) -> None:
        if self._others[0]:
            with suppress(KeyError):  # as in `reset`
                self.kv.free(self._others[0])
            self._others = [[]]

    def _let_go_of_states(self) -> None:
        """Free the copies that a pass has changed."""
        if self._changing:
            self._changing = {}
            begin_states(self.layers, {}, is_continued=False)

    @property
    def is_croppable(self) -> bool:
        """Whether `crop` can drop tokens, of drafts for example."""
        return not self._states.layers

    def activate_past_recording(self) -> None:
        """Get ready for drafts, tokens that `crop` may drop again.

        Raises
        ------
        ValueError
            Layers of the model have a state.
        """
        self._require_croppable()

    def _require_croppable(self) -> None:
        if not self.is_croppable:
            raise ValueError(
                "this PagedCache has layers with a state, which cannot go back to fewer tokens: generate without "
                "drafts (assistant_model, prompt_lookup_num_tokens), and call reset() before another text"
            )

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        """Let each row continue with the tokens of another, by `PagedKVCache.reorder`."""
        self._undo()
        self.kv.reorder(self.seqs, beam_idx.tolist())

    def crop(self, tokens_to_remove: int) -> None:
        """Drop the last ``-tokens_to_remove`` tokens of every row, by `PagedKVCache.truncate`.

        Raises
        ------
        ValueError
            There are not so many, or layers of the model have a state.
        """
        if tokens_to_remove > 0:
            raise ValueError(f"tokens_to_remove must be at most 0, minus the number of tokens, got {tokens_to_remove}")
        if tokens_to_remove:
            self._require_croppable()
        self._undo()
        if self.seqs and tokens_to_remove:
            lengths, length = self.kv.seq_lens(self.seqs) + tokens_to_remove, self.length
            if (left := int(lengths.min())) < 0:
                least = f"{tokens_to_remove - left}, minus what the shortest row has"
                raise ValueError(f"tokens_to_remove must be at least {least}, got {tokens_to_remove}")
            # As in `begin`: if an interrupt comes, what comes next drops the tokens.
            self.length, self._before = length + tokens_to_remove, lengths
            try:
                self._undo()
            except ValueError:
                if (self.kv.seq_lens(self.seqs) != lengths).any():  # windows have released what comes before
                    self.length, self._before = length, None
                raise

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Insert copies behind every row that share its blocks, by `PagedKVCache.fork`."""
        repeats = as_int("repeats", repeats, minimum=1)
        self._undo()
        if self.seqs:
            self._take([i for i in range(len(self.seqs)) for _ in range(repeats)])

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Keep some rows, in this order; ValueError for more rows than there are.

        An interrupt may leave fewer rows, without the copies of those that are named again.
        """
        self._undo()
        if self.seqs:
            kept = np.arange(len(self.seqs))[indices.cpu().numpy()].tolist()
            if len(kept) > len(self.seqs):
                raise ValueError(
                    f"indices must be at most the {len(self.seqs)} rows of the cache, got {len(kept)}: "
                    "call batch_repeat_interleave first"
                )
            # First, so that copies have room.
            rows = [*dict.fromkeys(kept)]
            others = [seq for row, seq in enumerate(self.seqs) if row not in rows]
            self.seqs, self._others[0] = [self.seqs[row] for row in rows], others
            self._free_others()
            self._take([rows.index(row) for row in kept])

    def _take(self, rows: list[int]) -> None:
        """Let the cache have these of its rows; one that is named again is a copy."""
        are_copies = [row in rows[:i] for i, row in enumerate(rows)]
        self.kv.fork([self.seqs[row] for row in compress(rows, are_copies)], last=self._others)
        copies = iter(self._others[0])
        seqs = [next(copies) if is_copy else self.seqs[row] for row, is_copy in zip(rows, are_copies, strict=True)]
        self.seqs, self._others = seqs, [[]]

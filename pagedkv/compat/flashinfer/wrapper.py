"""What the wrappers of decode and prefill have in common: their tables, types and options, and the call itself."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from ...arrays import between_graphs, host_view
from ...memory.arguments import as_int
from ...operations.attention import decode_attention, prefill_attention
from ...operations.plan import attend
from ...validation import require
from ..arguments import as_int32, in_words, number, require_tensors, require_writable
from ..ragged import behind_padding, require_starts
from .cascade import LN2
from .page import FLOAT8, require_kv_layout, unpack

_WORDS = {
    **{"block_tables": "indices", "scale": "sm_scale", "window": "window_left", "softcap": "logits_soft_cap"},
    **{"mask": "custom_mask or packed_custom_mask", "k_cache": "paged_kv_cache", "v_cache": "paged_kv_cache"},
}


class Wrapper:
    """Base of both wrappers: their device, and what the last `plan` has set."""

    _HINTS: tuple[str, ...] = ()  # arguments of the constructor after use_cuda_graph, in the order of the original
    _prefix = ""  # of the names of a page table
    _takes_windows = False  # whether a call may have another window than the plan
    _num_rows: int

    def __init__(
        self,
        float_workspace_buffer: Any,
        kv_layout: str = "NHD",
        use_cuda_graph: bool = False,
        *args: Any,
        **hints: Any,
    ) -> None:
        require_tensors(float_workspace_buffer=float_workspace_buffer)
        names = self._HINTS[len(args) :]
        if len(args) > len(self._HINTS) or not hints.keys() <= set(names):
            raise TypeError(
                f"after use_cuda_graph come {', '.join(self._HINTS)}, "
                f"got {len(args)} by position and {', '.join(hints)}"
            )
        hints.update(zip(self._HINTS, args, strict=False))
        require_kv_layout(kv_layout)
        if use_cuda_graph:
            raise ValueError(
                "use_cuda_graph must be False: plan makes new tables, which a captured graph would not see"
            )
        if hints.get("jit_args") is not None or hints.get("jit_kwargs") is not None:
            raise ValueError("jit_args must not be given: pass a score_mod to pagedkv.prefill_attention")
        self.device = float_workspace_buffer.device
        self._layout: Any = kv_layout
        self._planned = False
        self._starts: dict[str, Any] = {}
        self._masks: dict[str, Any] = {}

    def reset_workspace_buffer(self, float_workspace_buffer: Any, int_workspace_buffer: Any) -> None:
        """Do nothing, since workspace buffers are not used."""

    def end_forward(self) -> None:
        """Do nothing, as the original does."""

    def _set_tables(self, indptr: Any, indices: Any, last_page_len: Any, page_size: int) -> None:
        """Convert the page table to rows, and compute the lengths."""
        page_size = as_int("page_size", page_size, minimum=1, maximum=2**31 - 1)
        names = [f"{self._prefix}{x}" for x in ("indptr", "indices", "last_page_len")]
        last_page_len, indices = as_int32(names[2], last_page_len, (None,)), as_int32(names[1], indices, (None,))
        indptr = as_int32(names[0], indptr, (len(last_page_len) + 1,))
        starts, pages, last = (x.cpu().numpy() for x in (indptr, indices, last_page_len))
        require_starts(names[0], starts, len(pages), f"pages of {names[1]}")
        counts = np.diff(starts)
        has_pages = counts > 0
        if ((last < 1) | (last > page_size))[has_pages].any():
            raise ValueError(f"{names[2]} must be in 1..page_size = 1..{page_size}, got {last.tolist()}")
        tables = np.zeros((len(counts), max(int(counts.max(initial=0)), 1)), np.int32)
        tables[np.arange(tables.shape[1]) < counts[:, None]] = pages[starts[0] : starts[-1]]
        lens_in_int64 = np.where(has_pages, (counts.astype(np.int64) - 1) * page_size + last, 0)
        if lens_in_int64.max(initial=0) > 2**31 - 1:
            raise ValueError(f"{names[0]} must leave a request at most 2**31 - 1 tokens, got {lens_in_int64.tolist()}")
        lens = lens_in_int64.astype(np.int32)
        self._max_seq_len = int(lens.max(initial=0))
        self._tables, self._lens = self._on_device(tables), self._on_device(lens)
        self._lens_on_host, self._page_size = lens, page_size
        self._plans: dict[Any, Any] = {}
        self._query_lens: Any = None

    def _pad(self) -> None:
        """Put requests with fewer keys than tokens behind padding, once a q has shown that there are so many tokens."""
        arrays = self._tables, self._lens, self._query_lens
        tables, lens, leftpad = behind_padding(*arrays, self._num_rows, self._page_size, "last_page_len")
        longest = int(lens.max())
        # Nothing is called between these: after an interrupt, the next call pads all again, or nothing.
        self._tables, self._lens, self._max_seq_len = tables, lens, longest
        self._masks["leftpad"], self._query_lens = leftpad, None

    def _set_types(self, q_data_type: Any, kv_data_type: Any, o_data_type: Any) -> None:
        self._q_dtype = _dtype("q_data_type", "float16" if q_data_type is None else q_data_type)
        self._kv_dtype = self._q_dtype if kv_data_type is None else _dtype("kv_data_type", kv_data_type)
        if o_data_type is not None and _dtype("o_data_type", o_data_type) != self._q_dtype:
            raise ValueError(f"o_data_type must be {self._q_dtype}, that of q, got {o_data_type}")

    def _set_options(self, sizes: tuple[int, int, int], window_left: int, soft_cap: Any, sm_scale: Any) -> None:
        names = "num_qo_heads", "num_kv_heads", "head_dim"
        self._num_qo_heads, self._num_kv_heads, self._head_dim = map(as_int, names, sizes, (1, 1, 1))
        self._set_logits(window_left, soft_cap, sm_scale)

    def _set_logits(self, window_left: int, soft_cap: Any, sm_scale: Any) -> None:
        window_left = require.integer("window_left", window_left)
        softcap = None if soft_cap is None else number("logits_soft_cap", soft_cap) or None
        scale = self._head_dim**-0.5 if sm_scale is None else number("sm_scale", sm_scale)
        self._window_left, self._softcap, self._scale = window_left, softcap, scale

    @between_graphs
    @in_words(_WORDS)
    def run(
        self,
        q: Any,
        paged_kv_cache: Any,
        *args: Any,
        q_scale: float | None = None,
        k_scale: float | None = None,
        v_scale: float | None = None,
        out: Any = None,
        lse: Any = None,
        return_lse: bool = False,
        enable_pdl: bool | None = None,
        window_left: int | None = None,
        sinks: Any = None,
    ) -> Any:
        """Compute attention as planned.

        Parameters
        ----------
        q : (tokens, num_qo_heads, head_dim) tensor
        paged_kv_cache : tensor or pair of tensors
        q_scale, k_scale, v_scale : float, optional
            The first two multiply `sm_scale`, the last one the output.
        out : tensor like q, optional
        lse : (tokens, num_qo_heads) float32 tensor, optional
            Where to write the LSE.
        return_lse : bool
            Also return the LSE, base 2.
        enable_pdl
            No result depends on it.
        window_left : int, optional
            The planned one; of prefill, another one for this call.
        sinks : (num_qo_heads,) float32 tensor, optional

        Returns
        -------
        tensor, or (tensor, lse)

        Raises
        ------
        RuntimeError
            `plan` was not called.
        TypeError, ValueError, IndexError
            As in `pagedkv.decode_attention` and `pagedkv.prefill_attention`, and for tensors that are not as planned.
        """
        if args:
            raise ValueError("run takes q and paged_kv_cache by position; what follows them is for jit_args")
        self._require_planned()
        require_tensors(q=q)
        require.boolean("return_lse", return_lse)
        if q.dtype != self._q_dtype:
            raise ValueError(f"q must have dtype {self._q_dtype}, which was planned, got {q.dtype}")
        planned = self._num_rows, self._num_qo_heads, self._head_dim
        if q.shape != planned:
            raise ValueError(
                f"q must have shape (tokens, num_qo_heads, head_dim) = {planned}, as planned, got {tuple(q.shape)}"
            )
        if window_left is None:
            window_left = self._window_left
        elif require.integer("window_left", window_left) != self._window_left and not self._takes_windows:
            raise ValueError(f"window_left must be {self._window_left}, which was planned, got {window_left}")
        if lse is not None:
            require_tensors(lse=lse)
            if lse.dtype != torch.float32 or lse.shape != q.shape[:2] or not return_lse:
                raise ValueError(
                    f"lse must have dtype torch.float32 and shape {tuple(q.shape[:2])}, and needs return_lse=True, "
                    f"got {lse.dtype} and {tuple(lse.shape)}"
                )
            require_writable("lse", lse)
        if out is not None:
            require_tensors(out=out)
        caches, stored = self._caches(paged_kv_cache)
        if self._query_lens is not None:
            self._pad()
        q_scale, k_scale, v_scale = map(_one_number, ("q_scale", "k_scale", "v_scale"), (q_scale, k_scale, v_scale))
        stored |= {"layout": self._layout, "max_seq_len": self._max_seq_len}
        options = {
            **self._masks,
            "scale": self._scale * q_scale * k_scale,
            "softcap": self._softcap,
            "window": window_left + 1 if window_left >= 0 else None,
        }
        if sinks is not None:
            options["sinks"] = sinks
        where = {"block_tables": self._tables, "seq_lens": self._lens, **self._starts}
        operation: Any = prefill_attention if self._starts else decode_attention
        options |= {"out": out, "return_lse": return_lse}
        key = tuple((x.shape, x.stride(), x.dtype, x.device, x.data_ptr() % 16) for x in caches)
        result = attend(operation, self._plans, key, q, tuple(map(host_view, caches)), where, stored, options)
        result, logs = result if return_lse else (result, None)
        if v_scale != 1.0:
            result.detach().mul_(v_scale)
        if not return_lse:
            return result
        assert logs is not None
        logs.div_(LN2)
        return result, logs if lse is None else lse.detach().copy_(logs)

    def run_return_lse(self, q: Any, paged_kv_cache: Any, **options: Any) -> Any:
        """Call `run` with ``return_lse=True``."""
        return self.run(q, paged_kv_cache, return_lse=True, **options)

    def _on_device(self, x: npt.NDArray[np.int32]) -> Any:
        return x if self.device.type == "cpu" else torch.from_numpy(x).to(self.device)

    def _require_planned(self) -> None:
        if not self._planned:
            raise RuntimeError("call plan before run")

    def _caches(self, paged_kv_cache: Any) -> tuple[list[Any], dict[str, Any]]:
        """The K and V caches, and the options that say how they are stored."""
        caches = unpack(paged_kv_cache)
        page = self._page_size, self._num_kv_heads
        planned = *(page if self._layout == "NHD" else page[::-1]), self._head_dim
        if any(x.shape[1:] != planned or x.dtype != self._kv_dtype for x in caches):
            raise ValueError(
                f"paged_kv_cache must have pages of shape {planned} of {self._kv_dtype}, as planned, "
                f"got {', '.join(f'{tuple(x.shape[1:])} of {x.dtype}' for x in caches)}"
            )
        if (kv_dtype := FLOAT8.get(self._kv_dtype)) is None:
            return list(caches), {}
        return [x.view(torch.uint8) for x in caches], {"kv_dtype": kv_dtype}


def _one_number(name: str, scale: Any) -> float:
    return 1.0 if scale is None else number(name, scale)


def _dtype(name: str, given: Any) -> Any:
    dtype = getattr(torch, given, None) if isinstance(given, str) else given
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"{name} must be a torch.dtype or its name, got {given!r}")
    return dtype


def require_plain(pos_encoding_mode: str) -> None:
    if not isinstance(pos_encoding_mode, str) or pos_encoding_mode != "NONE":
        raise ValueError(
            f'pos_encoding_mode must be "NONE", got {pos_encoding_mode!r}: rotate with pagedkv.apply_rotary before, '
            "or pass alibi_slopes to pagedkv.prefill_attention"
        )

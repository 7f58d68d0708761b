"""A small decoder-only transformer in NumPy: RMSNorm, rotary positions, grouped-query attention, SwiGLU.

The forward pass knows neither positions nor how keys and values are kept. It hands each layer's q, k and v to an
`attend` function: :class:`PagedAttention` writes them into the blocks of a `pagedkv.PagedKVCache`, and rotates keys on
their way, :class:`DenseAttention` into one contiguous array for one sequence, as programs without paging do.
"""

import copy
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType

import ml_dtypes
import numpy as np

import pagedkv
from tokenizer import Tokenizer

Attend = Callable[[int, np.ndarray, np.ndarray, np.ndarray], np.ndarray]
Product = Callable[[np.ndarray, np.ndarray], np.ndarray]

ROWS_OF_TILE = 8
WEIGHTS = Path(__file__).with_name("weights.npz")
FP8 = {"fp8_e4m3": ml_dtypes.float8_e4m3fn, "fp8_e5m2": ml_dtypes.float8_e5m2}


class Transformer:
    """A transformer: its weights as float32 arrays, and its sizes.

    Parameters
    ----------
    arrays : dict of str to array
        What train.py saves: the weights by name, and the sizes as `config.<name>`.
    """

    def __init__(self, arrays: dict[str, np.ndarray]) -> None:
        size = {name.removeprefix("config."): int(arrays[name]) for name in arrays if name.startswith("config.")}
        self.num_layers, self.context = size["num_layers"], size["context"]
        self.num_heads, self.num_kv_heads, self.head_dim = size["num_heads"], size["num_kv_heads"], size["head_dim"]
        frequencies = size["rope_base"] ** (-np.arange(0, self.head_dim, 2) / self.head_dim)
        angles = np.multiply.outer(np.arange(self.context), frequencies)
        self.cos, self.sin = np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)
        weights = {name: value.astype(np.float32) for name, value in arrays.items() if value.dtype == np.float16}
        self.embed, self.norm = weights["embed"], weights["norm"]
        # torch keeps a linear layer's matrix as (out, in); here rows of x are multiplied from the left.
        self.layers = [
            {
                name.split(".")[2]: np.ascontiguousarray(value.T)
                for name, value in weights.items()
                if name.startswith(f"blocks.{i}.")
            }
            for i in range(self.num_layers)
        ]

    def on(self, array_module: ModuleType) -> "Transformer":
        """Copy the model to another array module; NumPy's functions work on CuPy's arrays, too."""
        other, asarray = copy.copy(self), array_module.asarray
        other.cos, other.sin, other.embed, other.norm = map(asarray, (self.cos, self.sin, self.embed, self.norm))
        other.layers = [{name: asarray(value) for name, value in layer.items()} for layer in self.layers]
        return other

    def forward(
        self, tokens: Sequence[int], attend: Attend, rows: Sequence[int], product: Product = np.matmul
    ) -> np.ndarray:
        """Run the tokens through the model.

        Parameters
        ----------
        tokens : (num_tokens,) ints
            The new tokens of all sequences, one sequence after the other.
        attend : callable
            attend(layer, q, k, v) -> out, with q and out (num_tokens, num_heads, head_dim) and k and v (num_tokens,
            num_kv_heads, head_dim): rotates q and k by their positions, stores k and v, and computes causal attention.
        rows : (n,) ints
            The tokens whose logits to compute, usually the last one of each sequence.
        product : callable
            Multiplies rows by a matrix; `in_tiles` gives bits that do not depend on the other rows.

        Returns
        -------
        (n, vocab_size) float32
        """
        x = self.embed[tokens]
        heads = [self.num_heads, self.num_heads + self.num_kv_heads]
        for i, w in enumerate(self.layers):
            qkv = product(rms_norm(x, w["attn_norm"]), w["wqkv"])
            q, k, v = np.split(qkv.reshape(len(x), -1, self.head_dim), heads, axis=1)
            q, k = rms_norm(q, w["q_norm"]), rms_norm(k, w["k_norm"])
            x = x + product(attend(i, q, k, v).reshape(len(x), -1), w["wo"])
            gate, up = np.split(product(rms_norm(x, w["mlp_norm"]), w["w_in"]), 2, axis=1)
            x = x + product(gate / (1 + np.exp(-gate)) * up, w["w_out"])
        return product(rms_norm(x[rows], self.norm), self.embed.T)


def load(path: Path = WEIGHTS, context: int | None = None) -> tuple[Transformer, Tokenizer]:
    """Load a weights file of train.py; `context` replaces the context length it was trained with.

    Raises ValueError if there is no such file, or it is not one of train.py.
    """
    if not path.is_file():
        raise ValueError(f"{path} is not there: train.py makes it")
    try:
        with path.open("rb") as raw, np.load(raw) as file:
            arrays = dict(file)
        if context is not None:
            arrays["config.context"] = np.array(context)
        return Transformer(arrays), Tokenizer(arrays["merges"])
    except MemoryError:
        raise
    except Exception as error:  # NumPy, zipfile and zlib raise many kinds for a bad file
        raise ValueError(f"{path} is no weights file of train.py: {error}") from None


def in_tiles(x: np.ndarray, w: np.ndarray) -> np.ndarray:
    """Compute x @ w in tiles of 8 rows, so that the bits of a row do not depend on the other rows of a step.

    For other numbers of rows BLAS uses other routines, which round differently: if a draw falls on the edge between two
    tokens, a text could differ between a batch and a run alone. OpenBLAS sums all rows of a tile of 8 alike, with AVX2
    and with AVX-512; with AVX2 it does not for tiles of 6 or 12.
    """
    tiles = np.zeros((-(-len(x) // ROWS_OF_TILE), ROWS_OF_TILE, x.shape[1]), x.dtype)
    tiles.reshape(-1, x.shape[1])[: len(x)] = x
    return (tiles @ w).reshape(-1, w.shape[1])[: len(x)]


def rms_norm(x: np.ndarray, gain: np.ndarray) -> np.ndarray:
    return x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + np.float32(1e-6)) * gain


class PagedAttention:
    """Writes keys and values to the blocks of a paged cache, and computes attention over them.

    Parameters
    ----------
    model : Transformer
    cache : pagedkv.PagedKVCache
    step : pagedkv.scheduling.Step
        The step to compute.
    backend : str
        "auto" follows the arrays, "emulator" runs the CUDA kernels without a GPU.
    """

    def __init__(
        self, model: Transformer, cache: pagedkv.PagedKVCache, step: pagedkv.scheduling.Step, backend: str = "auto"
    ) -> None:
        self.cache, self.step, self.backend = cache, step, backend
        self.rotation = {"cos": model.cos, "sin": model.sin, "positions": step.batch.positions}

    def __call__(self, layer: int, q: np.ndarray, k: np.ndarray, v: np.ndarray) -> np.ndarray:
        self.cache.write(layer, k, v, self.step.slots, **self.rotation, backend=self.backend)
        q, _ = pagedkv.apply_rotary(q, None, **self.rotation, backend=self.backend)
        return self.cache.attend(layer, q, self.step.batch, backend=self.backend)


class DenseAttention:
    """Computes attention of one sequence over contiguous arrays, reserved for its maximum length.

    Parameters
    ----------
    model : Transformer
    max_len : int
        The tokens to reserve room for.
    dtype : str
        The type of stored keys and values, as in the paged cache: float32, float16, bfloat16, int8 or an fp8 format.
    """

    def __init__(self, model: Transformer, max_len: int, dtype: str = "float32") -> None:
        floats = "float32" if dtype == "int8" else dtype  # which hold what int8 codes and their scales stand for
        stored = FP8.get(floats) or getattr(ml_dtypes, floats, None) or np.dtype(floats)
        shape = (model.num_layers, max_len, model.num_kv_heads, model.head_dim)
        self.k, self.v = np.zeros(shape, stored), np.zeros(shape, stored)
        self.is_int8, self.largest = dtype == "int8", float(ml_dtypes.finfo(stored).max)
        self.tables = model.cos, model.sin
        self.positions = np.arange(0)

    def extend(self, num_tokens: int) -> None:
        """Announce that the next forward pass adds num_tokens tokens to the sequence."""
        start = self.positions[-1] + 1 if len(self.positions) else 0
        self.positions = np.arange(start, start + num_tokens)

    def __call__(self, layer: int, q: np.ndarray, k: np.ndarray, v: np.ndarray) -> np.ndarray:
        q, k = pagedkv.apply_rotary(q, k, *self.tables, self.positions)
        num_kv_heads, end = k.shape[1], self.positions[-1] + 1
        self.k[layer, self.positions], self.v[layer, self.positions] = self.rounded(k), self.rounded(v)
        keys, values = self.k[layer, :end].astype(np.float32), self.v[layer, :end].astype(np.float32)
        # (tokens, heads, head_dim) -> (KV heads, query heads of each, tokens, head_dim)
        grouped = q.reshape(len(q), num_kv_heads, -1, q.shape[2]).transpose(1, 2, 0, 3)
        scores = grouped @ keys.transpose(1, 2, 0)[:, None] / np.float32(np.sqrt(q.shape[2]))
        scores[..., np.arange(end) > self.positions[:, None]] = -np.inf
        weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
        out = weights / weights.sum(axis=-1, keepdims=True) @ values.transpose(1, 0, 2)[:, None]
        return out.transpose(2, 0, 1, 3).reshape(q.shape)

    def rounded(self, x: np.ndarray) -> np.ndarray:
        """Round rows (tokens, KV heads, head_dim) as the paged cache does."""
        if not self.is_int8:
            return x.clip(-self.largest, self.largest).astype(self.k.dtype)
        scales = abs(x).max(axis=-1, keepdims=True) / np.float32(127)
        return np.rint(x / np.where(scales > 0, scales, 1)) * scales

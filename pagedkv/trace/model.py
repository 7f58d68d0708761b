"""``python -m pagedkv kv-bytes``: how many bytes the K and V of a model take."""

from __future__ import annotations

import json
from argparse import ArgumentParser
from pathlib import Path
from typing import Any, NamedTuple

from ..layouts import FLOAT_DTYPES, FP8_KINDS
from ..memory.arguments import as_int
from ..memory.device.arrays import Arrays
from ..memory.sizing import blocks_in, kv_bytes
from ..typing import KvDtype

MOST_CONFIG_BYTES = 16 * 2**20
MOST_BYTES = 2**63  # of K and V
# The keys of a model's shape in config.json of transformers.
CONFIG = {"num_layers": "num_hidden_layers", "num_kv_heads": "num_key_value_heads", "head_dim": "head_dim"}


class Model(NamedTuple):
    """What the config of a model says of its K and V.

    Attributes
    ----------
    shape : dict
        Arguments of `kv_bytes`.
    windows : list of int or None
        How many tokens a query of each layer sees, its own among them; None for all.
    """

    shape: dict[str, Any]
    windows: list[int | None]


def read_config(path: str) -> Model:
    """Read the config of a model of transformers.

    Parameters
    ----------
    path : str
        Its config.json, or the folder with it.

    Raises
    ------
    OSError
        The file cannot be read.
    ValueError
        It is no JSON, does not say the shape, or the model has no K and V for each head (MLA).
    """
    file = Path(path) / "config.json" if Path(path).is_dir() else Path(path)
    try:
        with file.open("rb") as opened:
            text = opened.read(MOST_CONFIG_BYTES)
            if opened.read(1):
                raise ValueError(f"it has more than {MOST_CONFIG_BYTES} bytes")
        config = _named_values("it", json.loads(text))
        config = _named_values("its text_config", config.get("text_config", config))
        if "kv_lora_rank" in config:
            raise ValueError("its attention is MLA, which keeps a latent vector instead of K and V")
        heads, width = (as_int(name, config.get(name, 0)) for name in ("num_attention_heads", "hidden_size"))
        known = {"num_key_value_heads": heads, "head_dim": width // max(1, heads)} | config
        if missing := [theirs for theirs in CONFIG.values() if not known.get(theirs)]:
            raise ValueError(f"it has no {', '.join(missing)}")
        shape: dict[str, Any] = {ours: known[theirs] for ours, theirs in CONFIG.items()}
        dtype = config.get("dtype") or config.get("torch_dtype")
        shape |= {"dtype": dtype} if dtype else {}
        _bytes(1, **shape)
        return Model(shape, _windows(config, shape["num_layers"]))
    except (OverflowError, RecursionError, SyntaxError, TypeError, ValueError) as error:
        said = str(error).replace("\n", " ")[:200]
        raise ValueError(f"{file} does not say the shape of a model ({said}): give --num-layers and so on") from error


def _windows(config: dict[str, Any], num_layers: int) -> list[int | None]:
    """The window of each layer, as the configuration classes of transformers read it."""
    if "sliding_window" not in config or config.get("use_sliding_window") is False:
        return [None] * num_layers
    window = as_int("sliding_window", config["sliding_window"], minimum=1)
    if "layer_types" in config:
        sliding = [kind == "sliding_attention" for kind in config["layer_types"]]
        if len(sliding) != num_layers:
            raise ValueError(f"layer_types must have {num_layers} entries, one for each layer, got {len(sliding)}")
    else:  # every n-th layer sees all tokens; Gemma 2 says so nowhere
        every = 2 if config.get("model_type") == "gemma2" else config.get("sliding_window_pattern", 0)
        sliding = [not every or (i + 1) % every != 0 for i in range(num_layers)]
    return [window if slides else None for slides in sliding]


def seen_bytes(num_tokens: int, windows: list[int | None], block_size: int, **shape: Any) -> int:
    """Bytes of the blocks whose keys a decoding sequence can still see: for a window w, 1 + ceil((w - 1) / P)."""
    num_blocks = -(-num_tokens // block_size)
    held = [num_blocks if w is None else min(num_blocks, 1 - (1 - w) // block_size) for w in windows]
    return sum(held) * kv_bytes(block_size, **shape | {"num_layers": 1})


def _named_values(name: str, value: Any) -> dict[str, Any]:
    """Check that a value is a JSON object, and drop its nulls."""
    if not isinstance(value, dict):
        raise ValueError(f"{name} must be a JSON object, got {json.dumps(value)}")
    return {key: one for key, one in value.items() if one is not None}


def _bytes(num_tokens: int, **shape: Any) -> int:
    num_bytes = kv_bytes(num_tokens, **shape)
    if num_bytes > MOST_BYTES:
        raise ValueError("the K and V take more than 2**63 bytes")
    return num_bytes


def add_options(parser: ArgumentParser) -> None:
    """Add the options of the command line."""
    parser.add_argument("--config", metavar="PATH", help="config.json of a model of transformers, or its folder")
    parser.add_argument("--num-layers", type=int, metavar="N")
    parser.add_argument("--num-kv-heads", type=int, metavar="N", help="heads of K and V, not of queries")
    parser.add_argument("--head-dim", type=int, metavar="D", help="elements of a head")
    parser.add_argument(
        "--dtype", choices=[dtype.name for dtype in FLOAT_DTYPES], help="default: the model's, or float16"
    )
    parser.add_argument("--kv-dtype", choices=FP8_KINDS, help="a cache in 8 bits")
    parser.add_argument("--block-size", type=int, default=16, metavar="P", help="tokens in a block (default: 16)")
    parser.add_argument("--memory", metavar="SIZE", help='say how many such sequences fit, into "24GiB" for example')
    parser.add_argument(
        "--num-tokens", type=int, default=[4096], nargs="+", metavar="T", help="tokens of a sequence (default: 4096)"
    )


def run(
    *,
    config: str | None,
    num_tokens: list[int],
    block_size: int,
    kv_dtype: KvDtype | None,
    memory: str | None,
    progress: Any,
    **shape: Any,
) -> list[dict[str, Any]]:
    """Compute the bytes of a token, of a block, and of sequences.

    Where layers have a window, say also how many of a sequence's bytes its queries can still see: `PagedKVCache` keeps
    all of them.

    Returns
    -------
    list of dict
        A row for the shape and one for each length.
    """
    given = {name: value for name, value in shape.items() if value is not None}
    read = read_config(config) if config else Model({}, [])
    model = {"dtype": "float16"} | read.shape | given
    missing = [name for name in CONFIG if name not in model]
    if missing:
        options = ", ".join(f"--{name.replace('_', '-')}" for name in missing)
        raise ValueError(f"the model's shape is missing: give {options}, or --config with its config.json")
    model["kv_dtype"] = kv_dtype

    def size(tokens: int, rounded: int = 1) -> int:
        return _bytes(tokens, **model, block_size=rounded)

    head = {name: model[name] for name in CONFIG} | {"stored as": kv_dtype or str(model["dtype"])}
    rows = [head | {"bytes of a token": size(1), f"of a block of {block_size}": size(1, block_size)}]
    room = None if memory is None else blocks_in(memory, size(1, block_size), Arrays("numpy", None))
    for tokens in num_tokens:
        total, blocks = size(tokens, block_size), -(-tokens // block_size)
        row: dict[str, Any] = {"tokens": tokens, "blocks": blocks, "bytes": total, "GiB": total / 2**30}
        if any(read.windows) and "num_layers" not in given:
            row["GiB in sight"] = seen_bytes(tokens, read.windows, block_size, **model) / 2**30
        if room is not None:
            row["sequences"] = room // blocks if blocks else "any"
        rows.append(row)
    return rows

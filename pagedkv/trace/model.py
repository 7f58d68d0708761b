"""``python -m pagedkv kv-bytes``: how many bytes the K and V of a model take."""

from __future__ import annotations

import json
import math
from argparse import ArgumentParser
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from ..layer_states import LayerStates, layer_states
from ..layer_windows import LayerWindows, layer_shapes, layer_windows, unequal_layers
from ..layouts import FLOAT_DTYPES, KV_DTYPES, KvFormat, float_dtype
from ..memory.arguments import MAX_INT64, as_int
from ..memory.device.arrays import Arrays
from ..memory.device.layer_caches import bytes_of_block
from ..memory.groups import LayerGroups
from ..memory.sizing import bytes_of, count_in, kv_bytes, shapes_of
from ..typing import KvDtype

MOST_CONFIG_BYTES = 16 * 2**20
MOST_BYTES = 2**63  # of K and V
# The keys of a model's shape in config.json of transformers.
CONFIG = {"num_layers": "num_hidden_layers", "num_kv_heads": "num_key_value_heads", "head_dim": "head_dim"}
_LAYERS = "layers_block_type"  # which Nemotron-H has in place of num_hidden_layers


class Model(NamedTuple):
    """What the config of a model says of its K and V, and of states.

    Attributes
    ----------
    shape : dict
        Arguments of `kv_bytes`; num_layers are those that attend.
    layers : LayerWindows
        Which K and V each of these needs.
    states : LayerStates
        Which layers have a state, and its shapes.
    """

    shape: dict[str, Any]
    layers: LayerWindows
    states: LayerStates


def read_config(path: str, given: Mapping[str, Any] = MappingProxyType({})) -> Model:
    """Read the config of a model of transformers.

    Parameters
    ----------
    path : str
        Its config.json, or the folder with it.
    given : mapping
        Arguments of `kv_bytes`, for what the file leaves to the model's class.

    Raises
    ------
    OSError
        The file cannot be read.
    ValueError
        It is no JSON, does not say the shape, or the model's layers do not all keep K and V, or states of a known kind.
    """
    file = Path(path) / "config.json" if Path(path).is_dir() else Path(path)
    try:
        with file.open("rb") as opened:
            text = opened.read(MOST_CONFIG_BYTES)
            if opened.read(1):
                raise ValueError(f"it has more than {MOST_CONFIG_BYTES} bytes")
        whole = _named_values("it", json.loads(text))
        config = _named_values("its text_config", whole.get("text_config", whole))
        heads, width = (as_int(name, config.get(name, 0)) for name in ("num_attention_heads", "hidden_size"))
        if reason := unequal_layers(config):
            raise ValueError(f"it {reason}")
        known = {"num_key_value_heads": heads, "head_dim": width // heads if heads else 0}
        known |= {"head_dim": config["attention_head_dim"]} if "attention_head_dim" in config else {}  # Zamba 2
        known |= {"num_hidden_layers": len(config[_LAYERS])} if isinstance(config.get(_LAYERS), list) else {}
        known |= {theirs: given[ours] for ours, theirs in CONFIG.items() if ours in given} | config
        if missing := [theirs for theirs in CONFIG.values() if not known.get(theirs)]:
            raise ValueError(f"it has no {', '.join(missing)}")
        shape: dict[str, Any] = {ours: known[theirs] for ours, theirs in CONFIG.items()}
        dtypes = [where.get(key) for where in (config, whole) for key in ("dtype", "torch_dtype")]
        dtype = next(filter(None, dtypes), None)
        shape |= {"dtype": dtype} if dtype else {}
        _bytes(1, **shape)
        num_layers = shape["num_layers"]
        layers, states = layer_windows(config, num_layers), layer_states(config, num_layers)
        shape |= {"num_layers": len(layers.layers)} | layer_shapes(config, *(shape[name] for name in CONFIG))
        _bytes(1, **shape)
        return Model(shape, layers, states)
    except OSError as error:
        raise OSError(
            f"--config {file} cannot be read ({error.strerror}): give a model's config.json, or the folder with it; "
            "a model of the Hub has to be downloaded first"
        ) from error
    except (OverflowError, RecursionError, SyntaxError, TypeError, ValueError) as error:
        said = str(error).replace("\n", " ")[:200]
        raise ValueError(
            f"{file} does not say the shape of a model ({said}): give --num-layers, --num-kv-heads and --head-dim"
        ) from error


def weight_bytes(path: str | None) -> int:
    """Add up the tensors in the safetensors files of a model; each file begins with the length of its header.

    Parameters
    ----------
    path : str or None
        The model's config.json, or the folder with it, as given. If the folder has model.safetensors.index.json, the
        files that this names count, else all of them.

    Raises
    ------
    OSError
        A file cannot be read.
    ValueError
        No path or no such file is there, or one is not whole.
    """
    if path is None:
        raise ValueError("--weights needs --config with the folder of a model")
    folder = Path(path) if Path(path).is_dir() else Path(path).parent
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        try:
            files = {folder / name for name in json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()}
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise ValueError(f"{index} does not name the files of the weights in weight_map") from error
    else:
        files = set(folder.glob("*.safetensors"))
    if not files:
        raise ValueError(f"--weights needs *.safetensors beside config.json, and there are none in {folder}")
    total = 0
    for file in files:
        with file.open("rb") as opened:
            size, header = file.stat().st_size, int.from_bytes(opened.read(8), "little")
        if size < 8 + header:
            raise ValueError(f"{file} is no whole safetensors file: it has {size} bytes, and its header alone {header}")
        total += size - 8 - header
    return total


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
    parser.add_argument("--kv-dtype", choices=KV_DTYPES, help="a cache in 8 bits")
    parser.add_argument("--block-size", type=int, default=16, metavar="P", help="tokens in a block (default: 16)")
    parser.add_argument(
        "--group-size", type=int, metavar="S", help="layers of a block, if some have a window (default: the best)"
    )
    parser.add_argument("--memory", metavar="SIZE", help='say how many such sequences fit, into "24GiB" for example')
    parser.add_argument(
        "--weights", action="store_true", help="say what the weights in the folder of --config take of the memory"
    )
    parser.add_argument(
        "--num-tokens", type=int, default=[4096], nargs="+", metavar="T", help="tokens of a sequence (default: 4096)"
    )


def run(
    *,
    config: str | None,
    num_tokens: list[int],
    block_size: int,
    group_size: int | None,
    kv_dtype: KvDtype | None,
    memory: str | None,
    weights: bool,
    progress: Any,
    **shape: Any,
) -> list[dict[str, Any]]:
    """Compute the bytes of a token, of a block, and of sequences.

    With weights, say what those take, and count what they leave of the memory; a step of the model takes more besides.
    Where layers have a state, say also what the state of a sequence takes, and so does a snapshot of it, and how many
    tokens have K and V of as many bytes. Where layers have a window or share K and V, say also what the layers of a
    sequence need if none is padded, what they would take if all of them kept all tokens, and how they are grouped.

    Returns
    -------
    list of dict
        A row for the shape and one for each length.
    """
    given = {name: value for name, value in shape.items() if value is not None}
    read = read_config(config, given) if config else Model({}, LayerWindows([], [], {}), LayerStates([], {}))
    model = {"dtype": "float16"} | read.shape | given
    missing = [name for name in CONFIG if name not in model]
    if missing:
        options = ", ".join(f"--{name.replace('_', '-')}" for name in missing)
        raise ValueError(f"the model's shape is missing: give {options}, or --config with its config.json")
    model["kv_dtype"] = kv_dtype
    if "num_layers" in given and any(isinstance(model[name], list) for name in CONFIG):
        raise ValueError("--num-layers must be left out, since the layers of --config have several shapes")
    _bytes(1, **model, block_size=block_size)
    layers: dict[str, Any] = {}
    if "num_layers" not in given and (any(read.layers.windows) or read.layers.same_as):
        layers = read.layers.options
    shapes = shapes_of(*(model[name] for name in CONFIG))
    of_groups: dict[str, Any] = {"same_as": layers.get("same_as"), "group_size": group_size, "shapes": shapes}
    groups = LayerGroups.of(layers.get("windows"), model["num_layers"], block_size, **of_groups)
    kv_format = KvFormat.of(model["dtype"], kv_dtype)
    block_bytes = bytes_of_block(groups, shapes, kv_format, "NHD", block_size)
    head = {name: _in_words(model[name]) for name in CONFIG} | {"stored as": kv_format.name}
    token_bytes = _unpadded_bytes(1, model, groups)
    head |= {"bytes of a token": token_bytes, f"of a block of {block_size}": block_bytes}
    of_states = read.states.arrays(model["dtype"]).values()
    state_bytes = sum(math.prod(of_all) * float_dtype(dtype).itemsize for of_all, dtype in of_states)
    if state_bytes:
        head |= {"of a state": state_bytes, "a state in tokens": round(state_bytes / token_bytes)}
    of_weights = weight_bytes(config) if weights else 0
    in_words: dict[str, Any] = {"of the weights": of_weights, "GiB of the weights": of_weights / 2**30}
    head |= in_words if weights else {}
    room = None
    if memory is not None:
        room = bytes_of("memory", memory, Arrays("numpy", None)) - of_weights
        if weights and room < block_bytes:
            least = of_weights + block_bytes
            raise ValueError(f"--memory must be at least {least} bytes, the weights and one block, got {memory}")
        count_in("memory", room, block_bytes, "one block in all layers")  # at least one
        longest = groups.longest(max(0, room - state_bytes) // block_bytes)
        head["longest sequence"] = "any" if longest == MAX_INT64 else longest
    if layers or len(groups.groups) > 1:
        sizes = f"; {groups.group_size} layers each, {groups.num_padding} padding layers in all"
        head["groups of layers"] = f"{groups}{'' if groups.has_shapes else sizes}"
    rows = [head]
    for tokens in num_tokens:
        _bytes(tokens, **model, block_size=block_size)
        blocks = groups.held(tokens)
        num_bytes = blocks * block_bytes
        row: dict[str, Any] = {"tokens": tokens, "blocks": blocks, "bytes": num_bytes, "GiB": num_bytes / 2**30}
        if layers:
            needed = _unpadded_bytes(tokens, model, groups, block_size=block_size)
            without = _unpadded_bytes(tokens, model, groups, block_size=block_size, windows=None)
            row |= {"GiB needed": needed / 2**30, "GiB without windows": without / 2**30}
        if state_bytes:
            row["GiB with its state"] = (num_bytes + state_bytes) / 2**30
        if room is not None:
            taken = num_bytes + state_bytes
            row["sequences"] = room // taken if taken else "any"
        rows.append(row)
    return rows


def _in_words(sizes: int | list[int]) -> int | str:
    """A size of all layers, or those that some of them have."""
    return " and ".join(map(str, dict.fromkeys(sizes))) if isinstance(sizes, list) else sizes


def _unpadded_bytes(num_tokens: int, model: Mapping[str, Any], groups: LayerGroups, **options: Any) -> int:
    """What the layers of a sequence take if each of them has blocks of its own; `options` of `kv_bytes`."""
    counts = Counter[tuple[Any, Any]]()
    for window, layers, shape in groups.groups:
        counts[window, shape or (model["num_kv_heads"], model["head_dim"])] += len(layers)
    total = 0
    for (window, of_kind), num_layers in counts.items():
        sizes = dict(zip(CONFIG, (num_layers, *of_kind), strict=True))
        total += kv_bytes(num_tokens, **{**model, **sizes, "windows": window, "group_size": 1, **options})
    return total

"""``python -m pagedkv serve MODEL``: the options of the server."""

from __future__ import annotations

import contextlib
import json
import math
import os
import re
from argparse import ArgumentParser, ArgumentTypeError, Namespace
from collections.abc import Callable
from typing import Any

from ..extras import pip_install
from ..layouts import KV_DTYPES
from .serve import joined, serve

KV_EVENTS_KEYS = {  # of vLLM's KVEventsConfig, and the number of this server among replicas
    "buffer_steps",
    "data_parallel_rank",
    "enable_kv_cache_events",
    "endpoint",
    "hwm",
    "max_queue_size",
    "publisher",
    "replay_endpoint",
    "topic",
}


def add_options(parser: ArgumentParser) -> None:
    """Add the options of the command line."""
    parser.epilog = "Ranks share a model: torchrun --nproc-per-node 2 -m pagedkv serve MODEL."
    add = parser.add_argument
    add("model", metavar="MODEL", help="a model of transformers: a folder, or a name on huggingface.co")
    dtypes = ("auto", "float32", "bfloat16", "float16")
    add("--dtype", choices=dtypes, default="auto", help="of the weights (default: auto, as they are stored)")
    add_server_options(parser)
    add(
        "--rank-timeout",
        type=number(float, 1),
        default=600,
        metavar="S",
        help="seconds for which ranks wait for one (default: %(default)s)",
    )


def run(**options: Any) -> int:
    """Serve a model of transformers until Ctrl-C; the exit code."""
    args = Namespace(**options)
    with joined(args.rank_timeout) as rank:
        return serve(args, load, rank)


def load(args: Namespace, pool: dict[str, Any], steps: dict[str, Any]) -> tuple[Any, Any, str]:
    """Load the model that the command line names: its engine, and its conversion between text and tokens."""
    try:
        from .hugging_face import hugging_face  # imports torch
    except ImportError as error:
        raise SystemExit(f"models need torch and transformers: {pip_install('transformers')} ({error})") from None
    return hugging_face(args, pool, steps)


def add_server_options(parser: ArgumentParser) -> None:
    """Add the options of a server of any engine."""
    group = parser.add_argument_group("who may ask").add_argument
    group("--host", default="127.0.0.1", metavar="ADDRESS", help="where to listen (default: %(default)s)")
    group("--port", type=number(int, 0, 65535), default=8000, metavar="N", help="0: a free one (default: %(default)s)")
    group(
        "--api-key",
        type=key,
        default=os.environ.get("PAGEDKV_API_KEY") or None,
        metavar="KEY",
        help="what clients must send as `Authorization: Bearer KEY` (default: PAGEDKV_API_KEY of the environment, "
        "which other users of this machine cannot read; else no key)",
    )
    group("--insecure", action="store_true", help="listen on a public address without a key")
    group(
        "--allowed-host",
        action="append",
        default=[],
        metavar="NAME",
        help="without a key, one more name by which clients may ask; * for any (default: those of this machine)",
    )
    group("--served-model-name", metavar="NAME", help="what /v1/models says (default: MODEL)")
    of_memory = parser.add_argument_group("memory")
    group, size = of_memory.add_argument, of_memory.add_mutually_exclusive_group().add_argument
    group(
        *("--context", "--max-model-len"),
        type=number(int, 1),
        metavar="N",
        help="tokens of a prompt and its text (default: the model's)",
    )
    size(
        "--memory",
        type=memory,
        metavar="M",
        help="of the pool, states included: 2GiB, bytes, or a share of what is free once the weights are loaded, 0.8 "
        "say (default: 0.9 on a GPU, 0.5 on a CPU, but no more than --max-batch requests of the whole context fill)",
    )
    size("--num-blocks", type=number(int, 1, 2**31 - 1), metavar="N", help="blocks in the pool, in place of --memory")
    group("--block-size", type=number(int, 1), default=16, metavar="N", help="tokens in a block (default: %(default)s)")
    group(
        "--kv-dtype",
        choices=("auto", *KV_DTYPES),
        default="auto",
        help="of K and V in the pool (default: auto, that of the weights)",
    )
    group("--swap", type=memory, metavar="M", help="host memory for preempted requests (default: none)")
    group("--no-prefix-cache", action="store_true", help="compute what prompts begin with anew for each")
    group = parser.add_argument_group("limits").add_argument
    for name, low, default, text in (
        ("--max-batch", 1, 32, "requests that run at a time"),
        ("--max-tokens", 1, 512, "tokens of a step"),
        ("--max-waiting", 0, 128, "requests that wait besides"),
        ("--max-connections", 1, 512, "open connections"),
        ("--max-body", 1, 1_000_000, "bytes of a request"),
    ):
        group(name, type=number(int, low), default=default, metavar="N", help=f"{text} (default: %(default)s)")
    parser.add_argument(
        "--kv-events-config",
        type=kv_events_config,
        metavar="JSON",
        help="publish KV events, as vLLM does with it (default: none)",
    )


def key(text: str) -> str:
    """Check an API key, which goes through a header."""
    if not re.fullmatch(r"[!-~]+", text):
        raise ArgumentTypeError("must be of printable ASCII without spaces, as must PAGEDKV_API_KEY")
    return text


def number(kind: type, low: float, high: float = math.inf) -> Callable[[str], float]:
    """Make a converter for argparse whose error names the allowed range."""

    def convert(text: str) -> float:
        try:
            value = kind(text)
        except ValueError:
            value = math.nan
        if not low <= value <= high:
            limit = f"{low} to {high}" if math.isfinite(high) else f"{low} or more"
            raise ArgumentTypeError(f"{text!r} is not a {'whole ' if kind is int else ''}number, {limit}")
        return value

    return convert


def memory(text: str) -> str | int | float:
    """Convert an argument to what PagedKVCache takes as `memory`."""
    for kind in (int, float):
        with contextlib.suppress(ValueError):
            return kind(text)
    return text


def kv_events_config(text: str) -> dict[str, Any] | None:
    """Convert vLLM's KVEventsConfig to arguments of KVEventPublisher; None if it publishes nothing."""
    config = None
    with contextlib.suppress(ValueError):
        config = json.loads(text)
    if not isinstance(config, dict):
        raise ArgumentTypeError(f"must be a JSON object, got {text}")
    if unknown := ", ".join(sorted({*config} - KV_EVENTS_KEYS)):
        known = ", ".join(sorted(KV_EVENTS_KEYS))
        raise ArgumentTypeError(f"must have no other keys than {known}, got {unknown}")
    enabled = config.pop("enable_kv_cache_events", False)
    publisher = config.pop("publisher", None)
    if publisher not in (None, "zmq", "null"):
        raise ArgumentTypeError(f'publisher must be "zmq" or "null", got {publisher}')
    return config if enabled and publisher != "null" else None

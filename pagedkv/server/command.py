"""``python -m pagedkv serve MODEL``: the options of the server."""

from __future__ import annotations

import contextlib
import json
import math
from argparse import ArgumentParser, ArgumentTypeError, Namespace
from collections.abc import Callable
from typing import Any

from ..extras import pip_install
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
    add_server_options(parser)
    add("--rank-timeout", type=number(float, 1), default=600, metavar="S", help="seconds for which ranks wait for one")


def run(**options: Any) -> int:
    """Serve a model of transformers until Ctrl-C; the exit code."""
    args = Namespace(**options)
    with joined(args.rank_timeout) as rank:
        return serve(args, load, rank)


def load(args: Namespace, pool: dict[str, Any], steps: dict[str, Any]) -> tuple[Any, Any]:
    """Load the model that the command line names: its engine, and its conversion between text and tokens."""
    try:
        from .hugging_face import hugging_face  # imports torch
    except ImportError as error:
        raise SystemExit(f"models need torch and transformers: {pip_install('transformers')} ({error})") from None
    return hugging_face(args, pool, steps)


def add_server_options(parser: ArgumentParser) -> None:
    """Add the options of a server of any engine."""
    add = parser.add_argument
    add("--port", type=number(int, 0, 65535), default=8000, metavar="N", help="0 for one that is free")
    add("--host", default="127.0.0.1", metavar="ADDRESS", help="where to listen (default: 127.0.0.1)")
    add(
        "--allowed-host",
        action="append",
        default=[],
        metavar="NAME",
        help="one more by which clients may ask; * for any",
    )
    add("--context", type=number(int, 1), metavar="N", help="tokens of a prompt and its text (default: the model's)")
    size = parser.add_mutually_exclusive_group().add_argument
    size("--num-blocks", type=number(int, 1, 2**31 - 1), default=1024, metavar="N", help="blocks in the pool")
    size("--memory", type=memory, metavar="M", help="2GiB, bytes, or a share of what is free, 0.8 say, in their place")
    add("--block-size", type=number(int, 1), default=16, metavar="N", help="tokens in a block")
    add("--max-batch", type=number(int, 1), default=32, metavar="N", help="requests that run at a time")
    add("--max-tokens", type=number(int, 1), default=512, metavar="N", help="tokens of a step")
    add("--max-waiting", type=number(int, 0), default=128, metavar="N", help="requests that wait besides")
    add("--max-connections", type=number(int, 1), default=512, metavar="N")
    add("--max-body", type=number(int, 1), default=1_000_000, metavar="N", help="bytes of a request")
    add("--swap", type=memory, metavar="M", help="host memory, 4GiB say, for requests that give their blocks back")
    add("--no-prefix-cache", action="store_true", help="compute what prompts begin with anew for each")
    add("--kv-events-config", type=kv_events_config, metavar="JSON", help="publish KV events, as vLLM does with it")


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

"""Builds a server of an engine, and runs it until Ctrl-C."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import socket
import sys
from argparse import Namespace
from collections.abc import Callable
from importlib.util import find_spec
from ipaddress import ip_address
from typing import Any

import uvicorn

from ..cache import PagedKVCache
from ..cpu.threads import get_num_threads
from ..errors import BackendUnavailableError
from ..extras import pip_install
from ..memory.groups import windows_in_words
from .admission import Admission
from .app import Server, Text
from .connections import at_most, room_for_connections
from .worker import Engine, Worker

LOOPBACK = ("127.0.0.1", "localhost", "::1")
BACKLOG = 2048
Load = Callable[[Namespace, dict[str, Any], dict[str, Any]], tuple[Engine, Text, str]]
ACCEPTED = 8  # connections that asyncio accepts at a time, before the limit applies to them


def publisher(args: Namespace) -> contextlib.AbstractContextManager[Any]:
    """Make what publishes KV events; with nothing to publish the context gives None."""
    if args.kv_events_config is None:
        return contextlib.nullcontext()
    if args.no_prefix_cache:
        raise SystemExit("--kv-events-config: only a prefix cache has events: leave --no-prefix-cache out")
    try:
        from ..integrations.kv_events import KVEventPublisher  # imported here because it imports pyzmq

        events = KVEventPublisher(**args.kv_events_config)
    except (ImportError, OSError, TypeError, ValueError) as error:
        raise SystemExit(f"--kv-events-config: {error}") from None
    print(f"KV events, with the tokens of all prompts, for whoever reads {events.endpoint}", file=sys.stderr)
    return events


def build(args: Namespace, load: Load, events: Any = None) -> Server:
    """Make the server that the command line describes; `events` is the listener of its cache."""
    steps = {"max_num_batched_tokens": max(args.max_tokens, args.max_batch), "swap": args.swap}
    pool = {"num_blocks": args.num_blocks if args.memory is None else None, "memory": args.memory}
    pool |= {"block_size": args.block_size, "prefix_cache": not args.no_prefix_cache, "events": events}
    pool["kv_dtype"] = None if args.kv_dtype == "auto" else args.kv_dtype
    pool["max_seqs"] = args.max_batch  # fewer run where there are fewer states
    if args.context is not None and args.context < args.block_size:
        raise SystemExit(f"--context must be at least the {args.block_size} tokens of a block, got {args.context}")
    try:
        get_num_threads()  # raises for a wrong PAGEDKV_NUM_THREADS
        engine, text, what = load(args, pool, steps)
    except (BackendUnavailableError, ImportError, OSError, ValueError) as error:
        raise SystemExit(str(error)) from None
    except MemoryError as error:
        raise SystemExit(f"{error}: change --num-blocks, --memory, --block-size or --context") from None
    cache, context = engine.cache, engine.scheduler.max_request_len
    print(f"{what}; context of {context:,} tokens; {pool_in_words(cache)}", file=sys.stderr)
    if cache.max_seqs < args.max_batch:
        print(
            f"{cache.max_seqs} requests run at a time, for which there are states: give more --memory", file=sys.stderr
        )
    if context < cache.max_seq_len:
        print(
            f"a prompt and its text may have {context} tokens, since the pool has no room for the {cache.max_seq_len} "
            "of the context: give more --num-blocks or --memory",
            file=sys.stderr,
        )
    return Server(
        Worker(engine),
        Admission(cache.max_seqs + args.max_waiting, cache.max_seqs),
        text,
        args.served_model_name or args.model,
        context=context,
        max_body=args.max_body,
        # A page of another site does not know the key, whatever name it gives this machine.
        names=["*"] if args.api_key else [*LOOPBACK, args.host, *args.allowed_host],
        key=args.api_key,
    )


def pool_in_words(cache: PagedKVCache) -> str:
    """Say how large a pool is, and which layers have windows or states."""
    stats, num_groups = cache.stats(), len(cache.groups)
    at_least = "at least " if any(group.window for group in cache.groups) else ""
    num_tokens = stats.num_blocks // num_groups * cache.block_size
    blocks = f"{stats.num_blocks:,} blocks, {stats.num_bytes / 2**20:,.1f} MiB"
    words = [f"pool of {at_least}{num_tokens:,} tokens in {blocks}"]
    if at_least:
        words.append(f"layers: {windows_in_words(group.window for group in cache.groups for _ in group.layers)}")
    if cache.states:
        words.append(f"{stats.num_states:,} states of other layers, {stats.state_bytes / 2**20:,.1f} MiB")
    return "; ".join(words)


class OverHttp(uvicorn.Server):
    """A uvicorn server that aborts running requests when it ends, instead of waiting for them."""

    def __init__(self, server: Server, max_connections: int) -> None:
        self._worker = server.worker
        self._worker.on_failure = self._fail
        self.has_failed = False
        http = at_most(max_connections, server.admission.retry_after)
        options = {"http": http, "backlog": ACCEPTED, "timeout_graceful_shutdown": 5, "log_level": "warning"}
        super().__init__(uvicorn.Config(server.app(), **options))

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        for listener in sockets or ():
            listener.listen(BACKLOG)  # asyncio has set the backlog to ACCEPTED

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        await self._worker.stop()
        connections: set[Any] = self.server_state.connections
        for connection in connections:
            if connection.cycle and connection.cycle.more_body:  # the rest of the body is not awaited
                connection.transport.close()
        await super().shutdown(sockets)

    def handle_exit(self, sig: int, frame: Any) -> None:
        super().handle_exit(sig, frame)
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # a second Ctrl-C ends the process at once

    def _fail(self) -> None:
        self.has_failed = self.should_exit = True


def require_key(args: Namespace) -> None:
    """Refuse a public address without a key."""
    if args.api_key or args.insecure:
        return
    for *_, address in _resolve(args.host, args.port):
        if not ip_address(address[0].partition("%")[0]).is_loopback:
            raise SystemExit(
                f"--host {args.host} is open to others: give clients a key by PAGEDKV_API_KEY or --api-key, or let "
                "anybody ask by --insecure"
            )


def listen(host: str, port: int) -> socket.socket:
    """Listen on an address."""
    [(family, *_), *_] = _resolve(host, port)
    try:
        return socket.create_server((host, port), family=family, backlog=BACKLOG)
    except OSError as error:
        raise SystemExit(f"port {port} of {host} cannot be had ({error.strerror}): try --port 0") from None


def _resolve(host: str, port: int) -> list[Any]:
    try:
        return socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except socket.gaierror as error:
        raise SystemExit(f"--host {host} is no address of this machine ({error.strerror}): try 127.0.0.1") from None


def serve(args: Namespace, load: Load, rank: int = 0) -> int:
    """Serve an engine of your own until Ctrl-C.

    Parameters
    ----------
    args : Namespace
        The options that `add_server_options` adds, and `model`, the name of the model.
    load : callable
        ``load(args, pool, steps) -> (engine, text, what)``, with options for a PagedKVCache and for a Scheduler. The
        engine is a `worker.Engine`, the text an `app.Text`, and `what` says in words what computes where.
    rank : int
        The number of this process among those that share a model: others than 0 follow.

    Returns
    -------
    int
        The exit code.

    Raises
    ------
    SystemExit
        An option cannot be; the message says why.
    """
    try:
        if rank > 0:
            return _follow(build(args, load).worker.engine)
        require_key(args)
        listener = listen(args.host, args.port)  # before a model is loaded
        logging.basicConfig(format="%(asctime)s %(message)s")
        logging.getLogger("pagedkv").setLevel(logging.INFO)
        with publisher(args) as events:
            return _run(args, listener, build(args, load, events))
    except KeyboardInterrupt:  # before there is anything to close
        return 130


def _run(args: Namespace, listener: socket.socket, server: Server) -> int:
    """Serve until Ctrl-C or a failure; the exit code."""
    room = room_for_connections(args.max_connections)
    if room < args.max_connections:
        print(f"at most {room} connections, for this process can have few files open: ulimit -n", file=sys.stderr)
    host, port = listener.getsockname()[:2]
    address = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
    pool = "clients with the key" if args.api_key else f"clients, {address} for the pool"
    print(f"{address}/v1 for {pool}; Ctrl-C ends it", flush=True)
    over_http = OverHttp(server, room)
    with contextlib.suppress(KeyboardInterrupt):  # uvicorn raises it again after closing everything
        over_http.run(sockets=[listener])
    return max(int(over_http.has_failed), _release(server.worker.engine))


def joined(timeout: float) -> contextlib.AbstractContextManager[int]:
    """A context that gives the number of this rank: 0 if torchrun has not started several."""
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        return contextlib.nullcontext(0)
    if missing := [name for name in ("torch", "transformers", "accelerate") if find_spec(name) is None]:
        raise SystemExit(f"ranks need {', '.join(missing)}: {pip_install('tensor-parallel')}")
    from ..integrations.transformers.ranks import join_ranks  # imported here because it imports torch

    # torchrun sends it when another rank has died: it has to end the block, and not the process.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    return join_ranks(timeout)


def _follow(engine: Any) -> int:
    """Compute what rank 0 computes, until it ends; the exit code."""
    for name in (signal.SIGINT, signal.SIGTERM):
        signal.signal(name, signal.SIG_IGN)  # rank 0 gets them as well, and says when it ends
    return _unless_lost(engine.follow)


def _release(engine: Any) -> int:
    """Let the other ranks end; the exit code."""
    return _unless_lost(getattr(engine, "close", lambda: None))


def _unless_lost(call: Any) -> int:
    try:
        call()
    except RuntimeError as error:
        print(f"rank {os.environ['RANK']} has lost another rank: {error}", file=sys.stderr)
        return 1
    return 0

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
from typing import Any

import uvicorn

from ..cpu.threads import get_num_threads
from ..extras import pip_install
from .admission import Admission
from .app import Server
from .connections import at_most, room_for_connections
from .worker import Engine, Worker

LOOPBACK = ("127.0.0.1", "localhost", "::1")
BACKLOG = 2048
Load = Callable[[Namespace, dict[str, Any], dict[str, Any]], tuple[Engine, Any]]
ACCEPTED = 8  # connections that asyncio accepts at a time, before the limit applies to them


def names(args: Namespace) -> list[str]:
    """The host names by which clients may reach the server."""
    return [*LOOPBACK, args.host, *args.allowed_host]


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
    pool["max_seqs"] = args.max_batch  # fewer run where there are fewer states
    if args.context is not None and args.context < args.block_size:
        raise SystemExit(f"--context must be at least the {args.block_size} tokens of a block, got {args.context}")
    try:
        get_num_threads()  # raises for a wrong PAGEDKV_NUM_THREADS
        engine, text = load(args, pool, steps)
    except (OSError, ValueError) as error:
        raise SystemExit(str(error)) from None
    except MemoryError as error:
        raise SystemExit(f"{error}: change --num-blocks, --memory, --block-size or --context") from None
    max_batch = engine.cache.max_seqs
    if max_batch < args.max_batch:
        print(f"{max_batch} requests run at a time, for which there are states: give more --memory", file=sys.stderr)
    admission = Admission(max_batch + args.max_waiting, max_batch)
    context, of_model = engine.scheduler.max_request_len, engine.cache.max_seq_len
    if context < of_model:
        print(
            f"a prompt and its text may have {context} tokens, since the pool has no room for the {of_model} of the "
            "context: give more --num-blocks or --memory",
            file=sys.stderr,
        )
    limits = {"context": context, "max_body": args.max_body, "names": names(args)}
    return Server(Worker(engine), admission, text, args.model, **limits)


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


def listen(host: str, port: int) -> socket.socket:
    try:
        [(family, *_), *_] = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        return socket.create_server((host, port), family=family, backlog=BACKLOG)
    except socket.gaierror as error:
        raise SystemExit(f"--host {host} is no address of this machine ({error.strerror}): try 127.0.0.1") from None
    except OSError as error:
        raise SystemExit(f"port {port} of {host} cannot be had ({error.strerror}): try --port 0") from None


def serve(args: Namespace, load: Load, rank: int = 0) -> int:
    """Serve an engine of your own until Ctrl-C.

    Parameters
    ----------
    args : Namespace
        The options that `add_server_options` adds, and `model`, the name of the model.
    load : callable
        ``load(args, pool, steps) -> (engine, text)``, with options for a PagedKVCache and for a Scheduler. The engine
        is a `worker.Engine`, the text an `app.Text`.
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
    if args.host not in LOOPBACK:
        print(f"whoever reaches {args.host} may use it: there is no authentication", file=sys.stderr)
    host, port = listener.getsockname()[:2]
    address = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
    print(f"{address}/v1 for clients, {address} for the pool; Ctrl-C ends it", flush=True)
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

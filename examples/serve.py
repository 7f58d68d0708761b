"""An OpenAI-style server over a paged KV cache, on 127.0.0.1 unless you say otherwise.

    pip install -e ".[serve]"      (starlette and uvicorn)
    python examples/serve.py
    curl -N http://127.0.0.1:8000/v1/completions -d '{"prompt": "def main(", "max_tokens": 60, "stream": true}'
    python examples/serve.py --model Qwen/Qwen3-0.6B      (needs the extra transformers, too)
    torchrun --nproc-per-node 2 examples/serve.py --model Qwen/Qwen3-0.6B      (on two ranks; the extra tensor-parallel)

It serves `/v1/completions` and `/v1/chat/completions`, streamed or whole; `/v1/models`; `/health`; `/metrics` for
Prometheus; and `/`, a live picture of the pool. Requests share common prefixes, run together, and are computed by one
thread (`server/worker.py`). A request that can never fit, or that asks for missing features, is refused with 400; too
many requests at a time with 503 and Retry-After. The request of a client that leaves is aborted.
"""

import argparse
import contextlib
import json
import logging
import signal
import socket
import sys
from pathlib import Path
from typing import Any

import pagedkv
from pagedkv.extras import pip_install

try:
    import uvicorn
except ModuleNotFoundError:
    raise SystemExit(f"the server needs starlette and uvicorn: {pip_install('serve')}") from None

from generate import number
from server.admission import Admission
from server.app import Server
from server.connections import at_most, room_for_connections
from server.ranks import follow, joined, release
from server.small import small
from server.worker import Worker
from transformer import WEIGHTS

LOOPBACK = ("127.0.0.1", "localhost", "::1")
BACKLOG = 2048
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
ACCEPTED = 8  # connections that asyncio accepts at a time, before the limit applies to them


def parse(words: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Serve completions over a paged KV cache.")
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
    add("--model", help="a model of transformers, by name or folder, in place of the small one")
    add("--weights", type=Path, default=WEIGHTS, help="of the small model: a file that train.py wrote")
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
    add("--rank-timeout", type=number(float, 1), default=600, metavar="S", help="seconds for which ranks wait for one")
    args = parser.parse_args(words)
    if args.context is not None and args.context < args.block_size:
        parser.error(
            f"argument --context: must be at least the {args.block_size} tokens of a block, got {args.context}"
        )
    return args


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
        raise argparse.ArgumentTypeError(f"must be a JSON object, got {text}")
    if unknown := ", ".join(sorted({*config} - KV_EVENTS_KEYS)):
        known = ", ".join(sorted(KV_EVENTS_KEYS))
        raise argparse.ArgumentTypeError(f"must have no other keys than {known}, got {unknown}")
    enabled = config.pop("enable_kv_cache_events", False)
    publisher = config.pop("publisher", None)
    if publisher not in (None, "zmq", "null"):
        raise argparse.ArgumentTypeError(f'publisher must be "zmq" or "null", got {publisher}')
    return config if enabled and publisher != "null" else None


def names(args: argparse.Namespace) -> list[str]:
    """The host names by which clients may reach the server."""
    return [*LOOPBACK, args.host, *args.allowed_host]


def publisher(args: argparse.Namespace) -> contextlib.AbstractContextManager[Any]:
    """Make what publishes KV events; with nothing to publish the context gives None."""
    if args.kv_events_config is None:
        return contextlib.nullcontext()
    if args.no_prefix_cache:
        raise SystemExit("--kv-events-config: only a prefix cache has events: leave --no-prefix-cache out")
    try:
        from pagedkv.integrations.kv_events import KVEventPublisher  # imported here because it imports pyzmq

        events = KVEventPublisher(**args.kv_events_config)
    except (ImportError, OSError, TypeError, ValueError) as error:
        raise SystemExit(f"--kv-events-config: {error}") from None
    print(f"KV events, with the tokens of all prompts, for whoever reads {events.endpoint}", file=sys.stderr)
    return events


def build(args: argparse.Namespace, events: Any = None) -> Server:
    """Make the server that the command line describes; `events` is the listener of its cache."""
    most = {"max_num_batched_tokens": max(args.max_tokens, args.max_batch), "swap": args.swap}
    pool = {"num_blocks": args.num_blocks if args.memory is None else None, "memory": args.memory}
    pool |= {"block_size": args.block_size, "prefix_cache": not args.no_prefix_cache, "events": events}
    pool["max_seqs"] = args.max_batch  # fewer run where there are fewer states
    if args.model:
        try:
            from server.hugging_face import hugging_face  # imported here because it imports torch
        except ImportError as error:
            raise SystemExit(f"--model needs torch and transformers: {pip_install('transformers')} ({error})") from None

        make, source = hugging_face, args.model
    else:
        make, source = small, args.weights
    try:
        pagedkv.get_num_threads()  # raises for a wrong PAGEDKV_NUM_THREADS
        engine, text = make(source, args.context, pool, **most)
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
    return Server(Worker(engine), admission, text, args.model or "small", **limits)


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
        for connection in self.server_state.connections:
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


def main() -> int:
    args = parse()
    with joined(args.model, args.rank_timeout) as rank:
        if rank > 0:
            return follow(build(args).worker.engine)
        listener = listen(args.host, args.port)  # before a model is loaded
        logging.basicConfig(format="%(asctime)s %(message)s")
        logging.getLogger("pagedkv").setLevel(logging.INFO)
        with publisher(args) as events:
            return run(args, listener, events)


def run(args: argparse.Namespace, listener: socket.socket, events: Any) -> int:
    """Serve until Ctrl-C or a failure; the exit code."""
    server = build(args, events)
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
    return max(int(over_http.has_failed), release(server.worker.engine))


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:  # before there is anything to close
        sys.exit(130)

"""Replicas of the server under Ray Serve, on a laptop or a cluster.

    pip install -e ".[replicas]"      (Ray Serve, with starlette and uvicorn)
    python examples/replicas.py --max-replicas 2
    curl -N http://127.0.0.1:8000/v1/completions -d '{"prompt": "def main(", "max_tokens": 60, "stream": true}'

Requests that begin alike go to the replica that has their beginning in its prefix cache, unless it is much busier than
another one. Ray starts replicas while requests queue up, and stops them when they are idle. The command starts Ray, and
ends it with Ctrl-C. Where Ray runs already (`ray start --head`, or a cluster), it starts the replicas there and
returns. Given again, it replaces them one by one, and each finishes its requests first. A MODEL for
`pagedkv serve` may come first, in place of the small model, and all its options work.
"""

import argparse
import contextlib
import os
import signal
import sys
import threading
from pathlib import Path
from typing import Any

from pagedkv.extras import pip_install
from pagedkv.server.command import number
from pagedkv.server.serve import listen, require_key
from replica import Replica, parse_server

NAME = "pagedkv"
LONGEST = 600  # seconds that a replica may take to finish its requests before it ends


def parse(words: list[str] | None = None) -> tuple[argparse.Namespace, list[str]]:
    """Return the options of this command, and the words for each server."""
    parser = argparse.ArgumentParser(
        description="Serve completions from replicas under Ray Serve.",
        epilog="A MODEL may come first. All other options are those of pagedkv serve, for each replica.",
    )
    add = parser.add_argument
    add("--min-replicas", type=number(int, 1), default=1, metavar="N", help="replicas to keep when all is quiet")
    add("--max-replicas", type=number(int, 1), default=2, metavar="N", help="replicas to have at most")
    add("--target", type=number(int, 1), default=16, metavar="N", help="requests of a replica that call for another")
    add("--cpus", type=number(float, 0), default=1, metavar="N", help="cores of a replica")
    add("--gpus", type=number(float, 0), default=0, metavar="N", help="GPUs of a replica, or a share of one")
    add("--router", choices=("prefix", "default"), default="prefix", help="default: Ray's, which reads no text")
    args, words = parser.parse_known_args(words)
    if args.max_replicas < args.min_replicas:
        parser.error(
            f"argument --max-replicas: must be at least --min-replicas {args.min_replicas}, got {args.max_replicas}"
        )
    options = parse_server(words)[0]
    if options.kv_events_config is not None:
        parser.error("argument --kv-events-config: Ray's router reads texts, not events; leave it out")
    require_key(options)
    # Other machines do not see the environment of this one.
    return args, [*words, *(["--api-key", options.api_key] if options.api_key else [])]


def application(args: argparse.Namespace, words: list[str]) -> Any:
    """Make the application for Ray Serve: an ingress in front of replicas."""
    from ray.serve import deployment
    from ray.serve.config import RequestRouterConfig

    from ingress import Ingress, PrefixRouter

    options = parse_server(words)[0]
    most = options.max_batch + options.max_waiting
    router = {}
    if args.router == "prefix":
        spill = {"imbalanced_threshold": args.target, "do_eviction": True}
        config = RequestRouterConfig(request_router_class=PrefixRouter, request_router_kwargs=spill)
        router = {"request_router_config": config}
    replica = deployment(
        name="Replica",
        autoscaling_config={
            "min_replicas": args.min_replicas,
            "max_replicas": args.max_replicas,
            "target_ongoing_requests": args.target,
        },
        max_ongoing_requests=most,
        max_queued_requests=most,
        ray_actor_options={"num_cpus": args.cpus, "num_gpus": args.gpus},
        graceful_shutdown_timeout_s=LONGEST,
        **router,
    )(Replica)
    ingress = deployment(
        name="Ingress",
        max_ongoing_requests=options.max_connections,
        ray_actor_options={"num_cpus": 0},
        graceful_shutdown_timeout_s=LONGEST,
        max_surge_percent=100,  # a new one is there before the old one goes
    )(Ingress)
    return ingress.bind(replica.bind(words, max(1, int(args.cpus))), options.max_body)


def main() -> int:
    args, words = parse()
    options = parse_server(words)[0]
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # Ray would send statistics home
    try:
        import ray
        from ray import serve
    except ModuleNotFoundError:
        raise SystemExit(f"replicas need Ray Serve: {pip_install('replicas')}") from None

    # Other machines of a cluster get these files; pagedkv itself is installed there.
    files = {"working_dir": str(Path(__file__).parent)}
    try:
        ray.init("auto", runtime_env=files)
        is_ours = False
    except ConnectionError as error:
        if "RAY_ADDRESS" in os.environ:
            raise SystemExit(str(error)) from None
        with listen(options.host, options.port) as listener:  # for a port that is free
            options.port = listener.getsockname()[1]
        context = ray.init("local", runtime_env=files, include_dashboard=False)
        is_ours = True
    if options.port == 0:
        raise SystemExit("--port must be from 1 where Ray runs already: each of its machines listens on it")
    serve.start(http_options={"host": options.host, "port": options.port})
    try:
        serve.run(application(args, words), name=NAME)
    except RuntimeError as error:
        raise SystemExit(f"{error} What replicas printed above says why.") from None
    print(f"http://{options.host}:{options.port}/v1 for clients", flush=True)
    if is_ours:
        address = context.address_info["gcs_address"]
        print(f"RAY_ADDRESS={address} before this command replaces the replicas one by one", flush=True)
        print("Ctrl-C ends them all", flush=True)
        with contextlib.suppress(KeyboardInterrupt):
            for ending in (signal.SIGINT, signal.SIGTERM):
                signal.signal(ending, signal.default_int_handler)
            threading.Event().wait()
        ray.shutdown()
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:  # before all replicas run
        sys.exit(130)

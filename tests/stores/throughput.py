"""How fast stores put and get 1 GiB, beside what else moves as many bytes, in the same run.

    python -m tests.stores.throughput                 (Redis and NIXL where they are installed)
    python -m tests.stores.throughput host file       (these alone)

Each figure is the median of some turns, in which the store and its peer take turns.
"""

import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from importlib.util import find_spec
from pathlib import Path

import numpy as np

from pagedkv.stores import FileStore, HostStore

from .redis_server import program, redis_server

BLOCK_BYTES, NUM_BLOCKS, TURNS = 2**20, 2**10, 3
AT_ONCE = 16  # blocks of one get, as StoredPrefixes asks for them
CAPACITY = BLOCK_BYTES * NUM_BLOCKS

HOST = f"""
import sys
from pagedkv.stores.nixl import NixlHost
with NixlHost({CAPACITY}, {BLOCK_BYTES}) as host:
    print("port", host.address[1], flush=True)
    sys.stdin.read()
"""


def gigabytes_per_second(*calls):
    """The median speed of each call, which take turns; the first turn of all does not count."""
    seconds = [[] for _ in calls]
    for _ in range(TURNS + 1):
        for call, times in zip(calls, seconds, strict=True):
            before, run = call if isinstance(call, tuple) else (None, call)
            if before is not None:
                before()
            begin = time.perf_counter()
            kept = run()
            times.append(time.perf_counter() - begin)
            del kept
    return [CAPACITY / 1e9 / statistics.median(times[1:]) for times in seconds]


def report(name, put, peer_put, get, peer_get):
    print(f"| {name} | put | {put:.2f} | {peer_put:.2f} | {put / peer_put:.2f} |")
    print(f"| | get | {get:.2f} | {peer_get:.2f} | {get / peer_get:.2f} |", flush=True)


def get_all(store, keys):
    for i in range(0, len(keys), AT_ONCE):
        store.get(keys[i : i + AT_ONCE])


def measure(name, store, data, peer_put, peer_get):
    keys, blocks = [i.to_bytes(16, "little") for i in range(NUM_BLOCKS)], [block.data for block in data]
    puts = gigabytes_per_second((lambda: store.remove(keys), lambda: store.put(keys, blocks)), peer_put)
    store.put(keys, blocks)
    assert all(x == y for x, y in zip(store.get(keys), blocks, strict=True))
    gets = gigabytes_per_second(lambda: get_all(store, keys), peer_get)
    report(name, *puts, *gets)


def measure_redis(data, folder):
    from pagedkv.stores.redis import RedisStore

    with redis_server("redis", folder) as server:
        socket = server.url.removeprefix("unix://")

        def benchmark(what):
            command = ["redis-benchmark", "-s", socket, "-t", what, "-d", str(BLOCK_BYTES), "-n", str(NUM_BLOCKS)]
            done = subprocess.run([*command, "-P", "16", "-c", "1", "-q"], capture_output=True, text=True, check=True)
            return float(re.findall(r"([\d.]+) requests per second", done.stdout)[-1]) * BLOCK_BYTES / 1e9

        store = RedisStore(server.url, CAPACITY, timeout=60)
        keys, blocks = [i.to_bytes(16, "little") for i in range(NUM_BLOCKS)], [block.data for block in data]
        speeds = [[], [], [], []]
        for _ in range(TURNS):
            store.remove(keys)
            calls = (lambda: store.put(keys, blocks), "set", lambda: get_all(store, keys), "get")
            for call, times in zip(calls, speeds, strict=True):
                begin = time.perf_counter()
                times.append(benchmark(call) if isinstance(call, str) else call() or 0)
                if not isinstance(call, str):
                    times[-1] = CAPACITY / 1e9 / (time.perf_counter() - begin)
        report("Redis, by redis-benchmark -P 16", *map(statistics.median, speeds))


def main():
    data, there = np.ones((2, NUM_BLOCKS, BLOCK_BYTES), np.uint8)
    data[...] = np.random.default_rng(0).integers(0, 255, (NUM_BLOCKS, 1), np.uint8)
    memcpy = lambda: np.copyto(there, data), lambda: np.copyto(there, data)
    print("GB/s of 1 GiB in blocks of 1 MiB, which are put in one call and got in calls of 16\n")
    print("| store, and its peer | | store | peer | ratio |\n|---|---|---|---|---|")
    wanted = sys.argv[1:] or ["host", "file", "redis", "nixl"]
    if "host" in wanted:
        measure("host, by memcpy", HostStore(CAPACITY, BLOCK_BYTES), data, *memcpy)
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        plain = folder / "plain"

        def write():
            with plain.open("r+b" if plain.exists() else "wb", buffering=0) as file:
                for block in data:
                    file.write(block.data)

        if "file" in wanted:
            with FileStore(folder / "blocks", CAPACITY, BLOCK_BYTES) as store:
                measure("file, by a plain write, and read", store, data, write, lambda: np.fromfile(plain, np.uint8))
        if "redis" in wanted and find_spec("redis") and program("redis") and shutil.which("redis-benchmark"):
            measure_redis(data, folder)
        if "nixl" in wanted and find_spec("nixl_cu12"):
            from pagedkv.stores.nixl import NixlStore

            pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
            process = stack.enter_context(subprocess.Popen([sys.executable, "-c", HOST], **pipes))
            port = next(int(line.split()[1]) for line in process.stdout if line.startswith("port"))
            store = stack.enter_context(NixlStore(("127.0.0.1", port), timeout=60))
            measure("NIXL, by memcpy", store, data, *memcpy)


if __name__ == "__main__":
    main()

"""A Redis server: Debian's where it is installed, else a stand-in that knows the commands of RedisStore.

The stand-in does what the store's script says, in Python: the script itself runs only on a real server.
"""

import contextlib
import shutil
import socket
import socketserver
import subprocess
import threading
import time


@contextlib.contextmanager
def redis_server(folder):
    """Start a server; yields its URL."""
    if shutil.which("redis-server") is None:
        with StandIn(("127.0.0.1", 0), Connection) as server:
            threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
            yield f"redis://127.0.0.1:{server.server_address[1]}"
            server.shutdown()
        return
    path = folder / "socket"
    command = ["redis-server", "--port", "0", "--unixsocket", str(path), "--save", "", "--appendonly", "no"]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL) as server:
        try:
            while not accepts(path):
                time.sleep(0.001)
            yield f"unix://{path}"
        finally:
            server.terminate()


def accepts(path):
    with socket.socket(socket.AF_UNIX) as client:
        return client.connect_ex(str(path)) == 0


class StandIn(socketserver.ThreadingTCPServer):
    daemon_threads, block_on_close = True, False

    def __init__(self, *args):
        super().__init__(*args)
        self.values, self.order = {}, {}

    def use(self, prefix, capacity, *keys):
        for key in reversed(keys):
            self.order.pop(key, None)
            if prefix + key in self.values:
                self.order[key] = None
        while sum(len(self.values[prefix + key]) for key in self.order) > int(capacity):
            key = next(iter(self.order))
            del self.order[key], self.values[prefix + key]

    def answer(self, command, *args):
        match command.upper():
            case b"EXISTS":
                return int(args[0] in self.values)
            case b"SET":
                self.values.setdefault(args[0], args[1])
            case b"MGET":
                return [self.values.get(key) for key in args]
            case b"UNLINK":
                return sum(self.values.pop(key, None) is not None for key in args)
            case b"EVALSHA":
                self.use(*args[2 + int(args[1]) :])
        return "OK"


class Connection(socketserver.StreamRequestHandler):
    def handle(self):
        while line := self.rfile.readline():
            args = []
            for _ in range(int(line[1:])):
                size = int(self.rfile.readline()[1:])
                args.append(self.rfile.read(size + 2)[:-2])
            self.wfile.write(encoded(self.server.answer(*args)))


def encoded(value):
    match value:
        case None:
            return b"$-1\r\n"
        case int():
            return b":%d\r\n" % value
        case str():
            return b"+%s\r\n" % value.encode()
        case bytes():
            return b"$%d\r\n%s\r\n" % (len(value), value)
    return b"*%d\r\n" % len(value) + b"".join(map(encoded, value))

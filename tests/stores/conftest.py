"""Servers that the tests of a module share."""

import functools
from contextlib import ExitStack

import pytest

from .redis_server import redis_server, require_server


@pytest.fixture(scope="module")
def server_of(tmp_path_factory):
    """Starts a Redis server of a name once, or skips the test where it is not installed."""
    with ExitStack() as stack:

        @functools.cache
        def start(name):
            return stack.enter_context(redis_server(name, tmp_path_factory.mktemp(name)))

        def require_and_start(name):
            require_server(name)
            return start(name)

        yield require_and_start

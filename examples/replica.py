"""A replica of the server for examples/replicas.py, and the text by which Ray's router finds it; needs no Ray."""

import argparse
import asyncio
import json
import logging
from collections.abc import AsyncGenerator
from typing import Any, NamedTuple

import pagedkv
import serve
from pagedkv.server import command
from pagedkv.server.serve import build


class Beginning(NamedTuple):
    """What the router goes by: Ray's PrefixCacheAffinityRouter reads `prompt` of the positional arguments of a call."""

    prompt: str


def beginning(body: bytes) -> Beginning | None:
    """Return the text of a request: equal beginnings of texts are equal beginnings of prompts.

    None where there is no text; any replica can refuse such a request.
    """
    try:
        fields = json.loads(body)
        said = fields["messages"] if "messages" in fields else fields["prompt"]
        if isinstance(said, list) and isinstance(said[0], str | list):
            said = said[0]  # of several prompts
        if isinstance(said, str):
            text = said
        elif isinstance(said[0], int):
            text = "".join(map(chr, said))  # a character for each token
        else:
            text = "".join(f"{message['role']}\n{message['content']}\n" for message in said)
        salt = fields.get("cache_salt")  # requests of different salts share nothing
    except (ValueError, TypeError, LookupError, AttributeError, OverflowError, RecursionError):
        return None
    return Beginning(f"{salt}\n{text}" if salt else text) if text else None


def parse_server(words: list[str]) -> tuple[argparse.Namespace, Any]:
    """Read the words for each server: those of `pagedkv serve`, or of examples/serve.py if they begin with no MODEL."""
    if not words or words[0].startswith("-"):
        return serve.parse(words), serve.small
    parser = argparse.ArgumentParser()
    command.add_options(parser)
    return parser.parse_args(words), command.load


class Replica:
    """A server in a process of its own.

    Parameters
    ----------
    words : list of str
        The options of the server.
    num_threads : int
        Threads of the CPU backend.
    """

    async def __init__(self, words: list[str], num_threads: int) -> None:
        logging.basicConfig(format="%(asctime)s %(message)s")
        logging.getLogger("pagedkv").setLevel(logging.INFO)
        pagedkv.set_num_threads(num_threads)
        try:
            server = await asyncio.to_thread(build, *parse_server(words))
        except SystemExit as error:  # would end the process, without a word of the reason
            raise RuntimeError(str(error)) from None
        await asyncio.to_thread(warm_up, server.worker.engine)
        self._worker, self._app = server.worker, server.app()
        self._worker.start()

    async def answer(
        self, beginning: Beginning | None = None, *, scope: dict[str, Any], body: bytes
    ) -> AsyncGenerator[dict[str, Any]]:
        """Yield the ASGI messages of the answer; closing the generator aborts the request."""
        received: asyncio.Queue[Any] = asyncio.Queue()
        received.put_nowait({"type": "http.request", "body": body})
        sent: asyncio.Queue[Any] = asyncio.Queue()
        task = asyncio.ensure_future(self._app({**scope, "state": {}}, received.get, sent.put))
        task.add_done_callback(lambda _: sent.put_nowait(None))
        try:
            while (message := await sent.get()) is not None:
                yield message
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    async def check_health(self) -> None:
        """Raise if the engine's thread has died: Ray then replaces the replica."""
        if not self._worker.is_open:
            raise RuntimeError("the engine has died")


def warm_up(engine: Any) -> None:
    """Compile what a request needs, so that a new replica does not keep its first clients waiting."""
    engine.add([0, 0], 2, ignore_eos=True)
    while engine.scheduler.num_waiting + engine.scheduler.num_running:
        engine.step()

"""--kv-events-config of the server, which has the fields of vLLM's."""

import json
import sys
from inspect import signature

import pytest

from pagedkv.server.command import KV_EVENTS_KEYS
from pagedkv.server.serve import publisher

from .serving import complete, serving

from serve import parse  # isort: skip

zmq = pytest.importorskip("zmq")
msgspec = pytest.importorskip("msgspec")

from pagedkv.integrations.kv_events import KVEventPublisher  # noqa: E402

ON = {"enable_kv_cache_events": True, "publisher": "zmq", "endpoint": "tcp://127.0.0.1:*", "topic": "kv"}


def words(config):
    return ["--kv-events-config", json.dumps(config)]


def test_a_subscriber_hears_which_tokens_the_server_has_cached():
    with serving(*words(ON | {"replay_endpoint": "tcp://127.0.0.1:*"})) as server:
        prompt = "def main(" * 20
        complete(server.port, prompt, max_tokens=1, cache_salt="tenant")
        with zmq.Context() as context, context.socket(zmq.DEALER) as replays:
            replays.connect(server.events.replay_endpoint)
            replays.send_multipart([b"", bytes(8)])
            assert replays.poll(20_000)
            _, number, batch = replays.recv_multipart()
    _, [event, *_], rank = msgspec.msgpack.decode(batch)
    assert (number, rank, event["type"]) == (bytes(8), 0, "BlockStored")
    assert server.server.text.encode(prompt)[: len(event["token_ids"])] == event["token_ids"]
    assert event["extra_keys"][0] == ["tenant"]


@pytest.mark.parametrize("config", [{}, ON | {"enable_kv_cache_events": False}, ON | {"publisher": "null"}])
def test_nothing_is_published_unless_asked_for(config):
    with publisher(parse(words(config))) as events:
        assert events is None


def test_the_keys_are_those_of_the_publisher():
    assert KV_EVENTS_KEYS - {"enable_kv_cache_events", "publisher"} == {*signature(KVEventPublisher).parameters}


def test_a_configuration_that_cannot_be_is_reported(monkeypatch):
    for wrong, message in [
        ({"endpoint": "5557"}, "endpoint must begin with tcp:// or ipc://, got '5557'"),
        ({"hwm": 0}, "hwm must be at least 1, got 0"),
    ]:
        with pytest.raises(SystemExit, match=f"^--kv-events-config: {message}"):
            publisher(parse(words(ON | wrong)))
    with pytest.raises(SystemExit, match=r"^--kv-events-config: only a prefix cache has events: leave"):
        publisher(parse([*words(ON), "--no-prefix-cache"]))
    monkeypatch.delitem(sys.modules, "pagedkv.integrations.kv_events")
    monkeypatch.setitem(sys.modules, "zmq", None)
    with pytest.raises(SystemExit, match=r"^--kv-events-config: KV events need pyzmq and msgspec: pip .*\[kv-events\]"):
        publisher(parse(words(ON)))

"""KVEventPublisher against a subscriber that decodes with structs written from vLLM's documentation of its events."""

import os
import sys
from typing import Any

import numpy as np
import pytest

from pagedkv import PagedKVCache
from pagedkv.memory import AllBlocksCleared, BlockRemoved, BlockStored

zmq = pytest.importorskip("zmq")
msgspec = pytest.importorskip("msgspec")

from pagedkv.integrations import kv_events  # noqa: E402
from pagedkv.integrations.kv_events import KVEventPublisher  # noqa: E402

P = 4
END = 2**64 - 1  # -1, as subscribers read it
LOCAL = "tcp://127.0.0.1:*"


class Sent(msgspec.Struct, tag=True, omit_defaults=True):
    pass


class Stored(Sent, tag="BlockStored"):
    block_hashes: list[bytes | int]
    parent_block_hash: bytes | int | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None
    extra_keys: list[tuple[Any, ...] | None] | None = None
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None
    kv_cache_spec_sliding_window: int | None = None


class Removed(Sent, tag="BlockRemoved"):
    block_hashes: list[bytes | int]
    medium: str | None
    group_idx: int | None = None


class Cleared(Sent, tag="AllBlocksCleared"):
    pass


class Batch(msgspec.Struct, array_like=True, omit_defaults=True):
    ts: float
    events: list[Stored | Removed | Cleared]
    data_parallel_rank: int | None = None


DECODER = msgspec.msgpack.Decoder(Batch)


class Subscriber:
    """Receives what a publisher sends, from when it is made; `loses` says which messages it loses at first."""

    def __init__(self, publisher, topic="", loses=lambda number: False, receive_hwm=1000):
        self._publisher, self._loses = publisher, loses
        self._context = zmq.Context()
        self._live, self._replays = self._context.socket(zmq.SUB), self._context.socket(zmq.DEALER)
        self._live.set_hwm(receive_hwm)
        self._live.rcvbuf = 2**16  # or Linux holds up to tens of MB for a subscriber that does not read
        self._live.subscribe(topic)
        self._live.connect(publisher.endpoint)
        if publisher.replay_endpoint:
            self._replays.connect(publisher.replay_endpoint)
        while not self._live.poll(10):
            publisher(BlockRemoved([], "hello"))
        self.next = None  # the number of the message that comes next
        self.events()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self._context.destroy(linger=0)

    def receive(self):
        """The frames of the next message."""
        assert self._live.poll(20_000)
        return self._live.recv_multipart()

    def replay(self, start):
        """The number and batch of each message from a number on that is kept, and the end."""
        self._replays.send_multipart([b"", start.to_bytes(8, "big")])
        messages = []
        while not messages or messages[-1] != (END, b""):
            assert self._replays.poll(20_000)
            empty, number, batch = self._replays.recv_multipart()
            assert empty == b""
            messages.append((int.from_bytes(number, "big"), batch))
        return messages

    def events(self):
        """All events up to now, those of missed messages from a replay."""
        self._publisher(BlockRemoved([], "now"))
        events = []
        while not events or events[-1] != Removed([], "now"):
            _, number, batch = self.receive()
            number, batches = int.from_bytes(number, "big"), [batch]
            if self._loses(number) and DECODER.decode(batch).events[-1] != Removed([], "now"):
                continue
            if self.next is not None and number > self.next:
                missed = self.replay(self.next)[: number - self.next]
                assert [replayed for replayed, _ in missed] == [*range(self.next, number)], "the numbers have a gap"
                batches[:0] = [batch for _, batch in missed]
            self.next = number + 1
            events += [event for batch in batches for event in DECODER.decode(batch).events]
        return events[:-1]


class Index:
    """What a router knows of a cache: for the hash of each block its salt, and its tokens with all before them."""

    def __init__(self):
        self.blocks = {}

    def apply(self, event):
        if isinstance(event, Stored):
            salt, tokens = None, []
            if event.parent_block_hash is not None:
                salt, tokens = self.blocks[event.parent_block_hash]
            elif event.extra_keys:
                [[salt], *others] = event.extra_keys
                assert others == [None] * (len(event.block_hashes) - 1)
            for i, block_hash in enumerate(event.block_hashes):
                tokens = tokens + event.token_ids[i * event.block_size : (i + 1) * event.block_size]
                self.blocks[block_hash] = salt, tokens
        elif isinstance(event, Removed):
            for block_hash in event.block_hashes:
                del self.blocks[block_hash]
        else:
            self.blocks.clear()


def stored(number=0, **fields):
    """An event of one block."""
    return BlockStored([number.to_bytes(16, "big")], None, [number] * P, P, medium="CPU", **fields)


def make(events, num_blocks=16):
    return PagedKVCache(1, num_blocks, P, 1, 8, max_seqs=8, events=events)


def test_messages_are_those_of_vllm():
    received = []
    with KVEventPublisher(LOCAL, topic="kv@a@b") as publisher, Subscriber(publisher, "kv@") as subscriber:
        cache = make(lambda event: received.append(event) or publisher(event), num_blocks=2)
        seq = cache.add([1, 2, 3, 4, 5, 6, 7, 8], salt="tenant").seq
        cache.commit(seq)
        topic, number, payload = subscriber.receive()
        cache.free(seq)
        cache.add(P)
        removed = subscriber.receive()[2]
        cache.reset()
        cleared = subscriber.receive()[2]
    assert (topic, int.from_bytes(number, "big")) == (b"kv@a@b", subscriber.next)
    first, second = (int.from_bytes(digest[8:], "big") for digest in received[0].block_hashes)
    time, [event], rank = msgspec.msgpack.decode(payload)
    assert (type(time), rank) == (float, 0)
    assert list(event.items()) == [
        ("type", "BlockStored"),
        ("block_hashes", [first, second]),
        ("parent_block_hash", None),
        ("token_ids", [1, 2, 3, 4, 5, 6, 7, 8]),
        ("block_size", P),
        ("lora_id", None),
        ("medium", "CPU"),
        ("lora_name", None),
        ("extra_keys", [["tenant"], None]),
    ], "in vLLM's order, without what it omits"
    assert msgspec.msgpack.decode(removed)[1] == [{"type": "BlockRemoved", "block_hashes": [second], "medium": "CPU"}]
    assert msgspec.msgpack.decode(cleared)[1] == [{"type": "AllBlocksCleared"}]
    assert DECODER.decode(payload).events[0].extra_keys == [("tenant",), None]


def test_fields_of_groups_of_layers_are_sent():
    with KVEventPublisher(LOCAL) as publisher, Subscriber(publisher) as subscriber:
        publisher(stored(group_idx=1, kv_cache_spec_kind="sliding_window", kv_cache_spec_sliding_window=128))
        publisher(BlockRemoved([bytes(16)], "GPU", group_idx=1))
        block, removed = subscriber.events()
    assert (block.group_idx, block.kv_cache_spec_kind) == (1, "sliding_window")
    assert block.kv_cache_spec_sliding_window == 128
    assert removed == Removed([0], "GPU", 1)


def test_salts_are_sent_as_text():
    with KVEventPublisher(LOCAL) as publisher, Subscriber(publisher) as subscriber:
        for salt in ("ä", "ä".encode(), b"\xff", "\ud800", ""):
            publisher(stored(extra_keys=[(salt,)]))
        salts = [event.extra_keys for event in subscriber.events()]
    assert salts == [[("ä",)], [("ä",)], [("\\xff",)], [("\\xed\\xa0\\x80",)], [("",)]]


def test_a_subscriber_that_loses_messages_knows_what_can_be_found():
    """It drops seven of eight messages, and asks for what it missed; then its index is that of `find`."""
    rng = np.random.default_rng(0)
    index = Index()
    with (
        KVEventPublisher(LOCAL, replay_endpoint=LOCAL) as publisher,
        Subscriber(publisher, loses=lambda number: number % 8) as subscriber,
    ):
        cache, seqs, most = make(publisher), [], 0
        for step in range(300):
            tokens, salt = rng.integers(0, 2, rng.integers(1, 20)) // rng.integers(1, 3), [None, "a", "b"][step % 3]
            if cache.can_add(tokens, salt):
                seqs.append(cache.add(tokens, salt).seq)
                cache.commit(seqs)
            else:
                cache.free(seqs.pop(rng.integers(len(seqs))))
            if step == 150:
                cache.reset()
            if step % 20 == 19:
                for event in subscriber.events():
                    index.apply(event)
                most = max(most, len(index.blocks))
                assert len(index.blocks) == len(cache.pool._prefix_cache.findable())
                for salt, tokens in index.blocks.values():
                    assert cache.find([*tokens, 0], salt) >= len(tokens)
    assert most > 8


def test_a_replay_has_the_messages_that_are_kept(caplog):
    with KVEventPublisher(LOCAL, replay_endpoint=LOCAL, buffer_steps=3) as publisher:
        with Subscriber(publisher) as subscriber:
            for number in range(5):
                publisher(stored(number))
                subscriber.receive()
            first = subscriber.next
            for start, numbers in [(first + 3, [3, 4]), (0, [2, 3, 4]), (first + 9, []), (END, [])]:
                messages = subscriber.replay(start)
                assert [number - first for number, _ in messages[:-1]] == numbers
                assert [DECODER.decode(batch).events[0].block_hashes for _, batch in messages[:-1]] == [
                    [number] for number in numbers
                ]
        with zmq.Context() as context, context.socket(zmq.DEALER) as client:
            client.linger = 0
            client.connect(publisher.replay_endpoint)
            for wrong in ([b"x" * 4000], [b"", b"short"], [b"", bytes(8), b"more"], [b"x", bytes(8)]):
                client.send_multipart(wrong)
            client.send_multipart([b"", b"\xff" * 8])
            assert client.poll(20_000)
            assert client.recv_multipart() == [b"", b"\xff" * 8, b""], "only the last request has an answer"
    first, second, fourth = caplog.messages
    assert first.endswith("got 1 frames that begin with b'xxxxxxxxxxxxxxxx'; 1 such requests so far")
    assert second.endswith("got 2 frames that begin with b'short'; 2 such requests so far")
    assert fourth.endswith("4 such requests so far")


def test_all_requests_that_are_there_are_answered_before_it_waits_for_events(monkeypatch):
    num_waits, take = [0], kv_events._take

    def count(queue):
        num_waits[0] += 1
        return take(queue)

    monkeypatch.setattr(kv_events, "_take", count)
    with KVEventPublisher(LOCAL, replay_endpoint=LOCAL) as publisher, zmq.Context() as context:
        clients = [context.socket(zmq.DEALER) for _ in range(60)]
        for client in clients:
            client.connect(publisher.replay_endpoint)
            client.send_multipart([b"", b"\xff" * 8])
        for client in clients:
            assert client.poll(20_000)
            client.close(linger=0)
    assert num_waits[0] < 30


def test_a_frame_that_is_too_long_ends_its_connection():
    with KVEventPublisher(LOCAL, replay_endpoint=LOCAL) as publisher, zmq.Context() as context:
        for kind, endpoint in [(zmq.DEALER, publisher.replay_endpoint), (zmq.XSUB, publisher.endpoint)]:
            with context.socket(kind) as client, client.get_monitor_socket(zmq.EVENT_DISCONNECTED) as disconnected:
                client.linger = 0
                client.connect(endpoint)
                client.send(b"\1" + bytes(5000))  # as a subscription
                assert disconnected.poll(10_000)
                client.disable_monitor()


def test_a_subscriber_that_does_not_read_holds_nobody_up():
    with (
        KVEventPublisher(LOCAL, replay_endpoint=LOCAL, hwm=50) as publisher,
        Subscriber(publisher, receive_hwm=50) as stuck,
        Subscriber(publisher) as reader,
    ):
        start = reader.next
        for number in range(400):
            publisher(stored(number, extra_keys=[("x" * 100_000,)]))  # 40 MB, more than the system buffers
            assert [event.block_hashes[0] for event in reader.events()] == [number]
        numbers = [number for number, _ in reader.replay(start)[:-1]]
        assert numbers == [*range(start, start + len(numbers))]
        received = 0
        while stuck._live.poll(100):
            stuck.receive()
            received += 1
        assert received < 400, "it has lost messages"


def test_events_that_do_not_fit_are_replaced_by_one_that_clears_all(caplog):
    with KVEventPublisher(LOCAL, max_queue_size=10) as publisher, Subscriber(publisher) as subscriber:
        interval = sys.getswitchinterval()
        sys.setswitchinterval(60)  # the thread gets no turn
        try:
            for number in range(25):
                publisher(stored(number))
        finally:
            sys.setswitchinterval(interval)
        events = subscriber.events()
    cleared = max(i for i, event in enumerate(events) if isinstance(event, Cleared))
    hashes = [event.block_hashes for event in events[cleared + 1 :]]
    assert hashes == [[number] for number in range(25 - len(hashes), 25)], "none is missing behind it"
    assert 0 < len(hashes) < 10
    assert "subscribers start anew" in caplog.text


def test_an_event_that_an_interrupt_makes_come_twice_is_sent_once():
    event = stored(1)
    with KVEventPublisher(LOCAL) as publisher, Subscriber(publisher) as subscriber:
        for again in (event, event, stored(2)):
            publisher(again)
        assert [event.block_hashes for event in subscriber.events()] == [[1], [2]]


def test_close_sends_what_waits_and_ends_the_publisher():
    publisher = KVEventPublisher(LOCAL)
    endpoint = publisher.endpoint
    with Subscriber(publisher) as subscriber:
        cache = make(publisher)
        for number in range(5000):
            publisher(stored(number))
        publisher.close()
        publisher.close()
        hashes = []
        while len(hashes) < 5000:
            hashes += [event.block_hashes[0] for event in DECODER.decode(subscriber.receive()[2]).events]
        assert hashes == [*range(5000)]
        cache.commit(cache.add(P * [1]).seq)  # goes on without the publisher
    assert not publisher._thread.is_alive()
    KVEventPublisher(endpoint.replace("127.0.0.1", "*")).close()  # the port is free


def test_an_event_that_cannot_be_sent_ends_the_publisher_and_not_the_cache(caplog):
    with KVEventPublisher(LOCAL) as publisher:
        cache = make(publisher)
        publisher("no event")
        publisher._thread.join()
        cache.commit(cache.add(P * [1]).seq)
        assert cache.find([*P * [1], 0]) == P
    assert "KV events are no longer published" in caplog.text


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_forked_child_publishes_nothing():
    with KVEventPublisher(LOCAL) as publisher, Subscriber(publisher) as subscriber:
        if (child := os.fork()) == 0:
            publisher(stored(1))
            publisher.close()
            os._exit(0 if publisher._queue.empty() else 1)
        assert os.waitpid(child, 0)[1] == 0
        publisher(stored(2))
        assert [event.block_hashes for event in subscriber.events()] == [[2]]


def test_a_rank_has_ports_of_its_own():
    with KVEventPublisher(LOCAL, replay_endpoint=LOCAL) as free:
        pass
    port, replay_port = (int(x.rpartition(":")[2]) for x in (free.endpoint, free.replay_endpoint))
    ports = {"endpoint": f"tcp://*:{port - 2}", "replay_endpoint": f"tcp://127.0.0.1:{replay_port - 2}"}
    with KVEventPublisher(**ports, data_parallel_rank=2) as publisher, Subscriber(publisher) as subscriber:
        assert publisher.endpoint == f"tcp://0.0.0.0:{port}"
        assert publisher.replay_endpoint == free.replay_endpoint
        publisher(AllBlocksCleared())
        assert DECODER.decode(subscriber.receive()[2]).data_parallel_rank == 2


def test_a_publisher_connects_to_a_subscriber_that_has_an_address():
    with zmq.Context() as context, context.socket(zmq.SUB) as subscriber:
        subscriber.subscribe("")
        port = subscriber.bind_to_random_port("tcp://127.0.0.1")
        with KVEventPublisher(f"tcp://127.0.0.1:{port}") as publisher:
            while not subscriber.poll(10):
                publisher(AllBlocksCleared())
        assert DECODER.decode(subscriber.recv_multipart()[2]).events[0] == Cleared()


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"endpoint": "5557"}, ValueError, "endpoint must begin with tcp:// or ipc://, got '5557'"),
        ({"replay_endpoint": "inproc://x"}, ValueError, "replay_endpoint must begin with tcp:// or ipc://"),
        ({"endpoint": LOCAL, "data_parallel_rank": 1}, ValueError, "endpoint must end in a port, to which"),
        ({"endpoint": "tcp://*:-1"}, ValueError, r"endpoint must end in a port or \*, as .*, got 'tcp://\*:-1'"),
        ({"endpoint": "tcp://*:\u00b2"}, ValueError, r"endpoint must end in a port or \*"),
        ({"replay_endpoint": "tcp://127.0.0.1"}, ValueError, r"replay_endpoint must end in a port or \*"),
        ({"endpoint": "tcp://*:65536"}, ValueError, "endpoint must have a port of at most 65535"),
        ({"endpoint": "tcp://*:65535", "data_parallel_rank": 1}, ValueError, "with data_parallel_rank = 1, got"),
        ({"data_parallel_rank": -1}, ValueError, "data_parallel_rank must be at least 0"),
        ({"hwm": 0}, ValueError, "hwm must be at least 1"),
        ({"max_queue_size": 0}, ValueError, "max_queue_size must be at least 1"),
        ({"buffer_steps": -1}, ValueError, "buffer_steps must be at least 0"),
        ({"endpoint": "tcp://*no:1"}, OSError, r"endpoint tcp://\*no:1 cannot be had \(.*\): choose another"),
    ],
)
def test_wrong_arguments_are_refused(options, error, message):
    with pytest.raises(error, match=message):
        KVEventPublisher(**options)


def test_an_endpoint_that_is_taken_is_refused():
    with KVEventPublisher(LOCAL) as publisher:
        taken = publisher.endpoint.replace("127.0.0.1", "*")
        with pytest.raises(OSError, match=r"replay_endpoint .* cannot be had \(Address already in use"):
            KVEventPublisher(LOCAL, replay_endpoint=publisher.endpoint)
        with pytest.raises(OSError, match=r"^\[Errno \d+\] endpoint .* cannot be had .* a data_parallel_rank each"):
            KVEventPublisher(taken)

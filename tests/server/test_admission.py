"""The server: refused clients come back when there is room."""

import heapq
from contextlib import suppress

import pytest

from pagedkv.server.admission import LONGEST, Admission, Busy

from . import serving  # noqa: F401

MAX_BATCH, MAX_REQUESTS, RETRIES = 32, 160, 2  # the server's own, and those of OpenAI's clients


def lost(num_clients, seconds, num_tokens, max_tokens):
    """Clients that give up of those that come within a second, where a request runs for so long once it has begun."""
    now = 0.0
    admission = Admission(MAX_REQUESTS, MAX_BATCH, lambda: now)
    moments = [(i / num_clients, i, "come", 0) for i in range(num_clients)]
    places, waiting, told, num_running, num_lost = {}, [], [], 0, 0
    while moments:
        now, client, what, tries = heapq.heappop(moments)
        if what == "come":
            room = admission.places(1, max_tokens)
            try:
                places[client] = room, *room.__enter__()
                waiting.append(client)
            except Busy as busy:
                told.append(busy.retry_after)
                num_lost += tries == RETRIES
                if tries < RETRIES:
                    heapq.heappush(moments, (now + busy.retry_after, client, "come", tries + 1))
        elif what == "token":
            places[client][1].num_tokens += 1
        else:
            places.pop(client)[0].__exit__(None, None, None)
            num_running -= 1
        while num_running < MAX_BATCH and waiting:
            client, num_running = waiting.pop(0), num_running + 1
            took = seconds * (0.8 + 0.4 * (client * 7 % 10) / 10)
            for i in range(num_tokens):
                heapq.heappush(moments, (now + took * (i + 1) / (num_tokens + 1), client, "token", 0))
            heapq.heappush(moments, (now + took, client, "end", 0))
    assert not len(admission)
    assert all(1 <= seconds <= LONGEST for seconds in told)
    return num_lost


@pytest.mark.parametrize("seconds", [0.2, 1, 3, 8, 12])
@pytest.mark.parametrize("max_tokens", [16, 1000])
def test_nearly_all_clients_of_openai_get_an_answer(seconds, max_tokens):
    """Of 300 at a time, with the two retries that they have; all told to come again in a second, 140 would give up."""
    assert lost(300, seconds, 16, max_tokens) <= 3


def test_a_place_is_free_again_after_an_error():
    admission = Admission(1, 1)
    for _ in range(3):
        with suppress(KeyError), admission.places(1, 5):
            with pytest.raises(Busy, match="try again later"):
                admission.places(1, 5).__enter__()
            raise KeyError
    assert not len(admission)


def test_a_request_gets_all_its_places_or_none():
    admission = Admission(3, 1)
    with admission.places(2, 5) as places:
        assert (len(places), len(admission)) == (2, 2)
        with pytest.raises(Busy, match="try again later"):
            admission.places(2, 5).__enter__()
        assert len(admission) == 2
    with pytest.raises(ValueError, match="a request may ask for 3 texts on this server, got 4"):
        admission.places(4, 5).__enter__()
    assert not len(admission)

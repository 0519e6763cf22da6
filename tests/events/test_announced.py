"""What routers are announced, by a real server over real sockets."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from kvframework.api.keys import ChunkContent, Extra
from kvframework.errors import BadRange
from kvframework.status import places
from kvframework.wire import messages as m
from tests.events.node import BLOCK, CHUNK, OBJECT, Engine, beginnings, packed, prompt, router, settings
from tests.support.server_process import ServerProcess, fixture_of
from tests.support.waiting import wait_until
from tests.support.wire_client import key_for


class TellingServer(ServerProcess):
    def __init__(self, *more: str, objects: int = 64, **keys: object) -> None:
        super().__init__(*more, capacity=f"{OBJECT * objects}B")
        self.set(*settings(Path(self.endpoint.removeprefix("ipc://")).parent, **keys))


shared = fixture_of(TellingServer, scope="module")


@pytest.fixture
def server(shared: ServerProcess) -> ServerProcess:
    return shared.emptied()


def test_what_is_stored_is_told_and_what_is_cleared_is_removed(server: ServerProcess) -> None:
    with server.client() as client, router(server) as reader:
        engine = Engine(client)
        tokens = prompt(1, 4)
        engine.store(tokens)
        reader.until(beginnings(tokens))
        assert {topic.rpartition(b"@")[2] for topic in reader.topics} <= {b"tiny", b""}
        client.call("CLEAR", m.Clear())
        reader.until(set())
        status = client.status()["events"]
        assert status["blocks"] == {"CPU": 0, "STORAGE": 0}
        assert status["next_number"] == reader.next
        assert status["counters"]["dropped"] == status["counters"]["mismatched"] == 0


def test_a_key_with_token_ids_needs_no_content(server: ServerProcess) -> None:
    with server.client() as client, router(server) as reader:
        engine = Engine(client, tells=False)
        client.store(key_for(engine.registered, prompt(3, 2)), b"kv")
        reader.until(beginnings(prompt(3, 2)))


def test_an_object_of_no_known_content_is_told_once_a_load_names_it(server: ServerProcess) -> None:
    with server.client() as client, router(server) as reader:
        Engine(client, tells=False).store(prompt(5, 3))
        reader.until(set())
        assert Engine(client, 2).load(prompt(5, 3))
        reader.until(beginnings(prompt(5, 3)))


@pytest.mark.parametrize(
    "content",
    [
        ChunkContent(packed([1] * CHUNK)),
        ChunkContent(packed(prompt(15, 2)), block_size=BLOCK, hashes=b"x" * 8),
        ChunkContent(packed(prompt(15, 2)), extras=(Extra(2, b"x"),)),
    ],
)
def test_a_content_of_another_length_is_refused_and_the_lease_stays(
    server: ServerProcess, content: ChunkContent
) -> None:
    with server.client() as client:
        engine = Engine(client)
        plan = client.prepare_store(engine.key(prompt(15, 2)))
        with pytest.raises(BadRange):
            client.call("COMMIT_STORE", m.Commit(plan.lease, content))
        assert client.call("COMMIT_STORE", m.Commit(plan.lease)).outcome.stored == 2


@pytest.mark.parametrize("is_last", [False, True], ids=["another follows", "nothing else happens"])
def test_a_message_that_was_lost_is_healed(server: ServerProcess, is_last: bool) -> None:
    with server.client() as client, router(server) as reader:
        engine = Engine(client)
        engine.store(prompt(31, 2))
        reader.until(beginnings(prompt(31, 2)))
        reader.lost, before = {reader.next}, reader.replays
        engine.store(prompt(41, 2))
        if not is_last:
            with router(server) as late:
                late.until(beginnings(prompt(31, 2)) | beginnings(prompt(41, 2)))
        reader.until(beginnings(prompt(31, 2)) | beginnings(prompt(41, 2)))
        assert reader.replays == before + 1


def test_every_field_is_one_of_the_status_document(server: ServerProcess) -> None:
    found = set()
    for name, value in server.status()["events"].items():
        found |= {f"events.{name}.{each}" for each in value} if isinstance(value, dict) else {f"events.{name}"}
    typed = {place for place, _ in places() if place.startswith("events.")} - {"events.blocks.*"}
    assert found == typed | {"events.blocks.CPU", "events.blocks.STORAGE"}


def test_questions_of_any_form_stop_nothing(server: ServerProcess) -> None:
    dice = random.Random(5)
    with server.client() as client, router(server) as reader:
        Engine(client).store(prompt(1, 1))
        reader.until(beginnings(prompt(1, 1)))
        before = client.status()["events"]["counters"]["bad_requests"]
        for frames in ([b""], [b"x", bytes(8)], [b"", bytes(7)], [b"", bytes(9)], [b"", b"", bytes(8)], [b""] * 40):
            with reader.question() as socket:
                assert socket.poll(30_000)
                socket.send_multipart(frames)
                socket.send_multipart([dice.randbytes(dice.randint(0, 2000)) for _ in range(3)])  # some are too long
        wait_until(lambda: client.status()["events"]["counters"]["bad_requests"] > before, 30, "the refusals")
        with reader.question((1 << 64) - 2) as far:
            assert far.poll(30_000), "no message has that number, but the end comes"
            assert far.recv_multipart()[3] == b""
        Engine(client, 2).store(prompt(11, 1))
        reader.until(beginnings(prompt(1, 1)) | beginnings(prompt(11, 1)))
        assert client.status()["events"]["problem"] == ""

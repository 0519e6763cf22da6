"""One request id, several prompts, several engines: keys follow the content, pins follow the ticket."""

from __future__ import annotations

import signal
from collections.abc import Iterator

import pytest

from kvframework import errors
from kvframework.wire import messages as m
from tests.core.survival.actor import Actor
from tests.support.server_process import ServerProcess
from tests.support.waiting import wait_until
from tests.support.wire_client import WireClient

PATIENCE_S = 20.0


@pytest.fixture(scope="module")
def server() -> Iterator[ServerProcess]:
    with ServerProcess() as process:
        yield process


@pytest.fixture
def engines(server: ServerProcess) -> Iterator[tuple[Actor, Actor]]:
    with Actor(server.endpoint, 1) as one, Actor(server.endpoint, 2) as two:
        yield one, two


def store(engine: Actor, token: int, chunks: int, fill: str) -> None:
    assert engine.ask("prepare_store", token, chunks, "same") == [chunks, 0, 0, 0]
    engine.ask("write", fill)
    assert engine.ask("commit") == chunks


def pins(watcher: WireClient) -> int:
    return int(watcher.status()["l1"]["pins"])


def test_two_engines_with_one_request_id(watcher: WireClient, engines: tuple[Actor, Actor]) -> None:
    one, two = engines
    store(one, 1, 2, "ONE.")
    store(two, 2, 3, "TWO.")
    for engine in engines:
        assert engine.ask("retrieve", 1, 2, "same") == "ONE."
        assert engine.ask("retrieve", 2, 3, "same") == "TWO."
        assert engine.ask("retrieve", 3, 1, "same") is None

    hit, ticket = one.ask("lookup", 1, 2, "same")
    other_hit, other_ticket = two.ask("lookup", 2, 3, "same")
    assert (hit, other_hit) == (512, 768)
    assert pins(watcher) == 5
    with pytest.raises(errors.LeaseUnknown):
        two.ask("free", ticket)
    assert two.ask("end_session", "same") == [0, 1]
    assert pins(watcher) == 2, "only its own"
    with pytest.raises(errors.LeaseUnknown):
        two.ask("free", other_ticket)

    assert two.ask("lookup", 2, 3, "same")[0] == 768
    two.signal(signal.SIGKILL)
    wait_until(lambda: pins(watcher) == 2, PATIENCE_S, "the pins of the dead engine only")
    watcher.call("CLEAR", m.Clear())
    assert one.ask("retrieve", 1, 2, "same") == "ONE.", "what its ticket pins is there"
    assert one.ask("free", ticket) == 2
    assert pins(watcher) == 0


def test_stores_under_one_request_id_are_each_ones_own(watcher: WireClient, engines: tuple[Actor, Actor]) -> None:
    one, two = engines
    assert one.ask("prepare_store", 1, 2, "same") == [2, 0, 0, 0]
    assert two.ask("prepare_store", 1, 2, "same") == [0, 0, 2, 0], "the content is what is in flight"
    assert two.ask("prepare_store", 2, 2, "same") == [2, 0, 0, 0], "the request id is not"
    assert one.ask("end_session", "same") == [1, 0]
    two.ask("write", "TWO.")
    assert two.ask("commit") == 2
    one.ask("write", "ONE.")
    assert one.ask("commit") == 0, "ended by its own END_SESSION"
    assert two.ask("retrieve", 2, 2, "same") == "TWO."
    assert two.ask("retrieve", 1, 2, "same") is None
    assert watcher.status()["l1"]["quarantined_bytes"] == 0


def test_one_engine_with_one_request_id_and_other_tokens(watcher: WireClient, engines: tuple[Actor, Actor]) -> None:
    """An engine that uses an id again, or that asks for two prompts under it at once."""
    one, _ = engines
    store(one, 1, 1, "ONE.")
    store(one, 2, 2, "TWO.")
    (hit, ticket), (other_hit, other_ticket) = (one.ask("lookup", token, 2, "same") for token in (1, 2))
    assert (hit, other_hit) == (256, 512)
    assert ticket != other_ticket
    assert one.ask("free", ticket) == 1
    assert pins(watcher) == 2, "those of the other ticket"
    watcher.call("CLEAR", m.Clear())
    assert one.ask("retrieve", 1, 1, "same") is None
    assert one.ask("retrieve", 2, 2, "same") == "TWO."
    assert one.ask("free", other_ticket) == 2
    assert pins(watcher) == 0

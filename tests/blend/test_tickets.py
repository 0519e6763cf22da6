"""What blend's requests pin: under tickets that end as those of a LOOKUP do."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from kvf_blend import messages as b
from kvframework.api.keys import DIGEST_BYTES
from kvframework.errors import LeaseUnknown
from kvframework.server import Server
from kvframework.service.lifecycle import CacheService
from kvframework.wire import messages as m
from tests.blend.blend_client import BlendWire, packed
from tests.support.waiting import wait_until

SEPARATOR = [7, 7, 7]
DOCUMENTS = [[100 * number + at for at in range(20 + 10 * number)] for number in range(1, 5)]
TEXT = [token for each in DOCUMENTS for token in (*each, *SEPARATOR)]
PROMPT = [1, *TEXT, 2]


@pytest.fixture
def client(server: Server) -> Iterator[BlendWire]:
    """Of an engine that has stored the documents."""
    with BlendWire(server.endpoint) as connected:
        connected.begin()
        connected.pre_compute(TEXT, separator=packed(SEPARATOR))
        yield connected


def test_what_leaves_between_the_look_and_the_pin(client: BlendWire, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is looked for anew; if it leaves every time, nothing is promised."""
    original = CacheService.pin
    left = 2

    def pin(self: CacheService, *arguments: Any) -> str:
        nonlocal left
        left -= 1
        return original(self, *arguments) if left < 0 else ""

    monkeypatch.setattr(CacheService, "pin", pin)
    hits = client.look(PROMPT)
    assert len(hits.segments) == len(DOCUMENTS)
    assert hits.ticket
    left = 10
    assert client.look(PROMPT) == b.Hits()
    assert client.plan(hits) == b.LoadPlan()


def _free(client: BlendWire, hits: b.Hits) -> None:
    assert client.free(hits.ticket)


def _end_session(client: BlendWire, _hits: b.Hits) -> None:
    assert client.call("END_SESSION", m.EndSession("other")).tickets == 0
    assert client.call("END_SESSION", m.EndSession("mine")).tickets == 1


def _cancel(client: BlendWire, hits: b.Hits) -> None:
    assert client.call("CANCEL", m.Cancel(ticket=hits.ticket)).found


def _die(client: BlendWire, _hits: b.Hits) -> None:
    client.close()


@pytest.mark.parametrize("end", [_free, _end_session, _cancel, _die])
def test_a_ticket_ends_like_one_of_a_lookup(
    server: Server, client: BlendWire, end: Callable[[BlendWire, b.Hits], None]
) -> None:
    with BlendWire(server.endpoint) as other:
        hits = other.look(PROMPT, request_id="mine")
        assert client.pins() == len(b"".join(each.digests for each in hits.segments)) // DIGEST_BYTES
        with pytest.raises(LeaseUnknown):
            client.free(hits.ticket)
        assert client.call("CLEAR", m.Clear()).in_use == client.pins() > 0
        assert not other.call("QUERY_PREFETCH_STATUS", m.TicketRef(hits.ticket)).pending
        end(other, hits)
        wait_until(lambda: client.pins() == 0, what="the end of the pins")
        assert client.status()["tickets"] == 0


def test_a_retrieve_has_a_ticket_of_its_own(client: BlendWire) -> None:
    hits = client.look(PROMPT)
    plan = client.plan(hits)
    client.free(hits.ticket)
    client.call("CLEAR", m.Clear())
    assert b"".join(client.get(plan) or []) == plan.digests
    assert client.free(plan.ticket)
    assert client.pins() == 0

"""What the service does for handlers of plugins: instances, presence, pins under tickets, loads with an end."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import pytest

from kvframework.api.plugin import NoOptions
from kvframework.api.requests import CacheServices, ClientInfo, PackedKey, hookimpl
from kvframework.api.tier import TierProvider
from kvframework.errors import LeaseUnknown, NotRegistered
from kvframework.server import Server
from kvframework.wire import messages as m
from kvframework.wire.protocol import REQUESTS
from tests.core.server.in_process import serving
from tests.core.storage.tier import MemoryTier
from tests.support.waiting import wait_until
from tests.support.wire_client import WireClient, key_for


class MemoryPlugin:
    def __init__(self) -> None:
        self.tier = MemoryTier()

    @hookimpl
    def kvf_tiers(self) -> list[TierProvider[NoOptions]]:
        return [TierProvider(name="memory", summary="memory", create=lambda _options, _context: self.tier)]


@dataclass
class Stored:
    """Four chunks of a registered instance, in L1 and in the tier."""

    server: Server
    services: CacheServices
    wire: WireClient
    tier: MemoryTier
    keys: Sequence[PackedKey]

    @property
    def client(self) -> ClientInfo:
        return self.server._messages.sessions[0]

    def clear(self) -> None:
        self.wire.call("CLEAR", m.Clear())

    def pins(self) -> int:
        pins: int = self.wire.status()["l1"]["pins"]
        return pins


@pytest.fixture
def stored() -> Iterator[Stored]:
    plugin = MemoryPlugin()
    with serving("l2.0.use=memory", plugins=(plugin,)) as server, WireClient(server.endpoint) as wire:
        key = key_for(wire.register(), range(1024))
        wire.store(key, b"x")
        wait_until(lambda: not wire.status()["l2"][0]["write_pending"], what="the write to L2")
        (keys,) = server.service.resolve_keys(key).values()
        yield Stored(server, server.service, wire, plugin.tier, keys)


def test_an_instance_is_the_registered_one(stored: Stored) -> None:
    instance = stored.services.instance(1)
    assert instance is stored.services.instance(1, stored.client) is stored.server.service.contexts[1]
    assert (instance.model_name, instance.world_size, instance.rank) == ("tiny", 1, None)
    instance.attached["mine"] = 1
    with WireClient(stored.server.endpoint):
        stranger = stored.server._messages.sessions[1]
        with pytest.raises(NotRegistered, match="the client's instances: none"):
            stored.services.instance(1, stranger)
    with pytest.raises(NotRegistered):
        stored.services.instance(2)
    stored.wire.call("UNREGISTER_KV_CACHE", m.Unregister(1))
    stored.wire.register()
    assert stored.services.instance(1).attached == {}, "it ended with the instance"


def test_a_pin_is_a_ticket(stored: Stored) -> None:
    assert stored.services.present([*stored.keys, bytes(72)]) == [True] * 4 + [False]
    assert stored.services.pin(stored.client, [*stored.keys, bytes(72)]) == ""
    assert stored.services.pin(stored.client, []) == ""
    ticket = stored.services.pin(stored.client, stored.keys[:3], "mine")
    stored.clear()
    assert stored.services.present(stored.keys) == [True] * 3 + [False]
    reply = stored.wire.call("QUERY_PREFETCH_STATUS", m.TicketRef(ticket))
    assert (reply.ticket, reply.pending) == (ticket, False)
    assert stored.wire.status()["tickets"] == 1
    assert stored.wire.call("FREE_LOOKUP_LOCKS", m.TicketRef(ticket)).pins == 3
    with pytest.raises(LeaseUnknown):
        stored.wire.call("FREE_LOOKUP_LOCKS", m.TicketRef(ticket))
    assert stored.pins() == 0
    assert stored.wire.status()["lookups"]["lookups"] == 0, "it counts as no lookup"


def test_its_request_ends_it(stored: Stored) -> None:
    for request_id in ("one", "two"):
        assert stored.services.pin(stored.client, stored.keys, request_id)
    assert stored.wire.call("END_SESSION", m.EndSession("one")).tickets == 1
    assert stored.pins() == 4
    assert stored.wire.call("END_SESSION", m.EndSession()).tickets == 1
    assert stored.pins() == 0


def test_who_has_gone_gets_none(stored: Stored) -> None:
    """A handler in another thread may answer a client that has ended meanwhile."""
    with WireClient(stored.server.endpoint):
        gone = stored.server._messages.sessions[1]
        assert stored.services.pin(gone, stored.keys)
    wait_until(lambda: stored.pins() == 0, what="the end of the client")
    assert stored.services.pin(gone, stored.keys) == ""
    assert stored.pins() == 0


def test_its_time_ends_it() -> None:
    with serving("server.ticket_s=0.3") as server, WireClient(server.endpoint) as wire:
        key = key_for(wire.register(), range(256))
        wire.store(key, b"x")
        (keys,) = server.service.resolve_keys(key).values()
        assert server.service.pin(server._messages.sessions[0], keys)
        wait_until(lambda: wire.status()["tickets"] == 0, what="the end of the ticket")
        wait_until(lambda: wire.status()["l1"]["pins"] == 0, what="the end of the pins")


def test_a_load_tells_its_end_while_it_still_pins(stored: Stored) -> None:
    stored.clear()
    stored.tier.stall("get")
    desc = stored.services.instance(1).get_layout_desc(256)
    task = stored.services.submit_prefetch_task(
        stored.keys, desc, select=lambda available: [index for index in range(3) if available[index]]
    )
    assert task is not None
    told: list[object] = []
    ended = threading.Event()

    def end() -> None:
        told.append((threading.current_thread().name[:4], stored.server.service.storage.status()["l1"]["pins"]))  # type: ignore[index]
        told.append(stored.services.pin(stored.client, stored.keys[:3]))
        ended.set()
        raise RuntimeError("a bug of the plugin")

    task.add_done_callback(end)
    task.add_done_callback(lambda: told.append("second"))
    stored.tier.resume()
    assert ended.wait(60)
    wait_until(lambda: task.done, what="the end of the load")
    assert told[0] == ("kvf-", 3)
    assert told[1:] == [told[1], "second"]
    assert told[1], "pinned without a gap"
    assert stored.services.present(stored.keys) == [True] * 3 + [False], "only what was selected"
    task.add_done_callback(lambda: told.append("late"))
    assert told[-1] == "late"
    assert stored.pins() == 3


def test_a_cancelled_load_ends_too(stored: Stored) -> None:
    stored.clear()
    stored.tier.stall("contains")
    task = stored.services.submit_prefetch_task(stored.keys, stored.services.instance(1).get_layout_desc(256))
    assert task is not None
    ended = threading.Event()
    task.add_done_callback(ended.set)
    task.cancel()
    assert not ended.is_set()
    stored.tier.resume()
    assert ended.wait(60)
    wait_until(lambda: task.done, what="the end of the load")
    assert task.loaded == 0


def test_every_request_of_the_protocol_is_served() -> None:
    with serving() as server:
        assert server._messages.served.handlers.keys() >= REQUESTS.keys() - {"HELLO", "GOODBYE"}

"""Plugins in a running server: requests of a plugin's own, and hooks that run at startup only."""

from __future__ import annotations

import pytest

from kvframework import errors
from kvframework.api.plugin import NoOptions
from kvframework.api.requests import CacheServices, Handler, Message, RequestSpec, RequestsProvider, hookimpl
from kvframework.config.load import load_config
from kvframework.registry.registry import PluginRegistry
from kvframework.server import Server
from kvframework.wire import messages as m
from kvframework.wire.frames import decode, join
from tests.core.server.in_process import serving
from tests.support.wire_client import WireClient, key_for


class Count(Message, frozen=True):
    key: m.CacheKey


class Counted(Message, frozen=True):
    objects: int
    present_here: bool


class CountPlugin:
    """Adds `count.OBJECTS`: how many objects a key names."""

    request = "count.OBJECTS"

    @hookimpl
    def kvf_request_handlers(self) -> list[RequestsProvider[NoOptions]]:
        return [RequestsProvider(name="count", summary="counts", create=self.create)]

    def create(self, _options: NoOptions, services: CacheServices) -> list[Handler[Count]]:
        def count(_client: object, payload: Count, _buffers: object) -> Counted:
            rows = services.resolve_keys(payload.key)
            known = services.layout_desc(payload.key.namespace) is not None
            return Counted(sum(len(keys) for keys in rows.values()), known)

        return [Handler(RequestSpec(self.request, Count, Counted), count, pooled=True, ordered=True)]


def call(client: WireClient, payload: Message) -> Counted:
    client.socket.send_multipart(join(4711, "count.OBJECTS", payload))
    _, kind, answer = client.receive()
    if isinstance(answer, errors.KVFrameworkError):
        raise answer
    assert kind == "count.OBJECTS"
    return decode(answer, Counted, where="test")


def test_a_plugin_adds_requests_of_its_own() -> None:
    with serving("requests.0.use=count", plugins=(CountPlugin(),)) as server, WireClient(server.endpoint) as client:
        registered = client.register(world_size=2)
        key = key_for(registered, range(512), world_size=2)
        assert call(client, Count(key)) == Counted(2, True)
        with pytest.raises(errors.RequestError, match="not registered"):
            call(client, Count(key_for(registered, range(512), namespace=b"x" * 16)))
        with pytest.raises(errors.InvalidPayload):
            call(client, m.Empty())


def test_a_request_outside_the_plugins_names_stops_the_start() -> None:
    class Greedy(CountPlugin):
        request = "LOOKUP"

    registry = PluginRegistry()
    registry.register(Greedy(), distribution="tests")
    with pytest.raises(errors.PluginBroken, match=r"count\."):
        Server(load_config(None, ["requests.0.use=count", "l1.capacity=1MiB"]), registry)


def test_hooks_run_at_startup_only() -> None:
    registry = PluginRegistry()
    calls: list[str] = []
    registry.manager.add_hookcall_monitoring(
        before=lambda name, _impls, _kwargs: calls.append(name), after=lambda *_args: None
    )
    with serving(registry=registry) as server, WireClient(server.endpoint) as client:
        startup = len(calls)
        assert startup > 0
        registered = client.register()
        for number in range(250):
            key = key_for(registered, [number] * 256)
            client.store(key, b"hook")
            reply = client.lookup(key)
            assert client.retrieve(key) is not None
            client.call("FREE_LOOKUP_LOCKS", m.TicketRef(reply.ticket))
        assert server.service.storage.status()["l1"]["counters"]["stored"] == 250  # type: ignore[index]
        assert len(calls) == startup

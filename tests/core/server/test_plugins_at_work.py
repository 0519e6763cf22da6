"""Plugins in a running server: requests of a plugin's own, and hooks that run at startup only. The codec `planes` in a
server: what a tier holds, and that the dtype of the layout reaches the codec. Objects of zeros would be taken for
single bytes: only the layout tells that their elements are longer."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from kvframework import errors
from kvframework.api.plugin import NoOptions
from kvframework.api.requests import CacheServices, Handler, Message, RequestSpec, RequestsProvider, hookimpl
from kvframework.config.load import load_config
from kvframework.registry.registry import PluginRegistry
from kvframework.server import Server
from kvframework.storage.namespaces import HEADER_BYTES
from kvframework.wire import messages as m
from kvframework.wire.frames import decode, join
from tests.core.server.in_process import serving
from tests.support.server_process import ServerProcess
from tests.support.waiting import wait_until
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


pytest.importorskip("zstandard", reason="zstandard is not installed")
TOKENS = list(range(1024))
MARK = b"KVFO"


@contextmanager
def storing(*tier: str, dtype: str) -> Iterator[tuple[WireClient, m.Registered]]:
    """A client of a server whose tier has all objects."""
    with ServerProcess(*tier, "l2.0.codec=planes", "l2.0.timeout_s=60.0") as server, server.client() as client:
        registered = client.register(dtype_str=dtype)
        client.store(key_for(registered, TOKENS), bytes(16))
        wait_until(lambda: client.status()["l2"][0]["write_pending"] == 0, what="the write to L2")
        yield client, registered


def loaded(client: WireClient, registered: m.Registered) -> bytes | None:
    """The objects' bytes as they come back from the tier."""
    client.call("CLEAR", m.Clear())
    reply = client.settled(client.lookup(key_for(registered, TOKENS)))
    found = client.retrieve(key_for(registered, TOKENS))
    if reply.ticket:
        client.call("FREE_LOOKUP_LOCKS", m.TicketRef(reply.ticket))
    return found


def width_in(value: bytes) -> int:
    """The bytes of an element in a value in L2 that `planes` packed, 0 for another one. A tier may have a header of its
    own before it."""
    at = value.find(MARK)
    return value[at + HEADER_BYTES + 1] if value[at + 40 : at + 56].rstrip(b"\0") == b"planes" else 0


@pytest.mark.parametrize(("dtype", "width"), [("bfloat16", 2), ("float32", 4)])
def test_a_tier_holds_planes_of_the_layouts_elements(tmp_path: Path, dtype: str, width: int) -> None:
    folder = tmp_path / "l2"
    tier = ("l2.0.use=filesystem", f"l2.0.path={folder}", "l2.0.capacity=1GiB")
    with storing(*tier, dtype=dtype) as (client, registered):
        held = [file for file in folder.rglob("*") if file.is_file() and width_in(file.read_bytes()) == width]
        assert len(held) == 4
        for file in held:
            value = file.read_bytes()
            at = value.find(MARK)
            assert any(value[at + 24 : at + 40]), "the fingerprint of the objects' layout"
        found = loaded(client, registered)
        assert found is not None
        assert len(found) == 4 * 2 * 2 * 256 * 8 * width
        assert not any(found)
        for file in held:
            damaged = bytearray(file.read_bytes())
            damaged[damaged.find(MARK) + HEADER_BYTES + 20] ^= 1
            file.write_bytes(damaged)
        assert loaded(client, registered) is None
        assert client.status()["l2"][0]["corrupt"] >= 1

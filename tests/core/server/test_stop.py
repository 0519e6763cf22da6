"""The end of a server whose plugins do not let go of everything."""

from __future__ import annotations

import logging
import re
import threading
from pathlib import Path

import pytest

from kvframework.api.plugin import NoOptions
from kvframework.api.tier import Node, TierProvider, hookimpl
from kvframework.config.load import load_config
from kvframework.errors import ConfigError, PluginBroken
from kvframework.registry.registry import PluginRegistry
from kvframework.server import Server
from tests.core.server.gated_transport import GatedPlugin
from tests.core.server.in_process import serving
from tests.core.storage.tier import MemoryTier
from tests.support.wire_client import WireClient


def test_an_arena_that_a_copy_still_uses_is_no_error(caplog: pytest.LogCaptureFixture) -> None:
    with serving() as server:
        held = server.service.storage.table.arena[:16]
    assert "the arena stays mapped, because a transport still uses it after its last request" in caplog.text
    held.release()


def test_a_transport_that_cannot_close_does_not_keep_storage_open(caplog: pytest.LogCaptureFixture) -> None:
    plugin = GatedPlugin()

    def fail() -> None:
        raise RuntimeError("jammed")

    plugin.transport.close = fail  # type: ignore[method-assign]
    caplog.set_level(logging.INFO)
    with serving("transport.1.use=gated", plugins=(plugin,)):
        pass
    assert "closing transport gated failed" in caplog.text
    assert caplog.records[-1].message == "stopped"


def test_a_client_that_lives_is_not_said_to_have_ended(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    with serving() as server:
        client = WireClient(server.endpoint, timeout=20)
        client.register(instance_id=50)
    client.close()
    (line,) = (each.message for each in caplog.records if "1 instance" in each.message)
    assert line.startswith("closed the session of ")
    assert "because the server stops: 1 instance, 0 tickets and " in line


# How many loads and writes call a tier at once: by its `[[l2]]` table, else by its provider.


def threads(kind: str) -> int:
    return sum(bool(re.fullmatch(rf"kvf-{kind}-filesystem-\d+", thread.name)) for thread in threading.enumerate())


@pytest.mark.parametrize(
    ("settings", "loads", "writes"), [((), 4, 2), (("l2.0.loads=1", "l2.0.writes=3"), 1, 3), (("l2.0.writes=1",), 4, 1)]
)
def test_as_many_as_the_table_or_the_provider_says_and_by_its_write_policy(
    tmp_path: Path, settings: tuple[str, ...], loads: int, writes: int
) -> None:
    disk = ("l2.0.use=filesystem", f"l2.0.path={tmp_path / 'l2'}", "l2.0.capacity=1GiB")
    with serving(*disk, *settings, "l2.0.write_policy=write_through_selective") as server:
        (tier,) = server.service.storage.status()["l2"]  # type: ignore[misc]
        assert (tier["loads"], tier["writes"]) == (loads, writes)
        assert tier["write_policy"] == "write_through_selective"
        assert (threads("prefetch"), threads("writer")) == (loads + 1, writes), "one more asks"
    assert (threads("prefetch"), threads("writer")) == (0, 0)


@pytest.mark.parametrize("value", [0, -1, 65])
def test_another_number_is_refused(value: int) -> None:
    for name in ("loads", "writes"):
        with pytest.raises(ConfigError, match=name):
            load_config(None, ("l2.0.use=filesystem", "l2.0.path=/tmp/none", f"l2.0.{name}={value}"))
        with pytest.raises(PluginBroken, match=f"{name} is {value}"):
            TierProvider(name="t", summary="s", create=lambda _options, _context: None, **{name: value})  # type: ignore[arg-type,return-value]


# A tier gets the node that it is part of before the server serves, and may stop the start.


class AttachedTier(MemoryTier):
    node: Node | None = None
    error: Exception | None = None

    def attach(self, node: Node) -> None:
        if self.error is not None:
            raise self.error
        self.node = node


class Plugin:
    def __init__(self, tier: AttachedTier) -> None:
        self.tier = tier

    @hookimpl
    def kvf_tiers(self) -> list[TierProvider[NoOptions]]:
        return [TierProvider(name="attached", summary="attached", create=lambda _options, _context: self.tier)]


def test_the_node_of_a_tier_knows_what_the_server_knows() -> None:
    tier = AttachedTier()
    with serving("l2.0.use=attached", plugins=(Plugin(tier),)) as server, WireClient(server.endpoint) as client:
        node = tier.node
        assert node.identity.boot_id == server.service.boot_id
        assert node.identity.chunk_size == server.service.chunk_size
        assert node.identity.hasher == server.service.hasher.fingerprint
        assert node.models() == {}
        registered = client.register()
        assert node.models() == {"tiny": {registered.namespace}}


def test_an_error_of_attach_stops_the_start() -> None:
    tier = AttachedTier()
    tier.error = RuntimeError("no room")
    registry = PluginRegistry()
    registry.register(Plugin(tier), distribution="tests")
    server = Server(load_config(None, ("l2.0.use=attached", "l1.capacity=16MiB")), registry)
    with pytest.raises(PluginBroken, match="attach raised RuntimeError: no room"):
        server.bind()
    server.close()

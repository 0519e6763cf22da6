"""A tier gets the node that it is part of before the server serves, and may stop the start."""

from __future__ import annotations

import pytest

from kvframework.api.options import NoOptions
from kvframework.api.tier import Node, TierProvider, hookimpl
from kvframework.config import load_config
from kvframework.errors import PluginBroken
from kvframework.registry.registry import PluginRegistry
from kvframework.server import Server
from tests.core.server.in_process import serving
from tests.core.storage.tier import MemoryTier
from tests.support.wire_client import WireClient


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
        assert node is not None
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

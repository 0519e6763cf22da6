"""The kit over a network tier on a faulty wire: one that is right, and some that are wrong in one way each. Run by
pytest outside of the repository."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from typing import ClassVar

import pytest
from line_tier import LineServer, LineTier

from kvf_dev.testing import FaultProxy, TierConformance
from kvf_dev.testing.tier import TierKit
from kvf_dev.testing.tier.lifecycle import WireFaultTests
from kvframework.api.tier import Tier


class OverTheWire(TierKit):
    Tier: type[LineTier] = LineTier
    shared = True

    @pytest.fixture
    def server(self) -> Iterator[LineServer]:
        server = LineServer()
        yield server
        server.close()

    @pytest.fixture
    def tier(self, server: LineServer) -> Iterator[Tier]:
        tier = self.Tier(server.address)
        yield tier
        tier.close()

    @pytest.fixture
    def faulty_tier(self, server: LineServer) -> Iterator[tuple[Tier, FaultProxy]]:
        with FaultProxy(server.address) as proxy:
            tier = self.Tier(proxy.address)
            yield tier, proxy
            tier.close()

    def reopen(self, tier: Tier) -> Tier:
        assert isinstance(tier, LineTier)
        return self.Tier(tier.address)


class TestOverTcp(OverTheWire, TierConformance):
    pass


class Planted(OverTheWire, WireFaultTests):
    patience_s = 1.5
    grace_s = 0.5


class TestKeepsALateConnection(Planted):
    class Tier(LineTier):
        def failed(self) -> None:
            if self.sock is None or self.closed:
                self.drop()


class TestWaitsForever(Planted):
    class Tier(LineTier):
        def arm(self, deadline: float) -> socket.socket:
            sock = super().arm(deadline)
            sock.settimeout(None)
            return sock


class TestLeavesItsCallsAtClose(Planted):
    class Tier(LineTier):
        def close(self) -> None:
            self.closed = True


class TestLeavesBrokenConnections(Planted):
    left: ClassVar[list[object]] = []

    class Tier(LineTier):
        def drop(self) -> None:
            TestLeavesBrokenConnections.left.append(self.sock)
            self.sock = None


class TestRaisesWhatTheSocketDoes(Planted):
    class Tier(LineTier):
        def failed(self) -> None:
            self.drop()
            raise ConnectionError("whatever it was")


class TestNeverConnectsAgain(Planted):
    class Tier(LineTier):
        def failed(self) -> None:
            if self.sock is not None:
                self.sock.close()

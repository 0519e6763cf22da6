"""The kit for tiers, for kvf_peers on three nodes over loopback: what their engines store, another node reads."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from kvf_dev.testing import FaultProxy, TierConformance
from kvf_dev.testing.tier.contract import BatchTests, ContractTests
from kvframework.api.tier import Tier
from tests.support.certificates import make_certificate
from tests.support.peer_nodes import Lender, StoredAtPeers, peers_tier, token_file


@pytest.fixture
def lenders(tmp_path: Path) -> Iterator[list[Lender]]:
    token = token_file(tmp_path)
    with ExitStack() as stack:
        yield [stack.enter_context(Lender(token)) for _ in range(3)]


class TestPeers(TierConformance):
    shared = True
    examples = 10

    @pytest.fixture
    def tier(self, tmp_path: Path, lenders: list[Lender]) -> Iterator[Tier]:
        reader = peers_tier(token_file(tmp_path), peers=[each.address for each in lenders], ask_s=10)
        tier = StoredAtPeers(reader, [each.node for each in lenders])
        yield tier
        tier.close()

    @pytest.fixture
    def faulty_tier(self, tmp_path: Path, lenders: list[Lender]) -> Iterator[tuple[Tier, FaultProxy]]:
        (host, port), others = lenders[0].address.split(":"), lenders[1:]
        for each in others:
            each.close()
        with FaultProxy((host, int(port))) as proxy:
            reader = peers_tier(token_file(tmp_path), peers=[f"127.0.0.1:{proxy.port}"], ask_s=0.5)
            tier = StoredAtPeers(reader, [lenders[0].node])
            yield tier, proxy
            tier.close()

    def reopen(self, tier: Tier) -> Tier:
        assert isinstance(tier, StoredAtPeers)
        addresses = [str(peer.address) for peer in tier.reader._peers]
        token = Path(tier.reader._settings.options.token_file)
        return StoredAtPeers(peers_tier(token, peers=addresses, ask_s=10), tier.nodes)


class TestPeersOverTls(BatchTests, ContractTests):
    """What depends on how the bytes travel."""

    @pytest.fixture
    def tier(self, tmp_path: Path) -> Iterator[Tier]:
        made, token = make_certificate(tmp_path), token_file(tmp_path)
        tls = made.options()
        with Lender(token, **tls) as lender:
            tier = StoredAtPeers(peers_tier(token, peers=[lender.address], ask_s=10, **tls), [lender.node])
            yield tier
            tier.close()

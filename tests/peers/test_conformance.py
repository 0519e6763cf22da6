"""The kit for tiers, for kvf_peers on three nodes over loopback: what their engines store, another node reads. What the
doctor tells of other nodes: who answers, whether they can share, and how bytes travel."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from kvf_dev.testing import FaultProxy, TierConformance
from kvf_dev.testing.tier.contract import BatchTests, ContractTests
from kvframework.api.tier import Tier
from tests.core.doctor.tables import ask, levels
from tests.support.certificates import make_certificate
from tests.support.peer_nodes import Lender, StoredAtPeers, ValuesNode, peers_tier, token_file
from tests.support.ports import free_port


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
            tier._await_all(time.monotonic() + 60)  # the first call waits half of `ask_s` for a connection
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


def test_nodes_that_answer_and_agree_are_ok(tmp_path: Path) -> None:
    token = token_file(tmp_path)
    with Lender(token) as one, Lender(token) as other:
        found = ask("peers", token_file=str(token), listen=one.address, peers=[one.address, other.address])
    assert levels(found) == dict.fromkeys(("plugin.usable", "peers.network", "peers.reachable", "peers.names"), "ok")
    assert found["peers.names"].fact == "2 nodes name the same content alike"


def test_one_that_is_silent_and_one_that_differs_are_named(tmp_path: Path) -> None:
    token, silent = token_file(tmp_path), f"127.0.0.1:{free_port()}"
    with Lender(token) as one, Lender(token, ValuesNode(hasher="sha256/1")) as other:
        one.node.told = other.node.told = {"llama": [bytes(16)]}
        found = ask("peers", token_file=str(token), peers=[one.address, other.address, silent])
    assert levels(found) == {
        "plugin.usable": "ok",
        "peers.network": "ok",
        "peers.reachable": "warn",
        "peers.names": "fail",
    }
    assert found["peers.reachable"].fact.startswith(f"{silent}: Connection refused; ")
    assert found["peers.names"].fact.startswith(f"{other.address} and {one.address} differ in the hasher")


def test_a_node_with_another_token_is_told_from_one_that_is_away(tmp_path: Path) -> None:
    silent = f"127.0.0.1:{free_port()}"
    with Lender(token_file(tmp_path)) as other:
        own = token_file(tmp_path / "own", "another token for tests")
        found = ask("peers", token_file=str(own), peers=[other.address, silent])
    assert found["peers.reachable"].fact == f"{silent}: Connection refused"
    assert found["peers.trust"].level == "fail"
    assert found["peers.trust"].fact == f"{other.address}: the node refuses this node: the nodes have different tokens"
    assert "the same token" in found["peers.trust"].advice


def test_an_address_at_which_this_node_cannot_listen_is_found(tmp_path: Path) -> None:
    token = str(token_file(tmp_path))
    with socket.create_server(("127.0.0.1", 0)) as foreign:
        taken = f"127.0.0.1:{foreign.getsockname()[1]}"
        found = ask("peers", token_file=token, listen=taken)["peers.listen"]
    assert (found.level, found.fact) == ("fail", f"{taken}: Address already in use")
    elsewhere = "192.0.2.1:9311"  # reserved for documentation
    found = ask("peers", token_file=token, listen=elsewhere, trusted_network=True)["peers.listen"]
    assert (found.level, found.fact) == ("fail", f"{elsewhere}: Cannot assign requested address")
    free = ask("peers", token_file=token, listen=f"127.0.0.1:{free_port()}")
    assert levels(free) == {"plugin.usable": "ok", "peers.network": "ok"}


def test_plain_text_beyond_this_machine_is_warned_of_or_refused(tmp_path: Path) -> None:
    token = token_file(tmp_path)
    found = ask("peers", token_file=str(token), listen="0.0.0.0:1", trusted_network=True)
    assert found["peers.network"].level == "warn"
    (refused,) = ask("peers", token_file=str(token), listen="0.0.0.0:1").values()
    assert refused.level == "fail"
    assert "without encr" in refused.fact

"""What the doctor tells of other nodes: who answers, whether they can share, and how bytes travel."""

from __future__ import annotations

import socket
from pathlib import Path

from tests.core.doctor.tables import ask, levels
from tests.support.peer_nodes import Lender, ValuesNode, token_file
from tests.support.ports import free_port


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

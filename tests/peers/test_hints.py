"""Hints in a real Redis: who has what is told by the nodes themselves, and a hint that is stale, forged or lost is a
miss."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("redis")

from kvf_peers import hints
from kvf_peers.hints import MOST_ASKED, hint_name, make_hint, parse_hint
from kvf_peers.peer import Peer
from kvf_peers.settings import Address
from kvf_peers.tier import PeersTier
from kvframework.api.tier import Outcome
from kvframework.errors import ConfigFieldError, TierError
from tests.peers.test_tier import load, new_keys, soon
from tests.support.peer_nodes import Lender, ValuesNode, peers_tier, token_file
from tests.support.ports import free_port
from tests.support.redis_server import RedisServer
from tests.support.waiting import wait_until

pytestmark = pytest.mark.redis
FOUND, MISSING = Outcome.FOUND, Outcome.MISSING


@pytest.fixture
def token(tmp_path: Path) -> Path:
    return token_file(tmp_path)


@pytest.fixture
def reader(token: Path, redis: RedisServer) -> Iterator[PeersTier]:
    tier = peers_tier(token, hints=redis.url, ask_s=10.0)
    tier.attach(ValuesNode())
    yield tier
    tier.close()


def await_hint(redis: RedisServer, key: bytes) -> None:
    with redis.client() as client:
        wait_until(lambda: client.get(hint_name(key)) is not None, what="a hint")


def test_what_a_node_has_and_gets_is_found_by_hints(token: Path, redis: RedisServer, reader: PeersTier) -> None:
    before, later, missing = new_keys(3)
    node = ValuesNode()
    node.set(before, b"before")
    with Lender(token, node, hints=redis.url) as lender, Lender(token, hints=redis.url):
        await_hint(redis, before)
        node.set(later, b"later")
        await_hint(redis, later)
        assert reader.contains([before, missing, later], deadline=soon()) == [FOUND, MISSING, FOUND]
        assert load(reader, later, 5) == (5, b"later")
        assert [str(peer.address) for peer in reader._directory.peers()] == [lender.address]
        node.values.clear()
        assert reader.contains([before, later], deadline=soon()) == [MISSING, MISSING], "a stale hint is a miss"


def test_a_hint_of_an_earlier_start_is_passed_over(token: Path, redis: RedisServer, reader: PeersTier) -> None:
    key, other = new_keys(2)
    with Lender(token, hints=redis.url) as lender, redis.client() as client:
        lender.node.set(key, b"v")
        lender.node.set(other, b"w")
        await_hint(redis, other)
        host, port = lender.address.split(":")
        client.set(hint_name(key), make_hint(bytes(16), Address(host, int(port))))
        assert reader.contains([other], deadline=soon()) == [FOUND]
        assert reader.contains([key], deadline=soon()) == [MISSING]
        assert reader.contains([key, other], deadline=soon()) == [MISSING, FOUND]


@pytest.mark.parametrize("forged", [b"", b"x", bytes(16), bytes(16) + b"no address", bytes(400), b"\xff" * 40])
def test_what_is_no_hint_is_a_miss(redis: RedisServer, reader: PeersTier, forged: bytes) -> None:
    (key,) = new_keys(1)
    with redis.client() as client:
        client.set(hint_name(key), forged)
    assert parse_hint(forged) is None
    assert reader.contains([key], deadline=soon()) == [MISSING]


def test_hints_are_told_again_while_the_object_is_there(token: Path, redis: RedisServer) -> None:
    stays, leaves = new_keys(2)
    with Lender(token, hints=redis.url, hint_ttl_s=2) as lender, redis.client() as client:
        lender.node.set(stays, b"v")
        lender.node.set(leaves, b"w")
        await_hint(redis, leaves)
        del lender.node.values[leaves]
        wait_until(lambda: client.get(hint_name(leaves)) is None, what="the end of a hint")
        await_hint(redis, stays)


def test_a_redis_that_hangs_or_is_gone_is_an_error_in_time(token: Path, redis: RedisServer) -> None:
    (key,) = new_keys(1)
    tier = peers_tier(token, hints=redis.url, ask_s=0.2)
    assert tier.contains([key], deadline=soon()) == [MISSING]
    redis.sigstop()
    for _ in range(6):
        with pytest.raises(TierError):
            tier.contains([key], deadline=time.monotonic() + 30)
    assert "hints" in tier.problems()[0]
    redis.sigcont()
    wait_until(lambda: _asks(tier, key), what="the hints")
    assert list(tier.problems()) == []
    redis.kill9()
    with pytest.raises(TierError):
        tier.contains([key], deadline=soon())
    tier.close()


def test_a_redis_that_is_gone_is_no_tier_that_works(token: Path) -> None:
    """Else each check would close its circuit, and each lookup wait for it again."""
    tier = peers_tier(token, hints=f"redis://127.0.0.1:{free_port()}/0", ask_s=10)
    tier.attach(ValuesNode())
    with pytest.raises(TierError, match="hints cannot be asked"):
        tier.ping(deadline=soon())
    tier.close()


def test_a_redis_that_speaks_nonsense_is_an_error(token: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as liar:
        tier = peers_tier(token, hints=f"redis://127.0.0.1:{liar.getsockname()[1]}/0", ask_s=10)

        def lie() -> None:
            sock = liar.accept()[0]
            sock.recv(1)
            sock.sendall(b":x\r\n" * 64)
            sock.close()

        thread = threading.Thread(target=lie)
        thread.start()
        with pytest.raises(TierError, match="hints cannot be asked"):
            tier.contains(new_keys(1), deadline=soon())
        thread.join()
        tier.close()


def test_a_large_value_in_the_place_of_a_hint_is_not_received(redis: RedisServer, reader: PeersTier) -> None:
    (key, other) = new_keys(2)
    with redis.client() as client:
        client.set(hint_name(key), bytes(8 << 20))
        client.rpush(hint_name(other), b"a list")
        before = client.info("stats")["total_net_output_bytes"]
        assert reader.contains([key, other], deadline=soon()) == [MISSING, MISSING]
        assert client.info("stats")["total_net_output_bytes"] - before < 1 << 20


def test_forged_hints_keep_no_node_that_is_known_from_being_asked(
    token: Path, redis: RedisServer, reader: PeersTier
) -> None:
    true, *forged = new_keys(1 + 2 * (MOST_ASKED + 2))
    with Lender(token, hints=redis.url) as lender, redis.client() as client:
        lender.node.set(true, b"v")
        await_hint(redis, true)
        assert reader.contains([true], deadline=soon()) == [FOUND]
        for number in range(MOST_ASKED + 2):
            hint = make_hint(bytes(16), Address("127.0.0.1", free_port()))
            for key in forged[2 * number : 2 * number + 2]:
                client.set(hint_name(key), hint)
        assert reader.contains([true, *forged], deadline=soon())[0] is FOUND


def test_nodes_that_are_gone_are_forgotten_and_nobody_waits_for_them(
    token: Path, redis: RedisServer, reader: PeersTier, monkeypatch: pytest.MonkeyPatch
) -> None:
    key, other = new_keys(2)
    with redis.client() as client:
        for each in (key, other):
            client.set(hint_name(each), make_hint(bytes(16), Address("127.0.0.1", free_port())))
    with contextlib.suppress(TierError):
        reader.contains([key, other], deadline=soon())
    wait_until(lambda: len(reader.problems()) == 2, what="their problems")
    monkeypatch.setattr(hints, "_FORGET_S", 0.0)
    monkeypatch.setattr(Peer, "close", lambda _peer: pytest.fail("it waits for a connection"))
    assert list(reader.problems()) == []
    assert list(reader._directory.peers()) == []
    monkeypatch.undo()


def _asks(tier: PeersTier, key: bytes) -> bool:
    try:
        return tier.contains([key], deadline=soon()) == [MISSING]
    except TierError:
        return False


def test_the_password_of_the_hints_is_never_shown(token: Path) -> None:
    tier = peers_tier(token, hints="redis://:secret@127.0.0.1:1/0", ask_s=5)
    with pytest.raises(TierError) as caught:
        tier.contains(new_keys(1), deadline=soon())
    shown = f"{caught.value} {tier.problems()} {tier._settings.options!r}"
    assert "secret" not in shown
    tier.close()
    with pytest.raises(ConfigFieldError) as refused:
        peers_tier(token, hints="secret://nonsense", trusted_network=True)
    assert "secret:" not in str(refused.value)

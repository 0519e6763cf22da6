"""A subscription whose peer is not what it should be, or says too much, over real sockets."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
import zmq
from zmq.auth.thread import ThreadAuthenticator

from kvf_route import subscription
from kvf_route.router import Router
from kvf_route.settings import Node
from kvframework.messaging.curve import read_secret, write_curve_pair
from tests.route.publisher import batch, stored
from tests.support.ports import free_port

SLOW_S = 60.0


@pytest.fixture
def hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subscription, "ANEW_S", 0.2)
    monkeypatch.setattr(subscription, "_POLL_MS", 50)


async def until(condition: Callable[[], object]) -> None:
    async def held() -> None:
        while not condition():
            await asyncio.sleep(0.01)

    await asyncio.wait_for(held(), SLOW_S)


@contextlib.asynccontextmanager
async def following(node: Node, key: str = "") -> AsyncIterator[Router]:
    router = Router(1000, key)
    router.follow([node])
    try:
        yield router
    finally:
        await router.stop()


def told(router: Router) -> dict[str, Any]:
    (each,) = router.document()["publishers"]
    return dict(each)


@pytest.mark.usefixtures("hasty")
@pytest.mark.parametrize("stranger", ["another kind of socket", "CURVE"])
def test_a_stranger_at_the_address_of_a_publisher_is_named_and_outlived(
    stranger: str, caplog: pytest.LogCaptureFixture
) -> None:
    """libzmq never tries again after some refusals: an address that another service had for a moment, keys that were
    admitted later."""
    caplog.set_level(logging.INFO)
    port = free_port()

    async def follow() -> None:
        async with following(Node("a", f"tcp://127.0.0.1:{port}")) as router:
            with zmq.Context() as context, context.socket(zmq.PUB if stranger == "CURVE" else zmq.REP) as other:
                if stranger == "CURVE":
                    other.curve_server = 1
                    _, other.curve_secretkey = zmq.curve_keypair()
                other.bind(f"tcp://127.0.0.1:{port}")
                await until(lambda: told(router)["trouble"])
            with zmq.Context() as context, context.socket(zmq.PUB) as publisher:
                publisher.bind(f"tcp://127.0.0.1:{port}")
                await until(lambda: told(router)["connected"])
                assert told(router)["trouble"] == ""

    asyncio.run(follow())
    assert len([each for each in caplog.records if each.levelno == logging.WARNING]) == 1


@pytest.mark.usefixtures("hasty")
def test_that_nothing_listens_is_told_until_something_does(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    port = free_port()

    async def follow() -> None:
        async with following(Node("a", f"tcp://127.0.0.1:{port}")) as router:
            await until(lambda: "nothing listens at" in told(router)["trouble"])
            with zmq.Context() as context, context.socket(zmq.PUB) as publisher:
                publisher.bind(f"tcp://127.0.0.1:{port}")
                await until(lambda: told(router)["connected"])
                assert told(router)["trouble"] == ""
            await until(lambda: "nothing listens at" in told(router)["trouble"])

    asyncio.run(follow())
    assert not [each for each in caplog.records if each.levelno >= logging.WARNING]


@pytest.mark.usefixtures("hasty")
def test_a_key_that_is_admitted_later(tmp_path: Path) -> None:
    for name in ("server", "router"):
        write_curve_pair(tmp_path / f"{name}.secret", tmp_path / f"{name}.public")

    class Admitted:
        anyone = False

        def callback(self, _domain: str, _key: bytes) -> bool:
            return self.anyone

    async def follow() -> None:
        with zmq.Context() as context, context.socket(zmq.PUB) as publisher:
            guard, admitted = ThreadAuthenticator(context), Admitted()
            guard.start()
            guard.configure_curve_callback("*", admitted)
            publisher.curve_server = 1
            publisher.curve_secretkey = read_secret(tmp_path / "server.secret")
            port = publisher.bind_to_random_port("tcp://127.0.0.1")
            node = Node("a", f"tcp://127.0.0.1:{port}", server_key=str(tmp_path / "server.public"))
            try:
                async with following(node, str(tmp_path / "router.secret")) as router:
                    await until(lambda: "admit" in told(router)["trouble"])
                    admitted.anyone = True
                    await until(lambda: told(router)["connected"])
            finally:
                guard.stop()

    asyncio.run(follow())


@pytest.mark.usefixtures("hasty")
@pytest.mark.parametrize("step", [0, 1], ids=["the same number", "rising numbers"])
def test_a_replay_without_an_end_keeps_neither_news_nor_readiness(step: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subscription, "LONGEST_REPLAY_S", 0.3)

    async def follow() -> None:
        with zmq.Context() as context, context.socket(zmq.XPUB) as news, context.socket(zmq.ROUTER) as replay:
            replay.sndhwm, replay.linger = 10, 0
            events, again = (
                f"tcp://127.0.0.1:{each.bind_to_random_port('tcp://127.0.0.1')}" for each in (news, replay)
            )
            number, asked_by = 0, b""

            def answered(router: Router) -> bool:
                nonlocal number, asked_by
                if replay.poll(0):
                    asked_by = replay.recv_multipart()[0]
                for _ in range(20 if asked_by else 0):
                    number += step
                    replay.send_multipart([asked_by, b"", b"", number.to_bytes(8, "big"), batch()])
                return bool(told(router)["failed_replays"])

            async with following(Node("a", events, again)) as router:
                await until(lambda: answered(router))
                assert router.waiting_for == []
                live = stored([1], None, range(4))
                news.send_multipart([b"", (number + 1).to_bytes(8, "big"), batch(live)])
                await until(lambda: answered(router) and told(router)["blocks"] == 1)

    asyncio.run(follow())


@pytest.mark.usefixtures("hasty")
def test_an_address_that_no_socket_takes_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    async def follow() -> None:
        async with following(Node("a", "tcp://...:1")) as router:
            await until(lambda: told(router)["trouble"])
            await asyncio.sleep(3 * subscription.ANEW_S)

    asyncio.run(follow())
    (said,) = caplog.records
    assert said.exc_info is None
    assert "connecting to the address failed:" in said.getMessage()

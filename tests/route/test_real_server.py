"""A router beside real servers that tell: for every prompt its score is what a lookup finds, whatever happens."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("kvf_events", reason="this server tells routers nothing")

from tests.events.node import CHUNK, OBJECT, Engine, prompt
from tests.events.node import settings as telling
from tests.route.route_process import RouteProcess
from tests.support.held_server import HeldServer
from tests.support.server_process import ServerProcess
from tests.support.waiting import wait_until

PROMPTS = [prompt(number, 4) for number in range(24)]


def folder_of(server: ServerProcess) -> Path:
    return Path(server.endpoint.removeprefix("ipc://")).parent


def node(server: ServerProcess) -> tuple[str, str]:
    return "--node", f"a=ipc://{folder_of(server)}/told.sock,ipc://{folder_of(server)}/again.sock"


def agrees(server: ServerProcess, router: RouteProcess) -> bool:
    """Whether the score of each prompt is what the server finds of it, in whole chunks."""
    with server.client() as client:
        engine = Engine(client)
        found = [engine.hit(tokens) for tokens in PROMPTS]
    scores = [router.score(tokens).get("a", {}).get("cpu", 0) for tokens in PROMPTS]
    return found == [score // CHUNK * CHUNK for score in scores]


def store(server: ServerProcess, prompts: list[list[int]]) -> None:
    with server.client() as client:
        engine = Engine(client)
        for tokens in prompts:
            engine.store(tokens)


def test_scores_follow_evictions_and_cold_starts() -> None:
    # Less than half of the prompts fits.
    server = ServerProcess(capacity=f"{OBJECT * 32}B")
    server.set(*telling(folder_of(server)))
    with server, RouteProcess(*node(server)) as router:
        for prompts in (PROMPTS[:3], PROMPTS, PROMPTS[9:]):
            store(server, prompts)
            wait_until(lambda: agrees(server, router), what="the score of each prompt")
        assert any(router.score(tokens)["a"] for tokens in PROMPTS)
        assert not all(router.score(tokens)["a"] for tokens in PROMPTS)
        for end in (server.stop, server.kill9):
            end()
            server.start()
            wait_until(lambda: not router.publishers()[0]["blocks"], 60, "the end of what was there")
            store(server, PROMPTS[:3])
            wait_until(lambda: agrees(server, router), what="the score of each prompt")
        with RouteProcess(*node(server)) as late:
            wait_until(lambda: agrees(server, late), what="the score of each prompt, for a late router")


def test_scores_come_back_with_what_a_keeper_kept() -> None:
    server = HeldServer(capacity=f"{OBJECT * 64}B")
    server.set(*telling(folder_of(server)))
    with server, RouteProcess(*node(server)) as router:
        store(server, PROMPTS[:3])
        wait_until(lambda: agrees(server, router), what="the score of each prompt")
        assert router.score(PROMPTS[0]) == {"a": {"cpu": 4 * CHUNK}}
        pid = server.pid
        server.kill9()
        server.serving(pid)
        wait_until(lambda: router.publishers()[0]["forgotten"], 60, "the next life")
        wait_until(lambda: agrees(server, router), what="the score of each prompt")
        assert router.score(PROMPTS[0]) == {"a": {"cpu": 4 * CHUNK}}

"""llm-d's index knows what a server holds, case by case."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import pytest

from kvframework.wire import messages as m
from tests.events.node import BLOCK, CHUNK, Engine, beginnings, found, prompt
from tests.events.test_announced import TellingServer
from tests.events.test_restart import HeldTellingServer, aged, ledgers
from tests.route.routers.llmd import LlmD
from tests.route.routers.stream import Between, sockets
from tests.support.server_process import ServerProcess
from tests.support.waiting import wait_until
from tests.support.wire_client import key_for

LONG = prompt(1, 4)
END = len(LONG)
OBJECTS = 32


def knows(llmd: LlmD, engine: Engine, prompts: Sequence[Sequence[int]]) -> None:
    """Wait until each prompt has the score of what a lookup finds."""
    hits = [engine.hit(tokens) for tokens in prompts]
    llmd.until(lambda: [llmd.matched(tokens) for tokens in prompts] == hits)


@pytest.mark.parametrize("form", ["map", "array"])
def test_chunks_are_credited_as_blocks_to_both_engines_of_a_node(form: str) -> None:
    tokens = list(range(1024))
    server = TellingServer(block_size=16, format=form, engines='["10.0.0.7:8000", "10.0.0.7:8001"]')
    server.set("server.chunk_size=256")
    with server, server.client() as client, LlmD(*sockets(server), block=16) as llmd:
        client.store(key_for(client.register(), tokens), b"kv")
        for name in ("10.0.0.7:8000", "10.0.0.7:8001"):
            llmd.until(lambda name=name: llmd.matched(tokens, name) == 1024)  # type: ignore[misc]
        assert llmd.matched([*tokens[:500], *range(500)]) == 496


def test_the_last_chunk_is_evicted_then_the_first_then_it_is_stored_again() -> None:
    with TellingServer(objects=OBJECTS) as server, server.client() as client, LlmD(*sockets(server)) as llmd:
        engine = Engine(client)
        engine.store(LONG)
        others = [prompt(11 + 10 * each, 1) for each in range(OBJECTS - END // CHUNK)]
        for tokens in others:
            engine.store(tokens)
        llmd.until(lambda: llmd.matched(LONG) == END)
        engine.store(prompt(1001, 1))
        llmd.until(lambda: llmd.matched(LONG) == END - CHUNK)
        # All are used but the first.
        for tokens, start in [(LONG[:-CHUNK], CHUNK), *((tokens, 0) for tokens in others)]:
            plan = client.prepare_retrieve(engine.key(tokens, start))
            assert plan.hit
            client.call("COMMIT_RETRIEVE", m.Commit(plan.lease))
        engine.store(prompt(2001, 1))
        llmd.until(lambda: llmd.matched(LONG) == 0)
        engine.store(LONG[:-CHUNK])
        llmd.until(lambda: llmd.matched(LONG) == END - CHUNK)


def test_a_suffix_counts_once_its_prefix_comes() -> None:
    with TellingServer() as server, server.client() as client, LlmD(*sockets(server)) as llmd:
        engine = Engine(client)
        engine.store(LONG, 2 * CHUNK)
        engine.store(prompt(11, 1))
        knows(llmd, engine, [LONG, prompt(11, 1)])
        engine.store(LONG[: 2 * CHUNK])
        llmd.until(lambda: llmd.matched(LONG) == END)


def test_what_two_engines_store_is_gone_once_it_is_removed() -> None:
    with TellingServer() as server, server.client() as one, server.client() as other, LlmD(*sockets(server)) as llmd:
        for engine in (Engine(one, 1), Engine(other, 2)):
            engine.store(LONG)
            engine.store(prompt(2, 3))
        llmd.until(lambda: (llmd.matched(LONG), llmd.matched(prompt(2, 3))) == (END, 3 * CHUNK))
        one.call("CLEAR", m.Clear())
        llmd.until(lambda: llmd.matched(LONG) == llmd.matched(prompt(2, 3)) == 0)


@pytest.mark.parametrize("salted", ["withhold", "tell"])
def test_a_salted_prompt_is_no_hit_without_its_salt(salted: str) -> None:
    with TellingServer(salted=salted) as server, server.client() as client, LlmD(*sockets(server)) as llmd:
        engine = Engine(client)
        engine.store(LONG, salt="acme")
        engine.store(prompt(11, 1))
        knows(llmd, engine, [LONG, prompt(11, 1)])
        assert llmd.matched(LONG) == 0


@pytest.mark.parametrize("then", [True, False])
def test_a_lost_batch_is_healed_by_replay(then: bool) -> None:
    """Also if it was the last, and nothing happens `then`."""
    losing = False
    with TellingServer() as server, server.client() as client:
        told, again = sockets(server)
        with Between(told, lambda frames: None if losing else frames) as between, LlmD(between.endpoint, again) as llmd:
            engine = Engine(client)
            engine.store(prompt(11, 1))
            knows(llmd, engine, [prompt(11, 1)])
            losing = True
            engine.store(LONG)
            wait_until(lambda: between.lost, what="a lost message")
            losing = False
            if then:
                engine.store(prompt(21, 1))
            knows(llmd, engine, [LONG, prompt(11, 1), prompt(21, 1)])


@pytest.mark.parametrize("number", [0, 20_000, 100_000])
def test_a_late_router_is_given_the_state_and_each_number(number: int) -> None:
    with TellingServer() as server:
        if number:
            aged(server, number)
        with server.client() as client:
            engine = Engine(client)
            engine.store(LONG)
            wait_until(lambda: client.status()["events"]["blocks"]["CPU"], what="the blocks")
            with LlmD(*sockets(server)) as llmd:
                knows(llmd, engine, [LONG])
                engine.store(prompt(11, 2))
                knows(llmd, engine, [LONG, prompt(11, 2)])


@pytest.mark.parametrize("stop", [ServerProcess.stop, ServerProcess.kill9])
def test_a_cold_start_removes_what_is_gone_and_its_news_count(stop: Any) -> None:
    with TellingServer() as server, LlmD(*sockets(server)) as llmd:
        for tokens in (LONG, prompt(11, 2), LONG):
            with server.client() as client:
                Engine(client).store(tokens)
                llmd.until(lambda tokens=tokens: llmd.matched(tokens) == len(tokens))  # type: ignore[misc]
            stop(server)
            server.start()
            llmd.until(lambda tokens=tokens: llmd.matched(tokens) == 0)  # type: ignore[misc]


def test_a_killed_server_whose_l1_is_kept_stays_credited() -> None:
    with HeldTellingServer() as server, LlmD(*sockets(server)) as llmd:
        with server.client() as client:
            engine = Engine(client)
            engine.store(LONG)
            knows(llmd, engine, [LONG])
        pid = server.pid
        server.kill9()
        server.serving(pid)
        with server.client() as client, LlmD(*sockets(server)) as late:
            engine = Engine(client)
            engine.store(prompt(21, 2))
            for each in (llmd, late):
                knows(each, engine, [LONG, prompt(21, 2)])
            client.call("CLEAR", m.Clear())
            for each in (llmd, late):
                knows(each, engine, [LONG, prompt(21, 2)])


def test_a_server_without_its_ledger_is_cleared_and_asked() -> None:
    with TellingServer() as server, LlmD(*sockets(server)) as llmd:
        aged(server, 20_000)
        with server.client() as client:
            engine = Engine(client)
            for tokens in (LONG, prompt(11, 1), prompt(21, 1)):
                engine.store(tokens)
                knows(llmd, engine, [LONG, prompt(11, 1), prompt(21, 1)])
        server.kill9()
        for file in ledgers(server):
            file.unlink()
        server.start()
        with server.client() as client:
            engine = Engine(client)
            engine.store(prompt(31, 1))
            knows(llmd, engine, [LONG, prompt(11, 1), prompt(21, 1), prompt(31, 1)])


def test_its_index_is_l1_after_churn() -> None:
    dice = random.Random(23)
    prompts = [prompt(number, dice.randint(1, 4)) for number in range(100, 160)]
    losing = False
    with TellingServer(objects=36) as server, server.client() as one, server.client() as other:
        told, again = sockets(server)
        with (
            Between(told, lambda frames: None if losing and dice.random() < 0.5 else frames) as between,
            LlmD(between.endpoint, again) as llmd,
        ):
            engines = [Engine(one, 1), Engine(other, 2)]
            losing = True
            for _ in range(400):
                engine, tokens = dice.choice(engines), dice.choice(prompts)
                if dice.random() < 0.7:
                    engine.store(tokens)
                elif not engine.load(tokens) and dice.random() < 0.05:
                    one.call("CLEAR", m.Clear())
            losing = False
            held = found(engines[0], prompts)
            # Prompts that part within a chunk share the blocks before.
            hits = [
                max((n for n in range(0, len(tokens) + 1, BLOCK) if held >= beginnings(tokens, n)), default=0)
                for tokens in prompts
            ]
            llmd.until(lambda: [llmd.matched(tokens) for tokens in prompts] == hits)
            assert between.lost

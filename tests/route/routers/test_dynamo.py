"""Dynamo's indexer knows what a server holds, case by case; and why events are made as they are: what it does with
others."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import pytest

from kvframework.api.keys import ChunkContent
from kvframework.wire import messages as m
from tests.events.node import BLOCK, CHUNK, Engine, beginnings, found, packed, prompt
from tests.events.test_announced import TellingServer
from tests.events.test_restart import HeldTellingServer, aged, ledgers
from tests.route.routers.dynamo import Dynamo, blocks_of
from tests.route.routers.stream import Between, Frames, OwnEvents, changed, sockets
from tests.support.server_process import ServerProcess
from tests.support.waiting import wait_until
from tests.support.wire_client import WireClient, key_for

LONG = prompt(1, 4)
END = len(LONG)
# As many objects as the smallest L1 has.
OBJECTS = 32


def knows(dynamo: Dynamo, held: set[tuple[int, ...]], *instances: int) -> None:
    """Wait until workers are credited with the held beginnings of prompts, and with nothing else."""
    for instance in instances or (1,):
        dynamo.until(lambda instance=instance: dynamo.blocks(instance=instance) == blocks_of(held))  # type: ignore[misc]


@pytest.mark.parametrize("form", ["map", "array"])
def test_chunks_are_credited_as_blocks_to_both_engines_of_a_node(dynamo: Dynamo, form: str) -> None:
    tokens = list(range(1024))
    server = TellingServer(block_size=16, format=form)
    server.set("server.chunk_size=256")
    with server, server.client() as client:
        for rank, instance in enumerate((1, 2)):
            dynamo.register(*sockets(server), instance=instance, rank=rank, block=16)
        client.store(key_for(client.register(), tokens), b"kv")
        for instance in (1, 2):
            dynamo.until(lambda instance=instance: dynamo.matched(tokens, instance=instance) == 1024)  # type: ignore[misc]
        assert len(dynamo.blocks()) == 64
        assert dynamo.matched([*tokens[:500], *range(500)]) == 496


def loaded(client: WireClient, engine: Engine, tokens: list[int], start: int) -> bool:
    plan = client.prepare_retrieve(engine.key(tokens, start))
    if plan.hit:
        client.call("COMMIT_RETRIEVE", m.Commit(plan.lease))
    return bool(plan.hit)


def test_the_last_chunk_is_evicted_then_the_first_then_it_is_stored_again(dynamo: Dynamo) -> None:
    with TellingServer(objects=OBJECTS) as server, server.client() as client:
        dynamo.register(*sockets(server))
        engine = Engine(client)
        engine.store(LONG)
        others = [prompt(11 + 10 * each, 1) for each in range(OBJECTS - len(LONG) // CHUNK)]
        for tokens in others:
            engine.store(tokens)
        knows(dynamo, found(engine, [LONG, *others]))
        assert dynamo.matched(LONG) == END
        engine.store(prompt(1001, 1))
        dynamo.until(lambda: dynamo.matched(LONG) == END - CHUNK)
        # All are used but the first.
        assert loaded(client, engine, LONG[:-CHUNK], CHUNK)
        for tokens in others:
            assert engine.load(tokens)
        engine.store(prompt(2001, 1))
        dynamo.until(lambda: dynamo.matched(LONG) == 0)
        assert loaded(client, engine, LONG[:-CHUNK], CHUNK), "what follows is there and no hit"
        engine.store(LONG[:-CHUNK])
        dynamo.until(lambda: dynamo.matched(LONG) == END - CHUNK)
        assert engine.hit(LONG) == END - CHUNK


def test_a_suffix_counts_once_its_prefix_comes(dynamo: Dynamo) -> None:
    with TellingServer() as server, server.client() as client:
        dynamo.register(*sockets(server))
        engine = Engine(client)
        engine.store(LONG, 2 * CHUNK)
        engine.store(prompt(11, 1))
        knows(dynamo, beginnings(prompt(11, 1)))
        engine.store(LONG[: 2 * CHUNK])
        dynamo.until(lambda: dynamo.matched(LONG) == END)


def test_what_two_engines_store_is_gone_once_it_is_cleared(dynamo: Dynamo) -> None:
    with TellingServer() as server, server.client() as one, server.client() as other:
        dynamo.register(*sockets(server))
        engines = [Engine(one, 1), Engine(other, 2)]
        for engine in engines:
            engine.store(LONG)
            engine.store(prompt(2, 3))
        knows(dynamo, beginnings(LONG) | beginnings(prompt(2, 3)))
        one.call("CLEAR", m.Clear())
        knows(dynamo, set())
        assert dynamo.matched(LONG) == 0


def test_a_salt_is_withheld(dynamo: Dynamo) -> None:
    with TellingServer() as server, server.client() as client:
        dynamo.register(*sockets(server))
        engine = Engine(client)
        engine.store(LONG, salt="acme")
        engine.store(prompt(11, 1))
        knows(dynamo, beginnings(prompt(11, 1)))


@pytest.mark.parametrize("form", ["map", "array"])
def test_a_told_salt_hits_with_it_alone(dynamo: Dynamo, form: str) -> None:
    with TellingServer(salted="tell", format=form) as server, server.client() as client:
        dynamo.register(*sockets(server))
        Engine(client).store(LONG, salt="acme")
        dynamo.until(lambda: dynamo.matched(LONG, cache_salt="acme") == END)
        assert dynamo.matched(LONG) == dynamo.matched(LONG, cache_salt="other") == 0


@pytest.mark.parametrize("form", ["map", "array"])
def test_an_adapter_hits_with_its_name_alone(dynamo: Dynamo, form: str) -> None:
    with TellingServer(format=form) as server, server.client() as client:
        dynamo.register(*sockets(server))
        Engine(client).store(LONG, content=ChunkContent(packed(LONG), lora_name="poet"))
        dynamo.until(lambda: dynamo.matched(LONG, lora_name="poet") == END)
        assert dynamo.matched(LONG) == dynamo.matched(LONG, lora_name="cook") == 0


def test_what_only_a_tier_has_is_on_disk(dynamo: Dynamo, tmp_path: Path) -> None:
    disk = ("l2.0.use=filesystem", f"l2.0.path={tmp_path / 'l2'}", "l2.0.capacity=1GiB")
    with TellingServer(*disk) as server, server.client() as client:
        dynamo.register(*sockets(server))
        Engine(client).store(LONG)
        dynamo.until(lambda: dynamo.blocks("disk") == blocks_of(beginnings(LONG)))
        client.call("CLEAR", m.Clear())
        knows(dynamo, set())
        assert dynamo.matched(LONG, "cpu") == 0
        assert dynamo.matched(LONG, "disk") == END
        client.call("CLEAR", m.Clear(l2=True))
        dynamo.until(lambda: dynamo.matched(LONG, "disk") == 0)


def test_a_nodes_stream_stands_beside_the_engines_own(dynamo: Dynamo) -> None:
    """The engine's hashes name the blocks of both."""
    hashes = range(1000, 1000 + END // BLOCK)
    half = END // 2
    with TellingServer() as server, server.client() as client, OwnEvents() as own:
        dynamo.register(own.endpoint, "", rank=0)
        dynamo.register(*sockets(server), rank=1)
        own.subscribed()
        own.stored(LONG[:half], hashes[: half // BLOCK], BLOCK)
        named = struct.pack(f"<{len(hashes)}Q", *hashes)
        Engine(client).store(LONG, content=ChunkContent(packed(LONG), block_size=BLOCK, hashes=named))
        dynamo.until(lambda: (dynamo.matched(LONG, "gpu"), dynamo.matched(LONG)) == (half, END))
        client.call("CLEAR", m.Clear())
        dynamo.until(lambda: (dynamo.matched(LONG, "gpu"), dynamo.matched(LONG)) == (half, half))


def remote(event: dict[str, Any]) -> dict[str, Any]:
    return event | {"locality": "REMOTE"}


def wide_hashes(event: dict[str, Any]) -> dict[str, Any]:
    return event | {"block_hashes": [each.to_bytes(32, "big") for each in event["block_hashes"]]}


def long_blocks(event: dict[str, Any]) -> dict[str, Any]:
    return event | {"block_hashes": event["block_hashes"][-1:], "block_size": len(event["token_ids"])}


@pytest.mark.parametrize("change", [remote, wide_hashes, long_blocks])
def test_dynamo_drops(dynamo: Dynamo, change: Any) -> None:
    """So no locality is told, hashes are numbers, and blocks are of the router's size."""

    def of_one_prompt(frames: Frames) -> Frames:
        return changed(frames, lambda event: change(event) if event.get("token_ids", [])[:1] == LONG[:1] else event)

    with TellingServer() as server, server.client() as client:
        told, _ = sockets(server)
        with Between(told, of_one_prompt) as between:
            dynamo.register(between.endpoint, "")
            engine = Engine(client)
            wait_until(lambda: client.status()["events"]["counters"]["subscribers"] == 1, what="a subscriber")
            engine.store(LONG[:CHUNK])
            wait_until(lambda: client.status()["events"]["blocks"]["CPU"] == CHUNK // BLOCK, what="the blocks")
            engine.store(prompt(11, 1))
            knows(dynamo, beginnings(prompt(11, 1)))


def test_dynamo_takes_a_plain_extra_key_for_none(dynamo: Dynamo) -> None:
    """So a salt is told under its tag, or withheld: this hit is false."""

    def plain(event: dict[str, Any]) -> dict[str, Any]:
        return {
            **{name: value for name, value in event.items() if name != "cache_salt"},
            "extra_keys": [["acme"], *event["extra_keys"][1:]],
        }

    with TellingServer(salted="tell") as server, server.client() as client:
        told, _ = sockets(server)
        with Between(told, lambda frames: changed(frames, plain)) as between:
            dynamo.register(between.endpoint, "")
            wait_until(lambda: client.status()["events"]["counters"]["subscribers"] == 1, what="a subscriber")
            Engine(client).store(LONG, salt="acme")
            dynamo.until(lambda: dynamo.matched(LONG) == END)


@pytest.mark.parametrize("is_last", [False, True], ids=["others follow", "nothing else happens"])
def test_a_lost_batch_is_healed_by_replay(dynamo: Dynamo, is_last: bool) -> None:
    losing = False
    with TellingServer() as server, server.client() as client:
        told, again = sockets(server)
        with Between(told, lambda frames: None if losing else frames) as between:
            dynamo.register(between.endpoint, again)
            engine = Engine(client)
            engine.store(prompt(11, 1))
            knows(dynamo, beginnings(prompt(11, 1)))
            losing = True
            engine.store(LONG)
            wait_until(lambda: between.lost, what="a lost message")
            if not is_last:
                client.call("CLEAR", m.Clear())
                wait_until(lambda: client.status()["events"]["blocks"]["CPU"] == 0, what="the removal")
                engine.store(LONG)
                wait_until(lambda: between.lost > 2, what="further lost messages")
            losing = False
            if not is_last:
                engine.store(prompt(21, 1))
            knows(dynamo, beginnings(LONG) | beginnings(prompt(11 if is_last else 21, 1)))


def test_what_is_handed_over_to_another_server_stays_credited(dynamo: Dynamo) -> None:
    with TellingServer() as server:
        dynamo.register(*sockets(server))
        with server.client() as client:
            Engine(client).store(LONG)
            knows(dynamo, beginnings(LONG))
        assert server.take_over() == 0
        with server.client() as client:
            Engine(client).store(prompt(11, 1))
            knows(dynamo, beginnings(LONG) | beginnings(prompt(11, 1)))
        server.stop()
        server.start()
        knows(dynamo, set())


def test_a_late_router_takes_the_whole_history(dynamo: Dynamo) -> None:
    with TellingServer() as server, server.client() as client:
        engine = Engine(client)
        for number, tokens in enumerate((prompt(11, 2), LONG), 1):
            engine.store(tokens)
            wait_until(lambda number=number: client.status()["events"]["counters"]["batches"] > number, what="a batch")
        dynamo.register(*sockets(server))
        knows(dynamo, beginnings(LONG) | beginnings(prompt(11, 2)))


@pytest.mark.parametrize("number", [20_000, 100_000])
def test_a_late_router_is_given_the_state_and_each_number(dynamo: Dynamo, number: int) -> None:
    """What the earliest messages said is no longer remembered as they said it."""
    with TellingServer() as server:
        aged(server, number)
        with server.client() as client:
            engine = Engine(client)
            engine.store(LONG)
            dynamo.register(*sockets(server))
            knows(dynamo, beginnings(LONG))
            assert client.status()["events"]["next_number"] > number
            engine.store(prompt(11, 2))
            knows(dynamo, beginnings(LONG) | beginnings(prompt(11, 2)))


@pytest.mark.parametrize("stop", [ServerProcess.stop, ServerProcess.kill9])
def test_a_cold_start_removes_what_is_gone_and_its_news_count(dynamo: Dynamo, stop: Any) -> None:
    with TellingServer() as server:
        dynamo.register(*sockets(server))
        for tokens in (LONG, prompt(11, 2), LONG):
            with server.client() as client:
                Engine(client).store(tokens)
                knows(dynamo, beginnings(tokens))
            stop(server)
            server.start()
            knows(dynamo, set())


def test_a_killed_server_whose_l1_is_kept_stays_credited(dynamo: Dynamo) -> None:
    with HeldTellingServer() as server:
        dynamo.register(*sockets(server))
        with server.client() as client:
            engine = Engine(client)
            engine.store(LONG)
            engine.store(prompt(11, 2), salt="acme")
            knows(dynamo, beginnings(LONG))
        pid = server.pid
        server.kill9()
        server.serving(pid)
        with server.client() as client:
            engine = Engine(client)
            assert engine.hit(LONG) == END
            engine.store(prompt(21, 2))
            knows(dynamo, beginnings(LONG) | beginnings(prompt(21, 2)))
            dynamo.register(*sockets(server), instance=2, rank=1)
            knows(dynamo, beginnings(LONG) | beginnings(prompt(21, 2)), 1, 2)
            client.call("CLEAR", m.Clear())
            knows(dynamo, set(), 1, 2)


def test_a_server_without_its_ledger_has_to_be_registered_again(dynamo: Dynamo) -> None:
    """Numbers that begin again are ignored, and what was credited stays: a fact about Dynamo, told in the page."""
    with TellingServer() as server:
        dynamo.register(*sockets(server))
        with server.client() as client:
            engine = Engine(client)
            for tokens in (LONG, prompt(11, 1), prompt(21, 1)):
                engine.store(tokens)
                knows(dynamo, found(engine, [LONG, prompt(11, 1), prompt(21, 1)]))
        server.kill9()
        for file in ledgers(server):
            file.unlink()
        server.start()
        with server.client() as client:
            Engine(client).store(prompt(31, 1))
            wait_until(lambda: client.status()["events"]["blocks"]["CPU"] == CHUNK // BLOCK, what="the blocks")
            assert dynamo.matched(LONG) == END
            dynamo.unregister()
            dynamo.register(*sockets(server))
            knows(dynamo, beginnings(prompt(31, 1)))

"""An S3 server is killed, frozen, refuses, and holds what nobody stored: a miss at worst, never a wrong byte, no store
that fails, no LOOKUP that waits."""

from __future__ import annotations

import random
import struct
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from kvf_s3 import Address
from kvframework.wire import messages as m
from tests.core.tiers.damage import KINDS, damaged
from tests.core.tiers.engine import Engine
from tests.core.tiers.engines import SMALL_L1, Engines
from tests.core.tiers.nodes import await_count, await_rest, await_state, await_written, count, tier
from tests.core.tiers.prompts import object_key, overlapping, prompt
from tests.support.s3_peer import Answer, S3Peer
from tests.support.s3_server import BUCKET, S3Server, SeaweedServer, s3_store
from tests.support.s3_tier import write_credentials
from tests.support.server_process import ServerProcess
from tests.support.waiting import wait_until

obstore: Any = pytest.importorskip("obstore", reason="obstore is not installed")

URL = f"s3://{BUCKET}/fleet"
ADDRESS = Address.parse(URL)
TIMEOUT_S = 2.0
# A LOOKUP that waited for the store would take TIMEOUT_S at least.
BOUND_S = TIMEOUT_S / 2
BYTEWISE = [kind for kind in KINDS if kind not in ("wrong type", "swapped")]


@pytest.fixture
def weed(tmp_path: Path) -> Iterator[S3Server]:
    with SeaweedServer(tmp_path) as server:
        yield server


@pytest.fixture
def nodes(weed: S3Server, tmp_path: Path) -> Iterator[list[ServerProcess]]:
    with ExitStack() as stack:
        yield [stack.enter_context(node(weed.endpoint, write_credentials(tmp_path / "credentials"))) for _ in range(2)]


def node(endpoint: str, credentials: Path | None, *settings: str) -> ServerProcess:
    own = f"l2.0.credentials_file={credentials}" if credentials else "l2.0.anonymous=true"
    where = ("l2.0.use=s3", f"l2.0.url={URL}", f"l2.0.endpoint={endpoint}", own, f"l2.0.timeout_s={TIMEOUT_S}")
    return ServerProcess(*where, "server.ticket_s=1800", *settings, capacity=SMALL_L1)


@pytest.mark.timeout(600)
def test_faults_of_the_store_harm_nobody(weed: S3Server, nodes: list[ServerProcess], seed: int) -> None:
    chance = random.Random(f"{seed}/faults")
    with ExitStack() as stack:
        here, there = (stack.enter_context(Engine(each.endpoint)) for each in nodes)
        engines = stack.enter_context(Engines([each.endpoint for each in (*nodes, *nodes)], seed=seed))
        kept = prompt([10**7, 10**7 + 1])
        here.store(kept)
        pinned = here.look_up(kept)
        assert pinned.hit_tokens == 512
        names = [
            ADDRESS.name_of(object_key(here.namespace, digest))
            for digest in sorted({digest for each in overlapping(seed) for digest in each.digests})
        ]

        def working() -> None:
            """The engines have stored and loaded something since, by both servers."""
            engines.check()
            before = [(each.client, count(each.client, "hits"), count(each.client, "stored")) for each in (here, there)]
            for client, hits, stored in before:
                await_count(client, "hits", hits + 20)
                await_count(client, "stored", stored + 1)

        working()
        for fault in ("kill", "damage", "stall"):
            if fault == "damage":
                _damage_some(weed, names, chance)
            elif fault == "kill":
                weed.kill9()
            else:
                weed.sigstop()
            if fault != "damage":
                for each in (here, there):
                    await_state(each.client, "down")
                for _ in range(20):
                    reply = here.look_up(kept)
                    assert reply.hit_tokens == 512
                    assert here.retrieve(kept, 2)
                    here.free(reply)
                weed.sigcont() if fault == "stall" else weed.start()
            for each in (here, there):
                await_state(each.client, "closed")
            working()
        wait_until(lambda: count(here.client, "corrupt") + count(there.client, "corrupt") > 0, 60, "damage to be found")
        reports = engines.stop()
        assert all(report.rounds > 10 and report.chunks_checked > 0 for report in reports)
        assert max(report.slowest_lookup_s for report in reports) < BOUND_S
        assert here.slowest_lookup_s < BOUND_S
        fresh = prompt([10**8, 10**8 + 1])
        here.store(fresh)
        await_written(here.client)
        assert there.load(fresh) == len(fresh)
        here.free(pinned)
        for each in (here, there):
            each.client.call("END_SESSION", m.EndSession())
            await_rest(each.client)


def test_what_nobody_stored_is_a_miss_is_counted_and_is_deleted(
    weed: S3Server, nodes: list[ServerProcess], seed: int
) -> None:
    chance = random.Random(f"{seed}/damage")
    store = s3_store(weed)
    kinds = (*BYTEWISE, "another release")
    prompts = {kind: prompt([1000 * number + chunk for chunk in range(6)]) for number, kind in enumerate(kinds)}
    # Strangers' objects lie below the prefix and beside it.
    for name in ("fleet/readme.txt", "fleet/00/readme", "fleet/kvframework-sweep", "other/data"):
        obstore.put(store, name, b"of a stranger")
    with Engine(nodes[0].endpoint) as here, Engine(nodes[1].endpoint) as there:
        for each in prompts.values():
            here.store(each)
        await_written(here.client)
        for kind, each in prompts.items():
            name = ADDRESS.name_of(object_key(here.namespace, each.digests[3]))
            value = bytes(obstore.get(store, name).bytes())
            if kind == "another release":
                # The format's number, behind the magic.
                value = value[:4] + struct.pack("<H", 77) + value[6:]
            else:
                value = damaged(value, kind, chance)
            obstore.put(store, name, value, use_multipart=False)
            before = count(there.client, "corrupt")
            assert there.load(each) == 3, kind
            assert count(there.client, "corrupt") == before + 1, kind
            with pytest.raises(FileNotFoundError):
                obstore.head(store, name)
        assert tier(there.client)["state"] == "closed", "what is damaged is no failure of the tier"
    assert bytes(obstore.get(store, "fleet/readme.txt").bytes()) == b"of a stranger"


def test_wrong_credentials_are_a_typed_error_and_cost_no_engine_anything(weed: S3Server, tmp_path: Path) -> None:
    wrong = write_credentials(tmp_path / "wrong", secret="hunter2-wrong-secret")
    own = prompt([1, 2, 3])
    with node(weed.endpoint, wrong) as server, Engine(server.endpoint) as engine:
        assert engine.store(own).stored == 3
        await_state(engine.client, "down")
        assert engine.load(own) == 3
        assert engine.load(prompt([7, 8])) == 0
        assert engine.slowest_lookup_s < BOUND_S
        assert "the store refuses the secret key" in tier(engine.client)["last_error"]
        assert "the store refuses the secret key" in server.log
        assert "hunter2" not in server.log + str(engine.client.status())
        # They are mended, and read again after five minutes; a new server reads them at once.
    with node(weed.endpoint, write_credentials(wrong)) as server, Engine(server.endpoint) as engine:
        engine.store(own)
        await_written(engine.client)
        assert tier(engine.client)["state"] == "closed"


@pytest.mark.parametrize(
    ("status", "code", "said"),
    [
        (507, "InsufficientStorage", "the store is full (InsufficientStorage)"),
        (403, "RequestTimeTooSkewed", "the clocks of the store and of this machine differ"),
    ],
)
def test_a_refusal_of_writes_is_said_and_what_is_there_stays_a_hit(status: int, code: str, said: str) -> None:
    first, second = prompt([1, 2, 3]), prompt([4, 5, 6])
    with S3Peer(BUCKET) as peer, node(peer.endpoint, None) as server, Engine(server.endpoint) as engine:
        engine.store(first)
        await_written(engine.client)
        peer.script = lambda method, _path: Answer(status, code) if method == "PUT" else None
        assert engine.store(second).stored == 3
        wait_until(lambda: said in server.log, what="the log to say it")
        engine.clear()
        assert engine.load(first) == 3
        assert count(engine.client, "store_failed") + count(engine.client, "errors") > 0
        engine.load(second)
        assert engine.slowest_lookup_s < BOUND_S


def test_one_server_of_the_fleet_keeps_the_capacity_and_another_takes_over(weed: S3Server, tmp_path: Path) -> None:
    credentials = write_credentials(tmp_path / "credentials")
    settings = ("l2.0.capacity=1MiB", "l2.0.sweep_s=1")
    store, lease = s3_store(weed), "fleet/kvframework-sweep"

    def nbytes() -> int:
        values = [each for page in obstore.list(store, prefix="fleet/") for each in page if each["path"] != lease]
        return sum(each["size"] for each in values)

    def owner() -> bytes:
        return bytes(obstore.get(store, lease).bytes())[:16]

    with node(weed.endpoint, credentials, *settings) as here:
        with Engine(here.endpoint) as engine:
            engine.store(prompt(range(60)))
            await_written(engine.client)
            wait_until(lambda: 0 < nbytes() <= 1 << 20, 60, "the sweep")
            assert nbytes() > 1 << 19, "it takes no more than it must"
        first = owner()
        with node(weed.endpoint, credentials, *settings) as there, Engine(there.endpoint) as engine:
            engine.load(prompt([1, 2]))
            assert owner() == first
            here.kill9()
            engine.store(prompt(range(5000, 5060)))
            await_written(engine.client)
            wait_until(lambda: owner() != first, 60, "the lease to be taken over")
            wait_until(lambda: nbytes() <= 1 << 20, 60, "the sweep by the server that lives")


def _damage_some(weed: S3Server, names: list[str], chance: random.Random) -> None:
    store = s3_store(weed)
    for name in chance.sample(names, 60):
        try:
            value = bytes(obstore.get(store, name).bytes())
        except FileNotFoundError:
            continue
        obstore.put(store, name, damaged(value, chance.choice(BYTEWISE), chance), use_multipart=False)

"""Keys by group in what a server tells: why a lookup missed, whose it was, its trace, and the price that cut it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvframework.api.keys import tenant_digest
from kvframework.client import EngineSpeed, KVClient, OpaqueInstance, OpaqueObjects, Prompt
from kvframework.wire import messages as m
from tests.core.client.test_opaque import SIZES, found, groups, instance, store
from tests.support.server_process import ServerProcess, client_fixture
from tests.support.waiting import wait_until
from tests.support.wire_client import WireClient

__all__ = ["instance"]
PARENT = f"00-{'ab' * 16}-{'cd' * 8}-01"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("l2")


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[ServerProcess]:
    disk = ("l2.0.use=filesystem", f"l2.0.path={folder}", "l2.0.capacity=1GiB")
    with ServerProcess(*disk, f"tenants.one.salts=['{tenant_digest('of one')}']", capacity="8MiB") as up:
        yield up


client = client_fixture(engine=True)


teller = client_fixture()


def asked(teller: WireClient, instance: OpaqueInstance, prompt: str, end: int = 64, **fields: Any) -> m.Finished:
    reply = instance.lookup(Prompt(f"look up {prompt}", 0, end, **fields), groups(prompt, end)).result(20)
    while reply.pending:
        reply = instance.ask_again(reply.ticket, wait_s=1.0).result(20)
    instance.release(reply.ticket, *[grant.lease for grant in reply.grants])
    record = [each for each in teller.call("RECENT", m.Recent(0)).records if each.request == "LOOKUP"][-1]
    assert (record.request_id, record.asked_tokens) == (f"look up {prompt}", end)
    return record


def written(teller: WireClient) -> None:
    wait_until(lambda: not teller.status()["l2"][0]["write_pending"], what="the disk")


def test_a_miss_is_told_with_its_token(teller: WireClient, instance: OpaqueInstance) -> None:
    record = asked(teller, instance, "new", trace=PARENT)
    assert (record.reason, record.outcome, record.missing) == ("never_stored", "miss", 0)
    assert record.trace == PARENT
    store(instance, "half", 64, {0: range(4), 1: range(8), 2: [0]})
    record = asked(teller, instance, "half")
    # The state after 64 tokens lacks: its chunk begins at token 32.
    assert (record.reason, record.outcome, record.l1_tokens, record.missing) == ("never_stored", "partial", 32, 32)


def test_another_salt_or_namespace_is_told(teller: WireClient, client: KVClient, instance: OpaqueInstance) -> None:
    store(instance, "known", 64)
    record = asked(teller, instance, "known", cache_salt="of one")
    assert (record.reason, record.detail) == ("other_salt", "stored without a salt, asked with one")
    assert record.tenant == "one"
    other = OpaqueInstance(client, OpaqueObjects(6, "tiny", SIZES, 8, "test-blocks", revision="2"))
    wait_until(lambda: other.is_ready, 20, "the registration")
    record = asked(teller, other, "known")
    assert (record.reason, record.detail) == (
        "other_namespace",
        "stored with other weights, revision, quantisation or packing",
    )
    other.close()


def test_both_tiers_of_a_hit_and_its_load_are_told(
    teller: WireClient, client: KVClient, instance: OpaqueInstance
) -> None:
    store(instance, "both", 64)
    written(teller)
    teller.call("CLEAR", m.Clear())
    store(instance, "both", 32)
    record = asked(teller, instance, "both")
    assert (record.outcome, record.l1_tokens, record.l2_tokens, record.reason) == ("hit", 32, 32, "")
    assert found(client, instance, "both", 64)[0] == 64
    wait_until(lambda: teller.call("RECENT", m.Recent(0)).records[-1].request == "RETRIEVE", 20, "the load")
    load = teller.call("RECENT", m.Recent(0)).records[-1]
    assert (load.outcome, load.objects, load.nbytes) == ("hit", 8, 4 * 4096 + 3 * 8192 + 12000)


def test_a_hit_is_cut_where_the_engine_is_quicker(tmp_path: Path) -> None:
    """Full attention alone: it may end at each of its chunks."""
    disk = ("l2.0.use=filesystem", f"l2.0.path={tmp_path}", "l2.0.capacity=1GiB", "server.price=true")
    with ServerProcess(*disk, capacity="64MiB") as server, server.client() as teller, server.engine_client() as client:
        made = OpaqueInstance(client, OpaqueObjects(5, "tiny", SIZES[:1], 16, "test-blocks"))
        wait_until(lambda: made.is_ready, 20, "the registration")
        quick, slow = EngineSpeed(1e9, 0.0, 0.0), EngineSpeed(1.0, 0.0, 0.0)

        def ask(prompt: str, speed: EngineSpeed) -> int:
            keys = groups(prompt, 512)[:1]
            reply = made.lookup(Prompt(prompt, 0, 512), keys, speed=speed).result(20)
            while reply.pending:
                reply = made.ask_again(reply.ticket, wait_s=1.0).result(20)
            made.release(reply.ticket, *[grant.lease for grant in reply.grants])
            return reply.hit_tokens

        for number in range(12):
            keys = groups(str(number), 512)[:1]
            with made.prepare_store(Prompt(str(number), 0, 512), keys).result(20) as plan:
                assert plan.commit().result(20).ok
        written(teller)
        teller.call("CLEAR", m.Clear())
        assert [ask(str(number), slow) for number in range(8)] == [512] * 8
        assert 0 <= ask("8", quick) < 512
        record = [each for each in teller.call("RECENT", m.Recent(0)).records if each.request_id == "8"][-1]
        assert record.reason == "priced"
        assert teller.status()["price"]["cut"] == 1

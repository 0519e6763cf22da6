"""`kvframework clear --tenant` and its kin: no byte of what was planted is left in L1, in the folder of a tier, or in a
real Redis; what others have stays; and the receipt says what could not be deleted."""

from __future__ import annotations

import array
import json
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from kvf_hashers.sha256 import Sha256
from kvframework.api.hasher import KeyHasher
from kvframework.api.keys import tenant_digest
from kvframework.client import Forget, StatusSource
from kvframework.wire import messages as m
from tests.core.cli.command import run
from tests.support.redis_server import RedisServer
from tests.support.server_process import ServerProcess
from tests.support.waiting import wait_until
from tests.support.wire_client import WireClient, key_for

pytestmark = pytest.mark.redis
CHUNKS = 4
TOKENS = list(range(256 * CHUNKS))
OTHER_TOKENS = list(range(5000, 5000 + 256 * CHUNKS))
SALTS = {"acme": "the salt of acme", "umbra": "the salt of umbra"}
PLANTED = {"acme": b"<acme's planted>", "umbra": b"[umbra: planted]", "": b"{nobody's plant}"}
HASHER: KeyHasher = Sha256()


class Places:
    """A server with a folder and a Redis behind it, and what is to be found in all of them."""

    def __init__(self, server: ServerProcess, folder: Path, redis: RedisServer) -> None:
        self.server, self.folder, self.redis = server, folder, redis

    def plant(self, who: str, tokens: Sequence[int] = TOKENS, **fields: Any) -> None:
        """Store chunks filled with the words of `who`, and wait until both tiers have them."""
        with self.server.client() as client:
            registered = client.register()
            client.store(key_for(registered, tokens, cache_salt=SALTS.get(who, ""), **fields), PLANTED[who])
            written(client)

    def hit(self, who: str, tokens: Sequence[int] = TOKENS) -> int:
        with self.server.client() as client:
            return client.hit(key_for(client.register(), tokens, cache_salt=SALTS.get(who, "")))

    def found(self, who: str) -> dict[str, int]:
        """How often the words of `who` occur in each place, in all of its bytes."""
        words = PLANTED[who]
        with self.server.client() as client:
            assert client.arena is not None
            l1 = client.arena[:].count(words)
        files = [path.read_bytes() for path in self.folder.rglob("*") if path.is_file()]
        with self.redis.client() as store:
            values = [store.dump(key) or b"" for key in store.scan_iter(b"*")]
        return {"L1": l1, "folder": contained(files, words), "redis": contained(values, words)}


def contained(values: Sequence[bytes], words: bytes) -> int:
    return sum(value.count(words) for value in values)


def written(client: WireClient) -> None:
    wait_until(lambda: not any(tier["write_pending"] for tier in client.status()["l2"]), what="the writes to L2")


@pytest.fixture
def places(tmp_path: Path) -> Iterator[Places]:
    folder = tmp_path / "l2"
    tenants = [f'tenants.{name}.salts=["{tenant_digest(salt)}"]' for name, salt in SALTS.items()]
    with RedisServer(tmp_path) as redis:
        with redis.client() as store:
            store.config_set("rdbcompression", "no")  # of DUMP
        tiers = ("l2.0.use=filesystem", f"l2.0.path={folder}", "l2.1.use=redis", f"l2.1.url={redis.url}")
        with ServerProcess(*tiers, *tenants) as server:
            yield Places(server, folder, redis)


def clear(places: Places, *arguments: str, status: int = 0, stdin: str | None = None) -> dict[str, Any]:
    done = run("clear", "--yes", "--json", "--endpoint", places.server.endpoint, *arguments)
    assert (done.returncode, done.stderr) == (status, "")
    receipt: dict[str, Any] = json.loads(done.stdout)
    return receipt


def by_place(receipt: dict[str, Any]) -> dict[str, tuple[int, int]]:
    return {place["place"]: (place.get("objects", 0), place.get("left", 0)) for place in receipt["places"]}


NOWHERE = {"L1": 0, "folder": 0, "redis": 0}


def test_no_byte_of_a_tenant_is_left_anywhere(places: Places) -> None:
    places.plant("acme")
    places.plant("acme", OTHER_TOKENS)
    places.plant("umbra")
    places.plant("")
    assert all(places.found(who)[place] > 1000 for who in PLANTED for place in NOWHERE)
    # Objects that left L1 before still lie in its free memory.
    with places.server.client() as client:
        client.call("CLEAR", m.Clear())
    assert places.found("acme")["L1"] > 1000
    assert places.hit("umbra") == len(TOKENS)
    receipt = clear(places, "--tenant", "acme")
    assert by_place(receipt) == {"L1": (0, 0), "filesystem": (2 * CHUNKS, 0), "redis": (2 * CHUNKS, 0)}
    assert receipt["erased_bytes"] > 0
    assert places.found("acme") == NOWHERE
    assert min(places.found("umbra").values()) > 1000
    assert [places.hit(who) for who in PLANTED] == [0, len(TOKENS), len(TOKENS)]
    assert places.server.status()["l1"]["counters"]["forgotten"] == 4 * CHUNKS
    assert "deleted the KV of the tenant acme" in places.server.log
    assert not any(salt in places.server.log for salt in SALTS.values())


def test_a_tenant_after_a_restart_is_found_by_its_salts(places: Places, tmp_path: Path) -> None:
    """A restarted server does not know whose a salt in a tier's key is, says so, and is told."""
    places.plant("acme")
    places.plant("umbra")
    places.server.kill9()
    places.server.start()
    blind = clear(places, "--tenant", "acme")
    assert (by_place(blind)["redis"], blind["unknown_salts"]) == ((0, 0), 2)
    file = tmp_path / "salts"
    file.write_text(SALTS["umbra"] + "\n")
    refused = run("clear", "--yes", "--endpoint", places.server.endpoint, "--tenant", "acme", "--salts", str(file))
    assert refused.returncode == 2
    assert "does not belong to the tenant" in refused.stderr
    assert SALTS["umbra"] not in refused.stderr
    file.write_text(SALTS["acme"] + "\n")
    told = clear(places, "--tenant", "acme", "--salts", str(file))
    assert (by_place(told)["redis"], by_place(told)["filesystem"]) == ((CHUNKS, 0), (CHUNKS, 0))
    assert places.found("acme") == NOWHERE
    assert places.hit("umbra") == len(TOKENS)


def test_a_conversation_takes_all_of_its_turns_along(places: Places) -> None:
    """Also what a request stored whose lookup named less, and the run of a subagent; others keep theirs."""
    with places.server.client() as client:
        registered = client.register()
        turn = key_for(registered, TOKENS[:512], cache_salt=SALTS["acme"], conversation="case 17")
        assert client.hit(turn) == 0
        client.store(key_for(registered, TOKENS, cache_salt=SALTS["acme"], conversation="case 17"), PLANTED["acme"])
        subagent = key_for(registered, OTHER_TOKENS, cache_salt=SALTS["acme"], conversation="case 17")
        client.store(subagent, PLANTED["acme"])
        client.store(key_for(registered, [7] * 512, conversation="case 18"), PLANTED[""])
        written(client)
    receipt = clear(places, "--conversation", "case 17")
    assert by_place(receipt) == dict.fromkeys(("L1", "filesystem", "redis"), (2 * CHUNKS, 0))
    assert places.found("acme") == NOWHERE
    assert places.hit("", [7] * 512) == 512
    gone = run("clear", "--yes", "--endpoint", places.server.endpoint, "--conversation", "case 17")
    assert gone.returncode == 2
    assert "no request since the server's start has named this conversation" in gone.stderr
    assert "case 17" not in places.server.log


def test_a_prompt_is_found_by_its_tokens_under_every_salt(places: Places, tmp_path: Path) -> None:
    places.plant("acme")
    places.plant("umbra")
    places.plant("", OTHER_TOKENS)
    file = tmp_path / "tokens.json"
    file.write_text(json.dumps([*TOKENS, 1, 2, 3]))  # the last chunk is not whole
    both = clear(places, "--prefix", str(file), "--tenant", "acme")
    assert by_place(both) == dict.fromkeys(("L1", "filesystem", "redis"), (CHUNKS, 0))
    assert (places.found("acme"), places.hit("umbra")) == (NOWHERE, len(TOKENS))
    clear(places, "--prefix", str(file))
    assert (places.found("umbra"), places.hit("", OTHER_TOKENS)) == (NOWHERE, len(TOKENS))


def test_a_namespace_leaves_the_others(places: Places) -> None:
    places.plant("acme")
    with places.server.client() as client:
        other = client.register(2, model_name="other", hidden_dim_size=16)
        client.store(key_for(other, TOKENS, model_name="other"), PLANTED["umbra"], 2)
        written(client)
        namespace = other.namespace.hex()
    receipt = clear(places, "--namespace", namespace)
    assert by_place(receipt) == dict.fromkeys(("L1", "filesystem", "redis"), (CHUNKS, 0))
    assert (places.found("umbra"), places.hit("acme")) == (NOWHERE, len(TOKENS))


def test_what_a_request_uses_is_waited_for_and_else_named(places: Places) -> None:
    places.plant("acme")
    with places.server.client() as client:
        reply = client.lookup(key_for(client.register(), TOKENS, cache_salt=SALTS["acme"]))
        assert reply.hit_tokens == len(TOKENS)
        receipt = clear(places, "--tenant", "acme", "--wait", "0.1", status=2)
        assert by_place(receipt) == {"L1": (0, CHUNKS), "filesystem": (CHUNKS, 0), "redis": (CHUNKS, 0)}
        assert receipt["places"][0]["why"] == f"{CHUNKS} are in use and 0 are being written"
        with places.server.client(timeout=60.0) as operator:
            order = operator.send("FORGET", m.Forget(tenant="acme", wait_s=60.0))
            operator.call("PING", m.Empty())  # the order is under way
            client.call("FREE_LOOKUP_LOCKS", m.TicketRef(reply.ticket))
            forgotten: m.Forgotten = operator.answer(order, "FORGET")
    assert (forgotten.places[0].objects, forgotten.places[0].left) == (CHUNKS, 0)
    assert places.found("acme") == NOWHERE


def test_an_object_that_is_being_stored_is_named(places: Places) -> None:
    with places.server.client() as client:
        plan = client.prepare_store(key_for(client.register(), TOKENS, cache_salt=SALTS["acme"]))
        client.write(plan, PLANTED["acme"])
        receipt = clear(places, "--tenant", "acme", "--wait", "0", status=2)
        assert receipt["places"][0]["left"] == CHUNKS
        assert receipt["reserved_bytes"] == CHUNKS * 32768
        client.call("ABORT", m.LeaseRef(plan.lease))
    clear(places, "--tenant", "acme")
    assert places.found("acme") == NOWHERE


def test_the_ends_of_pages_are_overwritten(places: Places) -> None:
    """A small object takes the place of a large one, whose bytes stay behind it in the last page."""
    places.plant("acme")
    with places.server.client() as client:
        client.call("CLEAR", m.Clear(l2=True))
        small = client.register(2, model_name="small", num_layers=1, hidden_dim_size=1, use_mla=True)
        client.store(key_for(small, OTHER_TOKENS, model_name="small"), PLANTED[""], 2)
        written(client)
    clear(places, "--tenant", "acme")
    assert places.found("acme") == NOWHERE
    assert places.found("")["L1"] == CHUNKS * 1024 // len(PLANTED[""])


def test_a_tier_that_fails_is_in_the_receipt(places: Places) -> None:
    places.plant("acme")
    shutil.rmtree(places.folder)
    places.folder.touch()
    receipt = clear(places, "--tenant", "acme", status=2)
    assert by_place(receipt) == {"L1": (CHUNKS, 0), "filesystem": (0, -1), "redis": (CHUNKS, 0)}
    assert receipt["places"][1]["why"]


def test_a_server_that_stops_waits_for_no_order(places: Places) -> None:
    places.plant("acme")
    with places.server.client() as client, places.server.client() as operator:
        assert client.lookup(key_for(client.register(), TOKENS, cache_salt=SALTS["acme"])).hit_tokens == len(TOKENS)
        operator.send("FORGET", m.Forget(tenant="acme", wait_s=600.0))
        operator.call("PING", m.Empty())
        assert places.server.stop() == 0
    assert "Traceback" not in places.server.log


def test_the_receipt_in_words(places: Places) -> None:
    places.plant("acme")
    done = run("clear", "--yes", "--endpoint", places.server.endpoint, "--tenant", "acme")
    lines = done.stdout.splitlines()
    assert lines[0] == f"L1: deleted {CHUNKS} objects, 128.0 KiB; 0 left"
    assert lines[1].startswith(f"filesystem: deleted {CHUNKS} objects, ")
    assert lines[3].startswith("L1: overwrote ")


@pytest.mark.parametrize(
    ("order", "words"),
    [
        (Forget(), "the request names no KV to delete"),
        (Forget(tenant="acm"), "the tenant 'acm' is unknown"),
        (Forget(namespace=b"short"), "the namespace has 5 bytes"),
        (Forget(salts=("",)), "a salt is empty"),
        (Forget(tokens=b"123"), "incomplete token ids"),
        (Forget(digests=b"123"), "incomplete token ids"),
        (Forget(tokens=bytes(4 * ((1 << 18) + 1))), "the request has 262145 token ids"),
        (Forget(conversation="x" * 5000), "no request since"),
        (Forget(model="unknown"), "the model 'unknown' is unknown"),
    ],
)
def test_bad_orders_are_refused_and_delete_nothing(places: Places, order: Forget, words: str) -> None:
    places.plant("acme")
    source = StatusSource(places.server.endpoint, 20.0)
    try:
        with pytest.raises(Exception, match=words):
            source.forget(order, timeout=20.0)
    finally:
        source.close()
    assert places.hit("acme") == len(TOKENS)


def test_digests_name_a_prompt_too(places: Places) -> None:
    places.plant("acme")
    digests = HASHER.chunk_digests(array.array("I", TOKENS).tobytes(), 256)
    source = StatusSource(places.server.endpoint, 20.0)
    try:
        receipt = source.forget(Forget(digests=digests), timeout=60.0)
    finally:
        source.close()
    assert [(place.place, place.objects) for place in receipt.places] == [
        ("L1", CHUNKS),
        ("filesystem", CHUNKS),
        ("redis", CHUNKS),
    ]
    assert places.found("acme") == NOWHERE

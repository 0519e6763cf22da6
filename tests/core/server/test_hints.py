"""What clients say of the future of their KV, to a real server process: which objects leave first, and what is told."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest

from kvframework.api.eviction import EvictionProvider, PackedKey, RequestFacts, Use, hookimpl
from kvframework.api.keys import MAX_RETAINS, Retain, retain_of
from kvframework.client import RequestHashes
from kvframework.errors import InvalidPayload
from kvframework.wire import messages as m
from tests.core.server.in_process import serving
from tests.core.storage.memory import OrderedLru
from tests.support.engines import CHUNK, PagedEngine
from tests.support.server_process import ServerProcess, server_fixture
from tests.support.waiting import wait_until
from tests.support.wire_client import WireClient, key_for

OBJECT_BYTES = 1 << 15
DONE = (Retain("done"),)


small = server_fixture(capacity="1MiB", scope="module")


@pytest.fixture
def client(small: ServerProcess) -> Iterator[WireClient]:
    with small.client() as connected:
        connected.call("CLEAR", m.Clear())
        yield connected


def prompt(number: int, chunks: int) -> list[int]:
    return [token for chunk in range(chunks) for token in [1000 * number + chunk] * CHUNK]


def found(client: WireClient, registered: m.Registered, number: int, chunks: int) -> int:
    """The hit in chunks. Its ticket is freed."""
    return client.hit(key_for(registered, prompt(number, chunks), request_id="look")) // CHUNK


@pytest.mark.parametrize(("over", "number"), [("mapped", 40), ("wire", 50)])
def test_a_prompt_that_is_done_leaves_before_older_ones(client: WireClient, over: str, number: int) -> None:
    registered = client.register()
    before = client.status()["l1"]["evicted"]["hinted"]
    client.store(key_for(registered, prompt(1, 24)), b"x")
    last = key_for(registered, prompt(number, 8), request_id="last", retain=DONE)
    if over == "mapped":
        client.store(last, b"y")
    else:
        objects = b"".join(at.to_bytes(4, "little") for at in range(8))
        client.call("STORE_CPU_CHUNKS", m.StoreCpuChunks(last, 1, objects), *[b"y" * OBJECT_BYTES] * 8)
    client.call("END_SESSION", m.EndSession("last"))
    client.store(key_for(registered, prompt(3, 8)), b"z")
    assert client.status()["l1"]["evicted"]["hinted"] == before + 8
    assert found(client, registered, 1, 24) == 24
    assert found(client, registered, 3, 8) == 8
    assert found(client, registered, number, 8) == 0
    record = client.call("RECENT", m.Recent()).records[-1]
    assert (record.reason, record.detail) == ("evicted", "an earlier request marked the object as done")


def test_without_hints_the_oldest_leaves(client: WireClient) -> None:
    """What the tests around would find if hints did nothing."""
    registered = client.register()
    before = client.status()["l1"]["evicted"]
    client.store(key_for(registered, prompt(1, 24)), b"x")
    client.store(key_for(registered, prompt(2, 8)), b"y")
    client.store(key_for(registered, prompt(3, 8)), b"z")
    assert found(client, registered, 1, 24) == 16
    assert client.status()["l1"]["evicted"]["hinted"] == before["hinted"]


def test_a_system_prompt_outlives_others_and_the_rest_goes(client: WireClient) -> None:
    """One request with two ranges; then so many others that LRU would keep nothing of it."""
    registered = client.register()
    hints = retain_of([{"end": 4 * CHUNK, "duration": 600, "priority": 90}, {"start": 4 * CHUNK, "retain": "done"}])
    client.store(key_for(registered, prompt(1, 12), retain=hints), b"x")
    for number in range(2, 12):
        client.store(key_for(registered, prompt(number, 8)), b"y")
    assert found(client, registered, 1, 12) == 4


def test_hints_cannot_fill_l1(client: WireClient) -> None:
    """Every prompt of one client is to be kept for ever, and all but a quarter of L1 is for others nevertheless."""
    registered = client.register()
    for number in range(1, 9):
        client.store(key_for(registered, prompt(number, 4), retain=(Retain("keep", 3600.0, 100),)), b"x")
    for _ in range(2):
        for number in range(20, 23):
            client.store(key_for(registered, prompt(number, 8)), b"y")
    assert [found(client, registered, number, 8) for number in range(20, 23)] == [8, 8, 8]


@pytest.mark.torch
def test_the_library_sends_hints_with_lookups_loads_and_chunked_stores(small: ServerProcess) -> None:
    with small.engine_client() as connected:
        engine = PagedEngine(connected, 7)
        with small.client() as other:
            other.call("CLEAR", m.Clear())

        def asked(tokens: list[int], request_id: str, retain: Sequence[Retain] = ()) -> RequestHashes:
            request = RequestHashes(connected.hasher, CHUNK, request_id=request_id, retain=retain)
            request.extend(tokens)
            return request

        def stored(request: RequestHashes, start: int, end: int) -> int:
            blocks = [list(range((end - start) * CHUNK // 16))]
            future = engine.worker.submit_store(request, start * CHUNK, end * CHUNK, blocks)
            return future.result(20).stored

        def hit(tokens: list[int]) -> int:
            result = engine.scheduler.lookup(asked(tokens, "look"))
            engine.scheduler.free(result)
            return result.hit_tokens // CHUNK

        system, rest = prompt(1, 2), prompt(9, 6)
        assert stored(asked(system, "another"), 0, 2) == 2
        assert [stored(asked(prompt(number, 4), "others"), 0, 4) for number in range(20, 26)] == [4] * 6
        last = asked(system + rest, "last", DONE)
        found = engine.scheduler.lookup(last)
        assert found.hit_tokens == 2 * CHUNK
        assert engine.worker.submit_retrieve(last, 0, 2 * CHUNK, [list(range(2 * CHUNK // 16))]).result(20).ok
        assert [stored(last, start, start + 2) for start in (2, 4, 6)] == [2, 2, 2]
        engine.scheduler.free(found)
        engine.scheduler.end_request("last")
        more = asked(prompt(30, 6), "next")
        assert [stored(more, 0, 3), stored(more, 3, 6)] == [3, 3]
        assert [hit(prompt(number, 4)) for number in range(20, 26)] == [4] * 6
        assert hit(system + rest) == 2
        engine.worker.close()


@pytest.mark.parametrize("hint", [{"what": "later"}, {"what": "keep", "duration": 1e9}, {"what": "done", "start": -1}])
def test_a_wrong_hint_is_refused_and_harms_nothing(client: WireClient, hint: dict[str, object]) -> None:
    registered = client.register()
    client.store(key_for(registered, prompt(1, 2)), b"x")
    key = msgspec.to_builtins(key_for(registered, prompt(1, 2)), builtin_types=(bytes,))
    for name, fields in ("LOOKUP", {}), ("PREPARE_STORE", {"instance_id": 1}):
        for retain in [hint], [hint] * (MAX_RETAINS + 1):
            request = client.send(name, _Raw(key={**key, "retain": retain}, **fields))
            with pytest.raises(InvalidPayload, match="retain"):
                client.answer(request, name)
    assert found(client, registered, 1, 2) == 2


class _Raw(msgspec.Struct, omit_defaults=True):
    """A payload with fields that no struct of this library would send."""

    key: dict[str, object]
    instance_id: int = 0


class Places(OrderedLru):
    """Writes down where in its prompt each new object is, and what it came by."""

    def __init__(self) -> None:
        super().__init__()
        self.told: list[tuple[Use, int, int]] = []

    def on_inserts(
        self, keys: Sequence[PackedKey], sizes: Sequence[int], chunks: Sequence[int], facts: RequestFacts
    ) -> None:
        self.told += [(facts.use, chunk, facts.chunk_tokens) for chunk in chunks]
        super().on_inserts(keys, sizes, chunks, facts)


def test_a_policy_learns_where_what_comes_from_a_tier_is_in_the_prompt(tmp_path: Path) -> None:
    policy = Places()

    class Plugin:
        @hookimpl
        def kvf_eviction_policies(self) -> list[EvictionProvider[Any]]:
            return [EvictionProvider(name="places", summary="tells", create=lambda _: policy)]

    disk = ("l2.0.use=filesystem", f"l2.0.path={tmp_path / 'l2'}", "l2.0.capacity=1GiB")
    with serving(*disk, "l1.eviction.use=places", plugins=(Plugin(),)) as server, WireClient(server.endpoint) as client:
        registered = client.register()
        client.store(key_for(registered, prompt(1, 8)), b"x")
        wait_until(lambda: client.status()["l2"][0]["write_pending"] == 0, what="the write to L2")
        client.call("CLEAR", m.Clear())
        policy.told.clear()
        # The first two chunks are the engine's own; a hint does not make a load another one.
        key = key_for(registered, prompt(1, 8), start=2 * CHUNK, retain=(Retain("keep"),))
        assert client.hit(key) == 6 * CHUNK
    assert sorted(policy.told) == [("load", chunk, CHUNK) for chunk in range(2, 8)]

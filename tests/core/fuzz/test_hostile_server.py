"""A server that answers with anything: the client gets typed errors in time, and goes on with the next server."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from random import Random

import pytest
import zmq
from hypothesis import given, settings
from hypothesis import strategies as st

from kvf_hashers.sha256 import Sha256
from kvframework.api.keys import CacheKey
from kvframework.api.layout import KVLayout, LayerGroup, canonical_desc
from kvframework.api.plugin import Message
from kvframework.api.transport import LoadGrant, Registration, StoreOutcome
from kvframework.client import KVClient, RequestHashes, SchedulerAdapter
from kvframework.client.hashing import granted_ranges
from kvframework.client.kv_client import bare_transfer, check_complete, check_ranges
from kvframework.errors import KVFrameworkError
from kvframework.wire import messages as m
from kvframework.wire.frames import ERROR_TYPE, ErrorPayload, join, split
from kvframework.wire.protocol import REQUESTS, ClientDeadlines
from kvframework.wire.transfer_blocks import pack_offsets
from tests.core.fuzz.bounds import check_words
from tests.core.fuzz.effort import EXAMPLES, fuzzed
from tests.core.fuzz.mutation import mutated, mutated_bytes, mutated_frames
from tests.core.golden.samples import every_field, required_fields

Answer = Callable[[int, str], list[bytes]]
WELCOME = m.HelloReply(1, b"b" * 16, b"s" * 16, 256, "sha256", "sha256/1", ("cpu_gather",))
WAIT_S = 0.1


class HostileServer:
    """A ROUTER that answers as it is told: `answer(request id, type)` gives the frames."""

    def __init__(self, endpoint: str) -> None:
        self.answer: Answer = honest
        self.asked: list[str] = []
        self._context = zmq.Context()
        self._router = self._context.socket(zmq.ROUTER)
        self._router.setsockopt(zmq.LINGER, 0)
        self._router.bind(endpoint)
        self._ending = False
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()

    def close(self) -> None:
        self._ending = True
        self._thread.join(10)
        self._router.close(0)
        self._context.term()

    def _serve(self) -> None:
        while not self._ending:
            if not self._router.poll(20):
                continue
            identity, *frames = self._router.recv_multipart()
            envelope = split(frames)
            self.asked.append(envelope.type)
            answer = self.answer(envelope.request_id, envelope.type)
            if answer:
                self._router.send_multipart([identity, *answer])


def honest(request_id: int, name: str) -> list[bytes]:
    reply: Message = WELCOME if name == "HELLO" else m.Pong(WELCOME.boot_id) if name == "PING" else m.Empty()
    return [bytes(frame) for frame in join(request_id, name, reply)]


def hostile(rng: Random, *, also: tuple[str, ...] = ()) -> Answer:
    """Honest to HELLO and PING unless they are in `also`; mutated answers to all else."""

    def answer(request_id: int, name: str) -> list[bytes]:
        if name in ("HELLO", "PING") and name not in also:
            return honest(request_id, name)
        spec = REQUESTS[name]
        kind, struct = rng.choice(
            [(name, spec.response), (ERROR_TYPE, ErrorPayload), ("PING", m.Pong), (name, m.StorePlan)]
        )
        valid = WELCOME if struct is m.HelloReply else rng.choice([every_field(struct), required_fields(struct)])
        frames = [bytes(frame) for frame in join(request_id, kind, valid, [b"x"] * rng.choice([0, 0, 1]))]
        frames[2] = mutated(rng, valid)
        if rng.random() < 0.3:
            frames = mutated_frames(rng, frames)
        if rng.random() < 0.1 and frames:
            frames[0] = mutated_bytes(rng, frames[0])
        return frames or [b""]

    return answer


@contextmanager
def connected(folder: Path) -> Iterator[tuple[HostileServer, KVClient]]:
    endpoint = f"ipc://{folder}/s"
    server = HostileServer(endpoint)
    try:
        with KVClient(endpoint) as client:
            assert client.wait_up(20)
            waits = dict.fromkeys(("engine_s", "lookup_s", "load_s", "store_s", "setup_s"), WAIT_S)
            client.deadlines = replace(client.deadlines, **waits)
            yield server, client
    finally:
        server.close()


KEY = CacheKey("m", 1, 0, bytes(16), 0, 256, "r", digests=bytes(32))
LAYOUT = KVLayout("paged", (LayerGroup(1, 16, 1, 8, "float32"),), 16)
TRANSFER = bare_transfer(Registration(1, 0, bytes(16), LAYOUT, canonical_desc(LAYOUT, 256)), KEY)
CALLS: list[Callable[[KVClient], object]] = [
    lambda client: client.request("LOOKUP", m.Lookup(KEY), m.LookupReply),
    lambda client: client.prepare_store(TRANSFER).result(WAIT_S),
    lambda client: client.prepare_load(TRANSFER).result(WAIT_S),
    lambda client: client._commit_store(m.Commit("lease"), 1, StoreOutcome(), True).result(WAIT_S),
    lambda client: client._loaded(m.Commit("lease"), None, 0.0, 0.0).result(WAIT_S),
    lambda client: client.missing_chunks(TRANSFER).result(WAIT_S),
    lambda client: client.gather_block(TRANSFER.registration, [0], b""),
    lambda client: client.store(TRANSFER).result(WAIT_S),
    lambda client: client.load(TRANSFER, 0).result(WAIT_S),
    lambda client: client.store_chunks(TRANSFER, [0], [b"kv"]).result(WAIT_S),
    lambda client: client._receive_chunks(m.RetrievePlan(True, "lease"), []).result(WAIT_S),
    lambda client: client.request("REPORT_STATUS", m.Empty(), m.StatusReply),
]


def unforeseen(caplog: pytest.LogCaptureFixture) -> list[str]:
    """What was logged with a traceback: nobody had thought of it."""
    return [record.getMessage() for record in caplog.records if record.exc_info]


def test_no_answer_does_harm(short_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    rng = Random(8)
    with connected(short_path) as (server, client):
        scheduler = SchedulerAdapter(client, model_name="m", namespace=bytes(16), chunk_tokens=256)
        server.answer = hostile(rng)
        told = 0
        for _ in range(EXAMPLES):
            began = time.monotonic()
            try:
                rng.choice(CALLS)(client)
            except KVFrameworkError as error:
                told += 1
                check_words(error, 20_000)
            assert time.monotonic() - began < WAIT_S + 10
            if rng.random() < 0.2:
                client.wait_up(1)
        assert told
        assert scheduler.failures == 0
        server.answer = honest
        assert client.wait_up(20), "it goes on with a server that has come to its senses"
    assert not unforeseen(caplog)


def test_no_hello_and_no_pong_does_harm(short_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    rng = Random(9)
    with connected(short_path) as (server, client):
        for also in (("PING",), ("HELLO",), ("PING", "HELLO")):
            server.answer = hostile(rng, also=also)
            end = time.monotonic() + 3
            while time.monotonic() < end:
                try:
                    client.request("NOOP", m.Empty(), m.Empty)
                except KVFrameworkError:
                    client.wait_up(0.1)
            server.answer = honest
            assert client.wait_up(20)
    assert {"HELLO", "PING", "NOOP"} <= set(server.asked)
    assert not unforeseen(caplog)


@settings(fuzzed, max_examples=max(EXAMPLES // 10, 10))
@given(st.one_of(st.binary(max_size=40), st.lists(st.integers(0, 1 << 13), max_size=3).map(pack_offsets)), st.binary())
def test_a_grant_of_nonsense_is_refused(offsets: bytes, objects: bytes) -> None:
    grant = LoadGrant(1, "lease", 0, 256, bytes(32), offsets, objects, bytes(16), 0.0, 1.0)
    try:
        ranges = granted_ranges(TRANSFER, grant)
        check_ranges(TRANSFER, ranges, 1 << 14)
        check_complete(TRANSFER, ranges)
    except KVFrameworkError:
        return
    (place,) = ranges
    assert (place.chunk, place.group) == (0, 0)
    assert 0 <= place.offset <= (1 << 14) - place.length


@settings(fuzzed, max_examples=max(EXAMPLES // 10, 10))
@given(st.integers(-(1 << 63), (1 << 64) - 1))
def test_a_hit_of_more_than_was_asked_for_is_a_miss(hit: int) -> None:
    class Liar:
        usable, maps_arena = True, False
        deadlines = ClientDeadlines()

        def has(self, feature: str) -> bool:
            return False

        def free_soon(self, *tickets: str) -> None:
            assert tickets == ()

        def request(self, name: str, payload: Message, response: object, **_: object) -> m.LookupReply:
            return m.LookupReply(hit, "ticket", pending=name == "LOOKUP")

        def lost(self, kind: str, code: str) -> None:
            assert kind == "lookups"

    request = RequestHashes(Sha256(), 256, request_id="r")
    request.extend(range(512))
    scheduler = SchedulerAdapter(Liar(), model_name="m", namespace=bytes(16), chunk_tokens=256)  # type: ignore[arg-type]
    found = scheduler.lookup(request, 256)
    assert found.hit_tokens == (hit if 0 <= hit <= 256 else 0)
    assert scheduler.poll(found).hit_tokens == found.hit_tokens
    assert bool(scheduler.failures) == (not 0 <= hit <= 256)

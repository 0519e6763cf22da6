"""A real server under thousands of mutated messages from several sockets, local and of TCP, and under bytes that are no
messages: it serves its well-behaved client all the while, counts what it refused, and does not grow."""

from __future__ import annotations

import contextlib
import os
import socket
import time
from pathlib import Path
from random import Random

import pytest
import zmq
from msgspec.structs import replace

from kvframework.api.plugin import Message
from kvframework.wire import messages as m
from kvframework.wire.frames import decode, join, split
from kvframework.wire.protocol import REQUESTS
from tests.core.fuzz.mutation import mutated, mutated_frames
from tests.core.golden.samples import every_field, required_fields
from tests.core.wire_path.remote import RemoteServer, remote_server
from tests.support.processes import descriptors
from tests.support.server_process import ServerProcess
from tests.support.wire_client import key_for

# CLEAR would take away what the well-behaved client looks for.
NAMES = sorted(REQUESTS.keys() - {"CLEAR", "DRAIN"})
TOKENS = range(1, 513)
SETTLE, MESSAGES = 1_000, 3_000
GROWTH_KIB = 12 << 10
# Of half of the calls of others, while the machine has much else to do: alone they take milliseconds.
USUAL_S = 1.0


class Stranger:
    """A DEALER that sends mutated messages, with or without a session of its own, and reads what comes."""

    def __init__(self, endpoint: str, live: str, registered: m.Registered, rng: Random, *, session: bool) -> None:
        self.answers = 0
        self._registered = registered
        self._endpoint = endpoint
        self._liveness = live
        self._rng = rng
        self._wants_session = session
        self._context = zmq.Context()
        self._live: list[socket.socket] = []
        self._dealer = self._new()

    def close(self) -> None:
        for each in self._live:
            each.close()
        self._dealer.close(0)
        self._context.term()

    def send(self) -> None:
        rng = self._rng
        if rng.random() < 0.01:
            self._dealer.close(0)
            self._dealer = self._new()
        if rng.random() < 0.02:
            self._touch_liveness()
            self._no_message()
        spec = REQUESTS[rng.choice(NAMES)]
        struct: type[Message] = rng.choice([spec.payload, spec.payload, rng.choice([m.Lookup, m.Prepare, m.Hello])])
        valid = rng.choice([every_field, required_fields, self._plausible])(struct)
        frames = [
            bytes(frame) for frame in join(rng.randrange(1 << 20), spec.name, valid, [b"kv"] * rng.choice([0, 0, 2]))
        ]
        frames[2] = mutated(rng, valid)
        if rng.random() < 0.3:
            frames = mutated_frames(rng, frames)
        try:
            self._dealer.send_multipart(frames or [b""], zmq.NOBLOCK)
        except zmq.Again:
            time.sleep(0.01)
        while self._dealer.poll(0):
            self._dealer.recv_multipart()
            self.answers += 1

    def _plausible(self, struct: type[Message]) -> Message:
        """What gets further than the decoder."""
        rng, instance = self._rng, self._rng.randrange(20)
        key = key_for(self._registered, [rng.randrange(50)] * 256, request_id=f"stranger {rng.randrange(9)}")
        payloads: dict[type[Message], Message] = {
            m.RegisterNonGpuContextPayload: m.RegisterNonGpuContextPayload(
                instance, rng.choice(["tiny", "other"]), 1, 16, 2, 8, "float32", use_mla=rng.random() < 0.2
            ),
            m.Prepare: m.Prepare(key, instance),
            m.StoreCpuChunks: m.StoreCpuChunks(key, instance),
            m.TransferRequest: m.TransferRequest(key, instance, (bytes(64),)),
            m.Lookup: m.Lookup(replace(key, worker_id=None)),
            m.Unregister: m.Unregister(instance),
        }
        return payloads.get(struct) or every_field(struct)

    def _new(self) -> zmq.Socket[bytes]:
        dealer = self._context.socket(zmq.DEALER)
        dealer.setsockopt(zmq.LINGER, 0)
        dealer.connect(self._endpoint)
        if self._wants_session:
            dealer.send_multipart(join(1, "HELLO", m.Hello("stranger", os.getpid())))
            if dealer.poll(5000):
                envelope = split(dealer.recv_multipart())
                assert decode(envelope.payload, m.HelloReply, where="test").session
        return dealer

    def _touch_liveness(self) -> None:
        live = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        live.settimeout(5)
        live.connect(self._liveness)
        live.sendall(self._rng.randbytes(self._rng.choice([1, 15, 16, 17, 4000])))
        self._live.append(live)
        if len(self._live) > 8:
            self._live.pop(0).close()

    def _no_message(self) -> None:
        """Bytes of no protocol, on a connection of their own."""
        kind, _, address = self._endpoint.partition("://")
        host, _, port = address.rpartition(":")
        data = self._rng.choice(
            [b"", b"\xff" + bytes(9), b"\xff\0\0\0\0\0\0\0\1\x7f\3\0NULL", self._rng.randbytes(500)]
        )
        family = socket.AF_UNIX if kind == "ipc" else socket.AF_INET
        with contextlib.suppress(OSError), socket.socket(family, socket.SOCK_STREAM) as raw:
            raw.settimeout(1.0)
            raw.connect(address if kind == "ipc" else (host, int(port)))
            raw.send(data)


class Honest:
    """Stores once, then looks up and loads again and again. What it gets is right, or an honest miss."""

    def __init__(self, server: ServerProcess) -> None:
        self.loads = self.misses = 0
        self.waits: list[float] = []
        self._client = server.client(timeout=30.0)
        self.registered = self._client.register(instance_id=900_001)
        self._key = key_for(self.registered, TOKENS)
        self._store()

    def close(self) -> None:
        self._client.close()

    def use(self) -> None:
        began = time.monotonic()
        reply = self._client.lookup(self._key)
        found = self._client.retrieve(self._key, instance_id=900_001)
        if found is None:
            self.misses += 1
            self._store()
        else:
            assert reply.hit_tokens == len(TOKENS)
            assert found == (b"honest" * len(found))[: len(found)]
            self.loads += 1
        if reply.ticket:
            self._client.call("FREE_LOOKUP_LOCKS", m.TicketRef(reply.ticket))
        self.waits.append(time.monotonic() - began)

    def _store(self) -> None:
        # Objects are multiples of six bytes long only together: the pattern begins anew in each.
        plan = self._client.prepare_store(self._key, instance_id=900_001)
        if plan.lease:
            assert self._client.arena is not None
            whole = b"honest" * sum(place.length for place in plan.ranges)
            at = 0
            for place in plan.ranges:
                self._client.arena[place.offset : place.offset + place.length] = whole[at : at + place.length]
                at += place.length
            self._client.call("COMMIT_STORE", m.LeaseRef(plan.lease))


def rss_kib(pid: int) -> int:
    fields = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    return next(int(line.split()[1]) for line in fields if line.startswith("Anonymous:"))


def flood(server: RemoteServer, seed: int, messages: int, seconds: float) -> Honest:
    """Until both are over: `messages` sent and `seconds` gone."""
    rng = Random(seed)
    honest = Honest(server.process)
    local = server.process.endpoint
    live = local.removeprefix("ipc://") + ".live"
    strangers = [
        Stranger(endpoint, live, honest.registered, Random(rng.random()), session=session)
        for endpoint in (local, server.tcp)
        for session in (True, False)
    ]
    try:
        sent, end = 0, time.monotonic() + seconds
        while sent < messages or time.monotonic() < end:
            rng.choice(strangers).send()
            sent += 1
            if sent % 50 == 0:
                honest.use()
        assert sum(each.answers for each in strangers) > sent // 10
    finally:
        for each in strangers:
            each.close()
        honest.close()
    return honest


def check(remote: RemoteServer, seed: int, messages: int, seconds: float) -> None:
    server = remote.process
    flood(remote, seed, SETTLE, 0)
    size, files = rss_kib(server.pid), len(descriptors(server.pid))
    honest = flood(remote, seed + 1, messages, seconds)
    assert honest.loads > messages // 200
    assert max(honest.waits) < 20.0
    assert sorted(honest.waits)[len(honest.waits) // 2] < USUAL_S
    with server.client() as client:
        status = client.status()
        counters = status["messaging"]["counters"]
    for name in (
        "malformed",
        "unanswerable",
        "hello_refused",
        "errors.protocol.hello_required",
        "errors.protocol.frames",
        "liveness_refused",
        "errors.protocol.payload",
        "errors.protocol.unknown_request",
    ):
        assert counters.get(name, 0) > 2, f"{name} in {counters}"
    assert not counters.get("loop_errors", 0) + counters.get("tick_errors", 0)
    assert not counters.get("errors.run.handler", 0), server.log[-4000:]
    assert status["messaging"]["refused"]
    assert "Traceback" not in server.log
    assert rss_kib(server.pid) - size < GROWTH_KIB
    assert len(descriptors(server.pid)) <= files + 8


@pytest.fixture(autouse=True)
def _every_big_block_is_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """glibc keeps what was freed of big messages, up to 32 MiB a thread, and growth would not tell a leak."""
    monkeypatch.setenv("MALLOC_MMAP_THRESHOLD_", str(128 << 10))


@pytest.mark.timeout(600)
def test_a_flood_of_mutated_messages() -> None:
    with remote_server(curve=False) as server:
        check(server, 1, MESSAGES, 0)


@pytest.mark.slow
@pytest.mark.timeout(7200)
def test_a_long_flood() -> None:
    seconds = float(os.environ.get("KVF_FUZZ_SECONDS", "600"))
    with remote_server(curve=False) as server:
        check(server, int(time.time()), MESSAGES, seconds)

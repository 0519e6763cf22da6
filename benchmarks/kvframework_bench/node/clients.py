"""The simulated clients of a node: an engine is a scheduler that looks up, and a worker for each rank that loads.

They send what `kvframework.client` would, without its threads. A client has one request at a time, as an engine's
thread has. One thread serves all.
"""

from __future__ import annotations

import array
import hashlib
import mmap
import os
import socket
import time
from abc import ABC, abstractmethod
from collections import deque
from typing import Any

import msgspec
import zmq

from kvframework.api.keys import DIGEST_BYTES, CacheKey
from kvframework.api.plugin import Message
from kvframework.wire import messages as m
from kvframework.wire.frames import NO_ANSWER, join, split
from kvframework.wire.protocol import REQUESTS, offer
from kvframework_bench.errors import BenchFailed
from kvframework_bench.zmq_reference import ECHO

MODEL = "node"
CHUNK_TOKENS = 16
_TIMEOUT_MS = 20_000
_decoders = {spec.response: msgspec.msgpack.Decoder(spec.response) for spec in REQUESTS.values()}


class Client(ABC):
    """One simulated client. `due` are the times at which its requests were to begin, oldest first; `latencies` the
    seconds from there to the answer that an engine waits for."""

    def __init__(self, context: zmq.Context[Any], endpoint: str) -> None:
        self.socket = context.socket(zmq.DEALER)
        self.socket.setsockopt(zmq.RCVTIMEO, _TIMEOUT_MS)
        self.socket.connect(endpoint)
        self.due: deque[float] = deque()
        self.latencies: list[float] = []
        self.is_busy = False

    def ask(self, at: float) -> None:
        """Begin the request that is due at this time, as soon as the one before it has ended."""
        self.due.append(at)
        if not self.is_busy:
            self.is_busy = True
            self.begin()

    def received(self) -> None:
        """Take the message that has arrived."""
        if self.goes_on(self.socket.recv_multipart()):
            return
        self.is_busy = bool(self.due)
        if self.is_busy:
            self.begin()

    def answered(self) -> None:
        """The answer that an engine waits for is there."""
        self.latencies.append(time.perf_counter() - self.due.popleft())

    @abstractmethod
    def begin(self) -> None:
        """Send the first message of a request."""

    @abstractmethod
    def goes_on(self, frames: list[bytes]) -> bool:
        """Take an answer; return whether another one of this request follows. Raises `BenchFailed`."""


class Echoed(Client):
    """A client of the bare peer: a message there and back."""

    def __init__(self, context: zmq.Context[Any], endpoint: str, nbytes: int) -> None:
        super().__init__(context, endpoint)
        self._payload = bytes(nbytes)

    def begin(self) -> None:
        self.socket.send_multipart([ECHO, self._payload])

    def goes_on(self, frames: list[bytes]) -> bool:
        self.answered()
        return False


class Session(Client):
    """A client of the server, whose `features` these are: `call` while it is not busy. `one_way`: what is given back is
    not answered."""

    def __init__(self, context: zmq.Context[Any], endpoint: str) -> None:
        super().__init__(context, endpoint)
        self._id = 0
        self.one_way = False
        hello = self.call("HELLO", offer("bench node", os.getpid()), m.HelloReply)
        self.features = hello.features
        self._live = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._live.connect(hello.liveness)
        self._live.sendall(hello.session)
        _, ancillary, _, _ = self._live.recvmsg(1, socket.CMSG_SPACE(4))
        fds = array.array("i")
        for _, _, content in ancillary:
            fds.frombytes(content)
        self.arena = mmap.mmap(fds[0], os.fstat(fds[0]).st_size)
        os.close(fds[0])

    def close(self) -> None:
        self._live.close()

    def send(self, name: str, payload: Message) -> None:
        self._id += 1
        self.socket.send_multipart(join(self._id, name, payload))

    def post(self, name: str, payload: Message) -> None:
        self.socket.send_multipart(join(NO_ANSWER, name, payload))

    def call(self, name: str, payload: Message, response: type[Any]) -> Any:
        """Send a request and wait for its answer. Raises `BenchFailed` for an error."""
        self.send(name, payload)
        return self.answer(self.socket.recv_multipart(), response)

    def answer(self, frames: list[bytes], response: type[Any]) -> Any:
        envelope = split(frames)
        if envelope.type == "ERROR" or envelope.request_id != self._id:
            raise BenchFailed(f"the server answered with {envelope.type}: {bytes(envelope.payload)!r}")
        return _decoders[response].decode(envelope.payload)


class Scheduler(Session):
    """LOOKUP of prompts that are all in L1; what one has pinned is freed: by a message that is answered, or by the next
    LOOKUP. `grants`: it prepares the loads of the engine's workers, which ask nothing themselves."""

    def __init__(
        self, context: zmq.Context[Any], endpoint: str, keys: list[CacheKey], workers: dict[int, Worker]
    ) -> None:
        super().__init__(context, endpoint)
        self.grants = False
        self._workers = workers
        self._keys = keys
        self._next = 0
        self._tickets: tuple[str, ...] = ()

    def begin(self) -> None:
        self._next += 1
        key = self._keys[self._next % len(self._keys)]
        grant = tuple(self._workers) if self.grants else ()
        self.send("LOOKUP", m.Lookup(key, free=self._tickets if self.one_way else (), grant=grant))

    def goes_on(self, frames: list[bytes]) -> bool:
        if frames[1] != b"LOOKUP":
            self.answer(frames, m.Freed)
            return False
        reply = self.answer(frames, m.LookupReply)
        self.answered()
        if reply.hit_tokens != self._keys[0].end:
            raise BenchFailed(f"a lookup found {reply.hit_tokens} tokens", available=f"{self._keys[0].end} tokens")
        if self.grants:
            if len(reply.grants) != len(self._workers):
                raise BenchFailed(
                    f"a lookup granted {len(reply.grants)} loads", available=f"{len(self._workers)} loads"
                )
            for grant in reply.grants:
                self._workers[grant.instance_id].loaded(grant.lease, self.latencies[-1])
        if self.one_way:
            self._tickets = (reply.ticket,)
            return False
        self._tickets = ()
        self.send("FREE_LOOKUP_LOCKS", m.TicketRef(reply.ticket))
        return True


class KeyScheduler(Scheduler):
    """The scheduler of an engine that names its objects itself and moves their bytes, as vLLM's own offloading does:
    LOOKUP_KEYS and the end of one load, of all ranks together. It registers the instance and stores the prompts."""

    def __init__(self, context: zmq.Context[Any], endpoint: str, keys: list[CacheKey], instance_id: int) -> None:
        super().__init__(context, endpoint, keys, {})
        self._instance_id = instance_id

    def store(self, key: CacheKey) -> None:
        """Store a prompt, without bytes of its own. Raises `BenchFailed`."""
        prepare = m.PrepareKeys(_bare(key, 0), self._instance_id, _groups(key))
        plan = self.call("PREPARE_STORE_KEYS", prepare, m.StorePlan)
        outcome = self.call("COMMIT_STORE", m.Commit(plan.lease), m.Committed).outcome
        if outcome.stored * CHUNK_TOKENS != key.end:
            raise BenchFailed(f"the server stored {outcome.stored} objects", available=f"{key.end // CHUNK_TOKENS}")

    def begin(self) -> None:
        self._next += 1
        key = self._keys[self._next % len(self._keys)]
        asked = m.LookupKeys(_bare(key, None), free=self._tickets, grant=(self._instance_id,), groups=_groups(key))
        self.send("LOOKUP_KEYS", asked)

    def goes_on(self, frames: list[bytes]) -> bool:
        reply = self.answer(frames, m.LookupReply)
        self.answered()
        if reply.hit_tokens != self._keys[0].end or len(reply.grants) != 1:
            raise BenchFailed(f"a lookup found {reply.hit_tokens} tokens", available=f"{self._keys[0].end} tokens")
        self._tickets = (reply.ticket,)
        self.post("COMMIT_RETRIEVE", m.Commit(reply.grants[0].lease))
        return False


def _bare(key: CacheKey, worker_id: int | None) -> CacheKey:
    return msgspec.structs.replace(key, digests=b"", worker_id=worker_id)


def _groups(key: CacheKey) -> tuple[m.KeyGroup, ...]:
    return (m.KeyGroup(key.digests, CHUNK_TOKENS),)


class Worker(Session):
    """One rank: PREPARE_RETRIEVE, no copy, COMMIT_RETRIEVE. The latency is that of the first, or of the LOOKUP that has
    granted the load."""

    def __init__(self, context: zmq.Context[Any], endpoint: str, keys: list[CacheKey], instance_id: int) -> None:
        super().__init__(context, endpoint)
        self._keys = keys
        self._instance_id = instance_id
        self._next = 0

    def store(self, key: CacheKey) -> None:
        """Store a prompt, without bytes of its own. Raises `BenchFailed`."""
        plan = self.call("PREPARE_STORE", m.Prepare(key, self._instance_id), m.StorePlan)
        outcome = self.call("COMMIT_STORE", m.Commit(plan.lease), m.Committed).outcome
        if outcome.stored * CHUNK_TOKENS != key.end:
            raise BenchFailed(
                f"the server stored {outcome.stored} chunks", available=f"{key.end // CHUNK_TOKENS} chunks"
            )

    def loaded(self, lease: str, latency: float) -> None:
        """End the load of a grant."""
        self.latencies.append(latency)
        self.post("COMMIT_RETRIEVE", m.Commit(lease))

    def begin(self) -> None:
        self._next += 1
        key = self._keys[self._next % len(self._keys)]
        self.send("PREPARE_RETRIEVE", m.Prepare(key, self._instance_id))

    def goes_on(self, frames: list[bytes]) -> bool:
        if frames[1] != b"PREPARE_RETRIEVE":
            self.answer(frames, m.RetrieveCommitted)
            return False
        plan = self.answer(frames, m.RetrievePlan)
        self.answered()
        if not plan.hit:
            raise BenchFailed("a load of stored chunks is a miss")
        if self.one_way:
            self.post("COMMIT_RETRIEVE", m.Commit(plan.lease))
            return False
        self.send("COMMIT_RETRIEVE", m.Commit(plan.lease))
        return True


def digests(seed: int, prompt: int, chunks: int) -> bytes:
    """Return made-up digests: nothing is hashed that a model would see."""
    return hashlib.shake_128(f"{seed} {prompt}".encode()).digest(chunks * DIGEST_BYTES)

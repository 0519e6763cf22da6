"""An engine of one or two ranks whose objects are shards, at one node of a fleet: it checks each byte that it loads,
and outlives its server. One thread, blocking."""

from __future__ import annotations

import functools
import hashlib
import random
import time
from contextlib import suppress
from typing import Any

from kvframework.api.keys import CacheKey
from kvframework.api.layout import KVLayout, LayerGroup
from kvframework.errors import KVFrameworkError, LeaseUnknown
from kvframework.wire import messages as m
from tests.core.tiers.prompts import CHUNK_TOKENS, Prompt
from tests.support.server_process import ServerProcess
from tests.support.wire_client import WireClient

SHARDS = 2
NAMESPACE = b"a model's shards"
# K and V of two layers: objects of 128 KiB.
GROUP = LayerGroup(2, 16, 1, 64, "bfloat16", layer_names=("l.0", "l.1"))
OBJECT_BYTES = 2 * 2 * CHUNK_TOKENS * 64 * 2
_PATIENCE_S = 60.0
_PERIOD = 4099


class Lost(Exception):
    """The server has ended, or no longer knows this client."""


class FaultyNode:
    """A server, and how often something was done to it. `faults` is odd while something is."""

    def __init__(self, server: ServerProcess) -> None:
        self.server = server
        self.faults = 0


class ShardEngine:
    """All ranks of an engine, over one connection, which `begin` makes."""

    def __init__(self, node: FaultyNode, ranks: int, seed: str) -> None:
        self.chance = random.Random(seed)
        self.loads = 0
        self.from_l2 = 0
        self._node = node
        self._split = [(0, 1)] if ranks == 1 else [(0,), (1,)]
        self._client: WireClient | None = None
        self._instances: list[tuple[int, tuple[int, ...]]] = []
        self._request = 0
        self._faults_seen = -1

    def begin(self) -> None:
        self.end()
        self._faults_seen = self._node.faults
        try:
            self._client = WireClient(self._node.server.endpoint, timeout=_PATIENCE_S)
        except (OSError, KVFrameworkError) as error:
            raise self._lost(error) from None
        self._instances = [(self.chance.randrange(1 << 30), ranks) for ranks in self._split]
        for instance_id, ranks in self._instances:
            layout = KVLayout("paged", (GROUP,) * len(ranks), 8)
            registration = m.RegisterKvCache(
                instance_id, "m", SHARDS, ranks[0], NAMESPACE, "cpu_gather", layout, ranks=ranks
            )
            self._call("REGISTER_KV_CACHE", registration)

    def end(self) -> None:
        """Close the connection, whatever it still waits for or holds."""
        if self._client is not None:
            self._client.close()
            self._client = None

    def load(self, prompt: Prompt) -> int:
        """Look up, load what has arrived while the rest arrives, then the hit; return its chunks."""
        self._request += 1
        wait_s = self.chance.choice([0.0, 0.05, 1.0])
        reply = self._call("LOOKUP", m.Lookup(self._key(prompt, len(prompt)), wait_s))
        deferred = reply.pending
        until = time.monotonic() + _PATIENCE_S
        while reply.pending:
            assert time.monotonic() < until, f"a load that does not end: {reply}"
            if self.chance.random() < 0.3:
                self._retrieve(prompt, reply)
            wait_s = self.chance.choice([0.0, 0.1, 1.0])
            more_than = self.chance.choice([-1, reply.hit_tokens])
            reply = self._call("QUERY_PREFETCH_STATUS", m.PrefetchQuery(reply.ticket, wait_s, more_than))
        self._retrieve(prompt, reply)
        if reply.ticket:
            self._call("FREE_LOOKUP_LOCKS", m.TicketRef(reply.ticket))
        self.from_l2 += deferred and reply.hit_tokens > 0
        return int(reply.hit_tokens) // CHUNK_TOKENS

    def store(self, prompt: Prompt, *, ranks: int = SHARDS) -> int:
        """Store what L1 lacks, by the first `ranks` instances; return the objects."""
        stored = 0
        for instance_id, shards in self._instances[:ranks]:
            plan = self._call("PREPARE_STORE", m.Prepare(self._key(prompt, len(prompt), shards[0]), instance_id))
            if plan.lease:
                for place in plan.ranges:
                    self._arena[place.offset : place.offset + place.length] = content(
                        prompt.digests[place.chunk], shards[place.group]
                    )
                stored += self._call("COMMIT_STORE", m.Commit(plan.lease)).outcome.stored
        return stored

    def leave(self, prompt: Prompt) -> None:
        """Leave something undone, in one of many ways."""
        way = self.chance.randrange(5)
        asked = m.Lookup(self._key(prompt, len(prompt)), 1.0)
        if way == 0:
            self._connected.send("LOOKUP", asked)
            self.begin()
        elif way == 1:
            self._connected.send("LOOKUP", asked)
            self._call("END_SESSION", m.EndSession(asked.key.request_id))
        elif way == 2:
            self._call("LOOKUP", asked)  # its ticket is forgotten
        elif way == 3:
            instance_id, shards = self._instances[-1]
            plan = self._call("PREPARE_STORE", m.Prepare(self._key(prompt, len(prompt), shards[0]), instance_id))
            for place in plan.ranges:
                self._arena[place.offset : place.offset + place.length] = b"Z" * place.length
            if plan.lease:
                self._call("ABORT", m.LeaseRef(plan.lease))
        else:
            reply = self._call("LOOKUP", asked)
            if reply.pending:
                self._connected.send("QUERY_PREFETCH_STATUS", m.PrefetchQuery(reply.ticket, 1.0))
            if reply.ticket:
                self._call("CANCEL", m.Cancel(ticket=reply.ticket))

    def _retrieve(self, prompt: Prompt, reply: m.LookupReply) -> None:
        """Load what a ticket pins, by every rank."""
        chunks = reply.hit_tokens // CHUNK_TOKENS
        for instance_id, shards in self._instances if chunks else ():
            plan = self._call("PREPARE_RETRIEVE", m.Prepare(self._key(prompt, chunks, shards[0]), instance_id))
            assert plan.hit, f"what a ticket pins cannot be retrieved: {plan.reason}"
            assert len(plan.ranges) == chunks * len(shards)
            for place in plan.ranges:
                found = self._arena[place.offset : place.offset + place.length]
                shard = shards[place.group]
                wrong = found != content(prompt.digests[place.chunk], shard)
                assert not wrong, f"WRONG BYTES: chunk {place.chunk}, shard {shard}"
            assert self._call("COMMIT_RETRIEVE", m.LeaseRef(plan.lease)).held
            self.loads += 1

    def _key(self, prompt: Prompt, end: int, rank: int | None = None) -> CacheKey:
        request, digests = f"r{self._request % 4}", b"".join(prompt.digests[:end])
        return CacheKey("m", SHARDS, rank, NAMESPACE, 0, end * CHUNK_TOKENS, request, digests=digests)

    @property
    def _connected(self) -> WireClient:
        assert self._client is not None
        return self._client

    @property
    def _arena(self) -> Any:
        arena = self._connected.arena
        assert arena is not None
        return arena

    def _call(self, name: str, payload: Any) -> Any:
        """Raises `Lost`; an error that no fault of the node explains is one of the test."""
        client = self._connected
        request_id = client.send(name, payload)
        until = time.monotonic() + _PATIENCE_S
        while not client.socket.poll(50):
            if self._hung_up():
                raise self._lost(ConnectionResetError("the server has ended"))
            assert time.monotonic() < until, f"no answer to {name}"
        try:
            answer = client.answer(request_id, name)
        except (OSError, KVFrameworkError) as error:
            raise self._lost(error) from None
        self._faults_seen = self._node.faults
        return answer

    def _hung_up(self) -> bool:
        live = self._connected._live
        assert live is not None
        live.setblocking(False)
        with suppress(BlockingIOError):
            return not live.recv(1)
        return False

    def _lost(self, error: Exception) -> Lost:
        undisturbed = self._node.faults == self._faults_seen and not self._faults_seen % 2
        # A ticket ends with END_SESSION of its request, of which there are few names.
        assert not undisturbed or isinstance(error, LeaseUnknown), repr(error)
        self.end()
        return Lost(str(error))


@functools.lru_cache(maxsize=2048)
def content(digest: bytes, shard: int) -> bytes:
    """The KV of a shard of a chunk: noise beside few exponents, which shrink."""
    seed = digest + bytes([shard])
    noise = hashlib.shake_128(seed).digest(_PERIOD)
    period = bytes(byte for low in noise for byte in (low, 0x3C + low % 4))
    return (period * (OBJECT_BYTES // len(period) + 1))[:OBJECT_BYTES]

"""Owns the requests that one client of `bench scale` makes, each timed and its answer checked. In the client's process.

Every call blocks until its answer is here and returns the seconds that took, from the request to the answer.
"""

from __future__ import annotations

import time

import zmq

from kvframework.api import Registration
from kvframework.bench.bare_peer import ECHO
from kvframework.bench.errors import BenchFailed, WrongBytes
from kvframework.bench.scale.prompts import Prompts, contents, shape
from kvframework.client import KVClient
from kvframework.client.transfers import bare_transfer
from kvframework.wire import messages as m
from kvframework.wire.frames import join
from kvframework.wire.non_gpu import non_gpu_layout


class Requests:
    """Registers at once. For one thread. Raises `BenchFailed` if an answer is not the one that is expected."""

    def __init__(
        self, client: KVClient, dealer: zmq.Socket[bytes], *, instance_id: int, seed: int, chunks: int
    ) -> None:
        self._client = client
        self._dealer = dealer
        told = shape(instance_id)
        registered = client.request("REGISTER_KV_CACHE_NON_GPU_CONTEXT", told, m.Registered)
        if not client.maps_arena:
            raise BenchFailed("the server's arena is not mapped here")
        layout = non_gpu_layout(told)
        self._registration = Registration(instance_id, 0, registered.namespace, layout, registered.desc)
        self._prompts = Prompts(seed, chunks, registered.namespace)
        self.object_bytes = registered.desc.nbytes
        lookup = m.Lookup(self._prompts.key(self._prompts.digests(0), rank=None))
        self._payload = bytes(sum(len(frame) for frame in join(1, "LOOKUP", lookup)))

    @property
    def request_bytes(self) -> int:
        """Size of the frames of a LOOKUP, and of the echo."""
        return len(self._payload)

    def echo(self, _number: int) -> float:
        """A bare message to the bare peer and back."""
        started = time.perf_counter()
        self._dealer.send_multipart([ECHO, self._payload])
        try:
            answer = self._dealer.recv_multipart()[-1]
        except zmq.Again:
            raise BenchFailed("the bare peer does not answer") from None
        seconds = time.perf_counter() - started
        if len(answer) != len(self._payload):
            raise BenchFailed(f"echoed {len(answer)} bytes of {len(self._payload)}")
        return seconds

    def lookup(self, number: int) -> float:
        """LOOKUP of a prompt that is all in L1. What it pinned is freed afterwards, outside the time."""
        payload = m.Lookup(self._prompts.key(self._prompts.digests(number), rank=None))
        started = time.perf_counter()
        reply = self._client.request("LOOKUP", payload, m.LookupReply)
        seconds = time.perf_counter() - started
        if reply.ticket:
            self._client.request("FREE_LOOKUP_LOCKS", m.TicketRef(reply.ticket), m.Freed)
        if (reply.hit_tokens, reply.pending) != (self._prompts.tokens, False):
            raise BenchFailed(
                f"a lookup found {reply.hit_tokens} tokens", available=f"{self._prompts.tokens} were expected"
            )
        return seconds

    def store(self, number: int, *, may_be_there: bool = False) -> float:
        """PREPARE_STORE, the bytes, COMMIT_STORE."""
        digests = self._prompts.digests(number)
        objects = contents(digests, self.object_bytes)
        transfer = bare_transfer(self._registration, self._prompts.key(digests, rank=0))
        started = time.perf_counter()
        with self._client.prepare_store(transfer).result() as plan:
            for place, data in zip(plan.ranges, objects, strict=False):
                plan.arena[place.offset : place.offset + place.length] = data
            outcome = plan.commit().result()
        seconds = time.perf_counter() - started
        if may_be_there and outcome.present == self._prompts.chunks:
            return seconds
        if outcome.stored != self._prompts.chunks:
            raise BenchFailed(f"stored {outcome.stored} of {self._prompts.chunks} chunks")
        return seconds

    def retrieve(self, number: int) -> float:
        """PREPARE_RETRIEVE, all bytes read and compared, COMMIT_RETRIEVE. Raises `WrongBytes`."""
        digests = self._prompts.digests(number)
        objects = contents(digests, self.object_bytes)
        transfer = bare_transfer(self._registration, self._prompts.key(digests, rank=0))
        started = time.perf_counter()
        with self._client.prepare_load(transfer).result() as plan:
            same = len(plan.ranges) == len(objects) and all(
                bytes(plan.arena[place.offset : place.offset + place.length]) == data
                for place, data in zip(plan.ranges, objects, strict=True)
            )
            loaded = plan.commit().result()
        seconds = time.perf_counter() - started
        if not loaded.ok:
            raise BenchFailed("a retrieve of what was stored is a miss")
        if not same:
            raise WrongBytes("what came back is not what was stored", hint="no figures are reported")
        return seconds

    def clear(self) -> None:
        self._client.request("CLEAR", m.Clear(), m.Cleared)

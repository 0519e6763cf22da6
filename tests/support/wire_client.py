"""A plain client of the wire protocol for tests: one DEALER, one liveness socket, no threads, and only the structs of
this library. It sees the same as a client in another language."""

from __future__ import annotations

import array
import itertools
import mmap
import os
import socket
from collections.abc import Sequence
from typing import Any

import msgspec
import zmq

from kvframework.api.requests import CacheKey, RequestSpec
from kvframework.client import CanonicalInstance, KVClient, register_canonical
from kvframework.errors import KVFrameworkError
from kvframework.messaging.curve import CurveKeys
from kvframework.wire import messages as m
from kvframework.wire.frames import ErrorPayload, decode, error_from, join, split
from kvframework.wire.protocol import REQUESTS


class WireClient:
    """A client that sends requests and waits for their answers. Error frames raise typed errors."""

    def __init__(
        self,
        endpoint: str,
        *,
        timeout: float = 20.0,
        hello: bool = True,
        liveness: bool = True,
        keys: CurveKeys | None = None,
        requests: Sequence[RequestSpec] = (),
    ) -> None:
        """`requests` are those of plugins, in addition to the core's."""
        self._table = REQUESTS | {spec.name: spec for spec in requests}
        self._context = zmq.Context()
        self.socket = self._context.socket(zmq.DEALER)
        self.socket.linger = 0
        if keys is not None:
            keys.load().apply(self.socket)
        self.socket.connect(endpoint)
        self._timeout = timeout
        self._ids = itertools.count(1)
        self._live: socket.socket | None = None
        self.arena: mmap.mmap | None = None
        self.hello: m.HelloReply | None = None
        try:
            if hello:
                self.say_hello(liveness=liveness)
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> WireClient:
        return self

    def __exit__(self, *_exc: object) -> None:
        self.close()

    def close(self) -> None:
        if self._live is not None:
            self._live.close()
        self.socket.close()
        self._context.term()
        self.arena = None

    def say_hello(self, *, liveness: bool = True) -> None:
        self.hello = self.call("HELLO", m.Hello(client="test", pid=os.getpid()))
        if liveness and self.hello.liveness:
            self._live = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            self._live.settimeout(self._timeout)
            self._live.connect(self.hello.liveness)
            self._live.sendall(self.hello.session)
            _, fds, _, _ = socket.recv_fds(self._live, 1, 1)
            if not fds:
                raise ConnectionError("the server closed the liveness socket")
            self.arena = mmap.mmap(fds[0], os.fstat(fds[0]).st_size)
            os.close(fds[0])

    def send(self, name: str, payload: Any, *buffers: bytes) -> int:
        request_id = next(self._ids)
        self.socket.send_multipart(join(request_id, name, payload, buffers))
        return request_id

    def receive(self, timeout: float | None = None) -> tuple[int, str, Any]:
        """Return the request id, type, and undecoded payload (or error) of the next answer."""
        wait = self._timeout if timeout is None else timeout
        if not self.socket.poll(wait * 1000):
            raise TimeoutError(f"no answer within {wait} s")
        envelope = split(self.socket.recv_multipart())
        if envelope.type == "ERROR":
            return envelope.request_id, "ERROR", error_from(decode(envelope.payload, ErrorPayload, where="error"))
        return envelope.request_id, envelope.type, envelope.payload

    def answer(self, request_id: int, name: str) -> Any:
        answered, kind, payload = self.receive()
        while answered != request_id:
            answered, kind, payload = self.receive()
        if isinstance(payload, KVFrameworkError):
            raise payload
        assert kind == name
        return decode(payload, self._table[name].response, where=name)

    def call(self, name: str, payload: Any, *buffers: bytes) -> Any:
        return self.answer(self.send(name, payload, *buffers), name)

    def status(self) -> dict[str, Any]:
        document: dict[str, Any] = msgspec.json.decode(self.call("REPORT_STATUS", m.Empty()).document)
        return document

    # the engine-driven path by hand

    def register(self, instance_id: int = 1, **fields: Any) -> m.Registered:
        """Send the eight-field registration of a small model: 2 layers, 8 elements, 16-token blocks."""
        payload = {
            "instance_id": instance_id,
            "model_name": "tiny",
            "world_size": 1,
            "block_size": 16,
            "num_layers": 2,
            "hidden_dim_size": 8,
            "dtype_str": "float32",
            "use_mla": False,
            **fields,
        }
        registered: m.Registered = self.call(
            "REGISTER_KV_CACHE_NON_GPU_CONTEXT", m.RegisterNonGpuContextPayload(**payload)
        )
        return registered

    def prepare_store(self, key: CacheKey, instance_id: int = 1) -> m.StorePlan:
        plan: m.StorePlan = self.call("PREPARE_STORE", m.Prepare(key, instance_id))
        return plan

    def prepare_retrieve(self, key: CacheKey, instance_id: int = 1) -> m.RetrievePlan:
        plan: m.RetrievePlan = self.call("PREPARE_RETRIEVE", m.Prepare(key, instance_id))
        return plan

    def store(self, key: CacheKey, fill: bytes, instance_id: int = 1) -> m.Committed | None:
        """Store objects filled with repetitions of `fill`; returns None when there was nothing to write."""
        plan = self.prepare_store(key, instance_id)
        if not plan.lease:
            return None
        self.write(plan, fill)
        committed: m.Committed = self.call("COMMIT_STORE", m.LeaseRef(plan.lease))
        return committed

    def write(self, plan: m.StorePlan, fill: bytes) -> None:
        assert self.arena is not None
        for place in plan.ranges:
            self.arena[place.offset : place.offset + place.length] = (fill * place.length)[: place.length]

    def retrieve(self, key: CacheKey, instance_id: int = 1) -> bytes | None:
        """Return the bytes of all objects in order, None for a miss or a lost pin."""
        assert self.arena is not None
        plan = self.prepare_retrieve(key, instance_id)
        if not plan.hit:
            return None
        found = b"".join(self.arena[place.offset : place.offset + place.length] for place in plan.ranges)
        held = self.call("COMMIT_RETRIEVE", m.LeaseRef(plan.lease)).held
        return found if held else None

    def lookup(self, key: CacheKey) -> m.LookupReply:
        reply: m.LookupReply = self.call("LOOKUP", m.Lookup(msgspec.structs.replace(key, worker_id=None)))
        return reply

    def settled(self, reply: m.LookupReply) -> m.LookupReply:
        """The reply to a LOOKUP once nothing is pending."""
        while reply.pending:
            reply = self.call("QUERY_PREFETCH_STATUS", m.PrefetchQuery(reply.ticket, 1.0))
        return reply

    def hit(self, key: CacheKey) -> int:
        """Look up until nothing is pending; the hit in tokens. Its ticket is freed."""
        reply = self.settled(self.lookup(key))
        if reply.ticket:
            self.call("FREE_LOOKUP_LOCKS", m.TicketRef(reply.ticket))
        return reply.hit_tokens


def register_tiny(client: KVClient, instance_id: int = 1, model_name: str = "tiny", **fields: Any) -> CanonicalInstance:
    """The same model, registered by the library."""
    values = {"block_size": 16, "num_layers": 2, "hidden_dim_size": 8, "dtype": "float32", **fields}
    return register_canonical(client, instance_id=instance_id, model_name=model_name, **values)


def key_for(
    registered: m.Registered, tokens: Sequence[int], *, start: int = 0, end: int | None = None, **fields: Any
) -> CacheKey:
    """Return the key of rank 0 for `tokens` of the model that `WireClient.register` registers."""
    last = len(tokens) if end is None else end
    values: dict[str, Any] = {
        "model_name": "tiny",
        "world_size": 1,
        "worker_id": 0,
        "namespace": registered.namespace,
        "start": start,
        "end": last,
        "request_id": "r",
        "tokens": array.array("I", tokens).tobytes(),
        **fields,
    }
    return CacheKey(**values)

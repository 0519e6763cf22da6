"""Attacks on a server by strangers and bad clients: each function is one burst from the harness's process, after which
the server must answer an honest client. Raises the errors of that client, or `TimeoutError`."""

from __future__ import annotations

import random
import socket
from collections.abc import Callable
from contextlib import ExitStack, suppress
from typing import Any

import msgspec
import zmq

from kvframework.api.keys import CacheKey
from kvframework.errors import KVFrameworkError
from kvframework.wire import messages as m
from kvframework.wire.protocol import REQUESTS
from tests.core.tiers.prompts import CHUNK_TOKENS, prompt
from tests.support.wire_client import WireClient

_ANSWER_S = 5.0
_MODEL = "stranger"  # a separate namespace: any client that may connect may also store
_PROMPTS = 8
# Requests that affect other clients if their payload happens to be valid.
_NOT_SENT = {"CLEAR", "DRAIN"}


def frames(endpoint: str, chance: random.Random) -> None:
    """Messages of any number of frames, and bytes that are not ZMQ."""
    context = zmq.Context()
    dealer = context.socket(zmq.DEALER)
    try:
        dealer.linger = 0
        dealer.connect(endpoint)
        for _ in range(100):
            dealer.send_multipart(_frames(chance), zmq.NOBLOCK)
        for _ in range(5):
            with socket.socket(socket.AF_UNIX) as raw:
                raw.settimeout(_ANSWER_S)
                raw.connect(endpoint.removeprefix("ipc://"))
                raw.sendall(chance.randbytes(chance.randrange(1, 5000)))
        _honest(endpoint)
    finally:
        dealer.close(0)
        context.term()


def payloads(endpoint: str, chance: random.Random) -> None:
    """Requests of a client with a session, each with a random change."""
    with WireClient(endpoint, timeout=_ANSWER_S) as client:
        key = _key(_registered(client, chance), chance)
        for _ in range(100):
            name = chance.choice(sorted(REQUESTS.keys() - _NOT_SENT))
            payload = _changed(msgspec.msgpack.encode(_payload(name, key, chance)), chance)
            buffers = [chance.randbytes(chance.choice((0, 7, 32 << 10))) for _ in range(chance.choice((0, 0, 1, 3)))]
            number = chance.randrange(1 << 64).to_bytes(8, "little")
            client.socket.send_multipart([number, name.encode(), payload, *buffers])
        with suppress(TimeoutError):
            while True:
                client.receive(0.05)
        _honest(endpoint)


def half_open(endpoint: str, chance: random.Random) -> None:
    """Liveness sockets that send too little, or name no session."""
    with ExitStack() as stack:
        client = stack.enter_context(WireClient(endpoint, timeout=_ANSWER_S, liveness=False))
        assert client.hello is not None
        for _ in range(80):
            live = stack.enter_context(socket.socket(socket.AF_UNIX))
            live.settimeout(_ANSWER_S)
            with suppress(OSError):  # the backlog is full, or the server has closed this one already
                live.connect(client.hello.liveness)
                live.sendall(chance.randbytes(chance.choice((0, 5, 16, 40))))
        _honest(endpoint)


def die_with_pins(endpoint: str, chance: random.Random) -> None:
    """Clients that end between LOOKUP and RETRIEVE, and during a RETRIEVE."""
    with ExitStack() as stack:
        first = stack.enter_context(WireClient(endpoint, timeout=_ANSWER_S))
        instance = _instance(chance)
        key = _key(_registered(first, chance, instance), chance)
        first.store(key, b"stranger", instance)
        first.call("PREPARE_RETRIEVE", m.Prepare(key, instance))
        for _ in range(20):
            stack.enter_context(WireClient(endpoint, timeout=_ANSWER_S)).lookup(key)
    _honest(endpoint)


def die_with_leases(endpoint: str, chance: random.Random) -> None:
    for _ in range(10):
        with WireClient(endpoint, timeout=_ANSWER_S) as client:
            instance = _instance(chance)
            plan = client.prepare_store(_key(_registered(client, chance, instance), chance), instance)
            if plan.lease:
                client.write(plan, b"never published")
    _honest(endpoint)


STRANGERS: dict[str, Callable[[str, random.Random], None]] = {
    each.__name__: each for each in (frames, payloads, half_open, die_with_pins, die_with_leases)
}


def _honest(endpoint: str) -> None:
    with WireClient(endpoint, timeout=_ANSWER_S) as client:
        client.call("NOOP", m.Empty())


def _frames(chance: random.Random) -> list[bytes]:
    number = chance.randbytes(8)
    name = chance.choice([*REQUESTS, "ERROR", "x" * 65, "\0"]).encode()
    return chance.choice(
        (
            [chance.randbytes(chance.randrange(40)) for _ in range(chance.randrange(1, 12))],
            [number, name, chance.randbytes(chance.randrange(200))],
            [number, name, b"\x91" * 10_000],
            [number, name, b"\x80", *([b""] * chance.randrange(1, 50))],
            [number],
            [b""] * chance.randrange(1, 5),
        )
    )


def _payload(name: str, key: CacheKey, chance: random.Random) -> Any:
    known = {
        "HELLO": m.Hello("stranger", 1),
        "LOOKUP": m.Lookup(msgspec.structs.replace(key, worker_id=None)),
        "PREPARE_STORE": m.Prepare(key, _instance(chance)),
        "PREPARE_RETRIEVE": m.Prepare(key, _instance(chance)),
        "STORE_CPU_CHUNKS": m.StoreCpuChunks(key, _instance(chance), b"\0\0\0\0"),
        "STORE": m.TransferRequest(key, _instance(chance), (b"\0\0\0\0",)),
        "RETRIEVE": m.TransferRequest(key, _instance(chance), (b"\0\0\0\0",)),
        "CANCEL": m.Cancel(chance.randrange(100), "x"),
    }
    return known.get(name) or m.LeaseRef(chance.randbytes(8).hex())


def _changed(payload: bytes, chance: random.Random) -> bytes:
    at = chance.randrange(len(payload) + 1)
    return chance.choice(
        (
            payload,
            payload[:at],
            payload[:at] + chance.randbytes(4) + payload[at:],
            payload[:at] + chance.randbytes(1) + payload[at + 1 :],
        )
    )


def _instance(chance: random.Random) -> int:
    return 1000 + chance.randrange(1000)


def _registered(client: WireClient, chance: random.Random, instance: int = 0) -> bytes:
    with suppress(KVFrameworkError):
        return client.register(instance or _instance(chance), model_name=_MODEL).namespace
    return bytes(16)


def _key(namespace: bytes, chance: random.Random) -> CacheKey:
    own = prompt(range(chance.randrange(_PROMPTS), _PROMPTS))
    digests = b"".join(own.digests)
    return CacheKey(_MODEL, 1, 0, namespace, 0, len(own) * CHUNK_TOKENS, "r1", digests=digests)

"""The run of `kvframework bench node`: the same requests to a bare peer, to the server with all answers, without those
that are of no use, with loads that LOOKUPs have granted, and by keys that the engines name, in turn.

The times of requests are drawn before: a server that is late meets the next ones all the same, and their latency counts
from when they were due.
"""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import msgspec
import zmq

from kvframework.api.keys import NAMESPACE_BYTES, CacheKey
from kvframework.api.layout import KVLayout, LayerGroup
from kvframework.wire import messages as m
from kvframework.wire.frames import join
from kvframework.wire.protocol import SINCE_0_3
from kvframework_bench.console import Stage, no_progress
from kvframework_bench.errors import BenchFailed
from kvframework_bench.node.clients import CHUNK_TOKENS, MODEL, Client, Echoed, KeyScheduler, Scheduler, Worker, digests
from kvframework_bench.node.figures import NodeFigures, NodeRow
from kvframework_bench.process import scratch
from kvframework_bench.rounds import Latency, Spread
from kvframework_bench.server import run_ns, running_server
from kvframework_bench.workload import TRANSPORT
from kvframework_bench.zmq_reference import running_zmq_peer

PROMPTS = 16
_ARENA_BYTES = 256 << 20
_LATE_S = 10.0
_GROUP = LayerGroup(1, CHUNK_TOKENS, 1, 16, "bfloat16", planes=1)
_NAMESPACE = MODEL.encode().ljust(NAMESPACE_BYTES)
_OBJECTS = LayerGroup(1, CHUNK_TOKENS, 1, 512, "uint8", 1, ("block", "dim"), packing=MODEL)
_SHAPE = m.RegisterKvCache(0, MODEL, 1, 0, _NAMESPACE, TRANSPORT, KVLayout("paged", (_GROUP,), 1))


class Sizes(msgspec.Struct, frozen=True):
    """`rate` in requests a second of each client; a sample takes `seconds`."""

    engines: int = 8
    ranks: int = 8
    rate: float = 50.0
    chunks: int = 8
    rounds: int = 5
    seconds: float = 3.0


FULL = Sizes()
QUICK = Sizes(engines=2, ranks=2, rounds=2, seconds=0.2)


@dataclass(frozen=True)
class _Sample:
    lookups: list[float]
    loads: list[float]
    seconds: float
    server_s: float

    @property
    def requests(self) -> int:
        return len(self.lookups) + len(self.loads)


def bench_node(sizes: Sizes, *, seed: int, stage: Stage = no_progress) -> NodeFigures:
    """Measure; takes about a minute. Raises `BenchFailed`, also when an answer is wrong."""
    chance = random.Random(seed)
    samples: dict[str, list[_Sample]] = {}
    with ExitStack() as stack:
        directory = stack.enter_context(scratch())
        peer = stack.enter_context(running_zmq_peer(directory))
        settings = [f"server.chunk_size={CHUNK_TOKENS}"]
        server = stack.enter_context(running_server(directory, _ARENA_BYTES, settings))
        with server.client():
            pass  # waits for the arena
        context = zmq.Context()
        stack.callback(context.destroy, 0)
        sessions = _connected(context, server.endpoint, sizes, seed, stack)
        lookup = m.Lookup(_key(sizes, seed, 0, None))
        nbytes = sum(len(frame) for frame in join(1, "LOOKUP", lookup))
        echoes = [Echoed(context, peer.endpoint, nbytes) for _ in sessions]
        ways: dict[str, tuple[Sequence[Client], int]] = {"bare echo": (echoes, peer.pid)}
        ways["all answered"] = (sessions, server.child.pid)
        schedulers = [session for session in sessions if isinstance(session, Scheduler)]
        if SINCE_0_3 in sessions[0].features:
            ways["one way back"] = (sessions, server.child.pid)
            ways["granted"] = (schedulers, server.child.pid)
            keyed = _connected_by_keys(context, server.endpoint, sizes, seed, stack)
            ways["by keys"] = (keyed, server.child.pid)
        with stage("serving a node", sizes.rounds) as advance:
            for _ in range(sizes.rounds):
                for way, (clients, pid) in ways.items():
                    for session in sessions:
                        session.one_way = way in ("one way back", "granted")
                    for scheduler in schedulers:
                        scheduler.grants = way == "granted"
                    everyone: Sequence[Client] = clients if way in ("bare echo", "by keys") else sessions
                    samples.setdefault(way, []).append(_take(clients, everyone, sizes, chance, pid))
                advance()
    rows = [_row(way, taken, samples["bare echo"]) for way, taken in samples.items()]
    return NodeFigures(sizes.engines, sizes.ranks, sizes.rate, sizes.chunks, seed, rows)


def _connected(
    context: zmq.Context[Any], endpoint: str, sizes: Sizes, seed: int, stack: ExitStack
) -> list[Scheduler | Worker]:
    """Return the clients, an engine's scheduler before its workers, with all prompts stored."""
    made: list[Scheduler | Worker] = []
    for engine in range(sizes.engines):
        workers: dict[int, Worker] = {}
        for rank in range(sizes.ranks):
            instance_id = engine * sizes.ranks + rank + 1
            keys: list[CacheKey] = []
            worker = Worker(context, endpoint, keys, instance_id)
            stack.callback(worker.close)
            shape = msgspec.structs.replace(_SHAPE, instance_id=instance_id, world_size=sizes.ranks, rank=rank)
            worker.call("REGISTER_KV_CACHE", shape, m.Registered)
            keys += [_key(sizes, seed, prompt, rank) for prompt in range(PROMPTS)]
            if not engine:
                for key in keys:
                    worker.store(key)
            workers[instance_id] = worker
        asked = [_key(sizes, seed, prompt, None) for prompt in range(PROMPTS)]
        scheduler = Scheduler(context, endpoint, asked, workers)
        stack.callback(scheduler.close)
        made += [scheduler, *workers.values()]
    return made


def _connected_by_keys(
    context: zmq.Context[Any], endpoint: str, sizes: Sizes, seed: int, stack: ExitStack
) -> list[KeyScheduler]:
    """Return the schedulers of as many engines that name their objects themselves, with all prompts stored."""
    made: list[KeyScheduler] = []
    namespace = b"by keys".ljust(NAMESPACE_BYTES)
    content = [_key(sizes, seed, prompt, None) for prompt in range(PROMPTS)]
    keys = [msgspec.structs.replace(key, world_size=1, namespace=namespace) for key in content]
    layout = KVLayout("opaque", (_OBJECTS,), chunk_tokens=CHUNK_TOKENS)
    for engine in range(sizes.engines):
        scheduler = KeyScheduler(context, endpoint, keys, (1 << 32) + engine)
        stack.callback(scheduler.close)
        shape = m.RegisterKvCache((1 << 32) + engine, MODEL, 1, 0, namespace, TRANSPORT, layout)
        scheduler.call("REGISTER_KV_CACHE", shape, m.Registered)
        if not engine:
            for key in keys:
                scheduler.store(key)
        made.append(scheduler)
    return made


def _key(sizes: Sizes, seed: int, prompt: int, rank: int | None) -> CacheKey:
    end = sizes.chunks * CHUNK_TOKENS
    content = digests(seed, prompt, sizes.chunks)
    return CacheKey(MODEL, sizes.ranks, rank, _NAMESPACE, 0, end, f"prompt {prompt}", digests=content)


def _take(
    asking: Sequence[Client], clients: Sequence[Client], sizes: Sizes, chance: random.Random, server_pid: int
) -> _Sample:
    """Have those of the clients ask that do, for a while, at random times. Blocks until everything is answered."""
    times = []
    for client in clients:
        client.latencies = []
    for client in asking:
        at = chance.expovariate(sizes.rate)
        while at < sizes.seconds:
            times.append((at, client))
            at += chance.expovariate(sizes.rate)
    times.sort(key=lambda each: each[0])
    poller = zmq.Poller()
    of = {}
    for client in clients:
        poller.register(client.socket, zmq.POLLIN)
        of[client.socket] = client
    before, began, asked = run_ns(server_pid), time.perf_counter(), 0
    while asked < len(times) or any(client.is_busy for client in clients):
        now = time.perf_counter() - began
        while asked < len(times) and times[asked][0] <= now:
            at, client = times[asked]
            client.ask(began + at)
            asked += 1
        wait_s = times[asked][0] - now if asked < len(times) else _LATE_S
        ready = poller.poll(max(int(wait_s * 1000), 0))
        for each, _ in ready:
            of[each].received()
        if not ready and asked == len(times):
            raise BenchFailed(f"the server does not answer within {_LATE_S:.0f} s")
    seconds = time.perf_counter() - began
    server_s = (run_ns(server_pid) - before) / 1e9
    lookups = [each for client in clients if not isinstance(client, Worker) for each in client.latencies]
    loads = [
        each
        for client in clients
        if isinstance(client, KeyScheduler) or not isinstance(client, Scheduler)
        for each in client.latencies
    ]
    if isinstance(clients[0], Echoed):
        loads = []
    return _Sample(lookups, loads, seconds, server_s)


def _row(way: str, taken: Sequence[_Sample], echoes: Sequence[_Sample]) -> NodeRow:
    own = [sample.server_s / sample.requests for sample in taken]
    bare = [sample.server_s / sample.requests for sample in echoes]
    lookups = Latency.of([sample.lookups for sample in taken])
    return NodeRow(
        way=way,
        lookups=lookups,
        loads=Latency.of([sample.loads for sample in taken]) if taken[0].loads else lookups,
        requests_s=Spread.of([sample.requests / sample.seconds for sample in taken]),
        cores=Spread.of([sample.server_s / sample.seconds for sample in taken]),
        server_us=Spread.of([each * 1e6 for each in own]),
        ratio_to_echo=Spread.of([a / b for a, b in zip(own, bare, strict=True)]),
    )

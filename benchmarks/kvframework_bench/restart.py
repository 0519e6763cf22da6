"""`kvframework bench restart`: kill -9 of a server that `kvframework hold` keeps, until the first hit; and memcached -e
beside it, where that is installed."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import msgspec
import zmq

from kvframework.client import KVClient
from kvframework.keeper.sockets import ask
from kvframework.wire import messages as m
from kvframework.wire.frames import decode, join, split
from kvframework.wire.protocol import offer
from kvframework_bench.console import Stage, no_progress
from kvframework_bench.document import MemcachedFigures, RestartFigures
from kvframework_bench.errors import BenchFailed
from kvframework_bench.prefix import MODEL, Prefixes
from kvframework_bench.process import BenchChild, await_end, running, scratch
from kvframework_bench.rounds import Latency, Spread
from kvframework_bench.server import PATIENT, status

# 16 tokens of one layer with K and V of 64 halves each.
OBJECT_BYTES = 4096
_SHAPE = m.RegisterNonGpuContextPayload(
    instance_id=1,
    model_name=MODEL,
    world_size=1,
    block_size=16,
    num_layers=1,
    hidden_dim_size=64,
    dtype_str="bfloat16",
    use_mla=False,
)
_CHUNKS = 100
_PATIENCE_S = 120.0
_POLL_S = 0.001


def bench_restart(objects: int, kills: int, *, stage: Stage = no_progress) -> RestartFigures:
    """Measure; takes some seconds for the objects and two for a kill. Raises `BenchFailed`, also for a miss."""
    capacity = max(objects * OBJECT_BYTES * 5 // 4, 64 << 20)
    hits, reads = [], []
    with scratch() as directory, _held(directory, capacity) as child:
        endpoint = f"ipc://{directory}/server.sock"
        control = f"{directory}/server.sock.hold"
        lookup = _filled(endpoint, objects)
        with stage("kills", kills) as advance:
            for _ in range(kills):
                # A start that did not serve would be one of three that end in a cold one.
                _await_age(endpoint, 1.5)
                os.kill(ask(control, {"do": "status"}, _PATIENCE_S)["server"]["pid"], signal.SIGKILL)
                began = time.perf_counter()
                _await_hit(child, endpoint, lookup)
                hits.append(time.perf_counter() - began)
                with KVClient(endpoint, name="bench", deadline_scale=PATIENT) as client:
                    client.hello  # noqa: B018
                    recovered = status(client)["l1"]["recovered"]
                if recovered["objects"] < objects // _CHUNKS * _CHUNKS:
                    raise BenchFailed(
                        f"the next server recovered {recovered['objects']} objects", available=f"{objects} objects"
                    )
                reads.append(recovered["seconds"])
                advance()
        return RestartFigures(
            objects=objects,
            object_bytes=OBJECT_BYTES,
            first_hit=Latency.of([hits]),
            first_hit_s=Spread.of(hits),
            read_s=Spread.of(reads),
            target_s=1.0,
            memcached=_memcached(directory, min(objects, 10_000)),
        )


@contextmanager
def _held(directory: Path, capacity: int) -> Iterator[BenchChild]:
    command = [sys.executable, "-m", "kvframework.cli.main", "hold", "--"]
    settings = f"server.endpoint=ipc://{directory}/server.sock", f"l1.capacity={capacity}", "server.chunk_size=16"
    for setting in settings:
        command += ["--set", setting]
    with running("hold", command, directory) as child:
        yield child


def _filled(endpoint: str, objects: int) -> bytes:
    """Store all objects; return the LOOKUP of the last prompt."""
    with KVClient(endpoint, name="bench", deadline_scale=PATIENT, connect_timeout_s=_PATIENCE_S) as client:
        _await_age(endpoint, 0.0)
        client.hello  # noqa: B018
        while status(client)["l1"]["ready_bytes"] < objects * OBJECT_BYTES:
            time.sleep(_POLL_S)
        prefixes = Prefixes(client, _SHAPE)
        for number in range(max(objects // _CHUNKS, 1)):
            request = prefixes.request([number] * (_CHUNKS * prefixes.chunk_tokens))
            prefixes.store(request)
        return msgspec.msgpack.encode(m.Lookup(prefixes.key(request, rank=None)))


def _await_age(endpoint: str, seconds: float) -> None:
    with KVClient(endpoint, name="bench", deadline_scale=PATIENT, connect_timeout_s=_PATIENCE_S) as client:
        client.hello  # noqa: B018
        while status(client)["server"]["uptime_s"] < seconds:
            time.sleep(_POLL_S)


def _await_hit(child: BenchChild, endpoint: str, lookup: bytes) -> None:
    """Return with the first hit. A bare socket: a client's pauses between its tries would be measured too."""
    wanted = msgspec.msgpack.decode(lookup, type=m.Lookup)
    context = zmq.Context()
    try:
        dealer = context.socket(zmq.DEALER)
        dealer.setsockopt(zmq.RECONNECT_IVL, 2)
        dealer.connect(endpoint)
        deadline = time.monotonic() + _PATIENCE_S
        for frames in (join(1, "HELLO", offer("bench", os.getpid())), join(2, "LOOKUP", wanted)):
            dealer.send_multipart(frames)
            while not dealer.poll(100):
                child.check_alive()
                if time.monotonic() > deadline:
                    raise child.failure(f"did not answer within {_PATIENCE_S:.0f} s")
            envelope = split(dealer.recv_multipart())
        reply = decode(envelope.payload, m.LookupReply, where="LOOKUP")
        if reply.hit_tokens != wanted.key.end:
            raise child.failure(f"found {reply.hit_tokens} of {wanted.key.end} tokens after the kill of its server")
    finally:
        context.destroy(0)


# memcached


def _memcached(directory: Path, items: int) -> list[MemcachedFigures]:
    """What memcached -e has after a clean stop (SIGUSR1), and after kill -9; [] if it is not installed."""
    program = shutil.which("memcached")
    if program is None:
        return []
    memory = Path("/dev/shm") / directory.name
    address = str(directory / "memcached.sock")
    command = [program, "-e", str(memory), "-s", address, "-m", "256", "-u", "root"]
    figures = []
    try:
        for name, number in (("clean stop", signal.SIGUSR1), ("kill -9", signal.SIGKILL)):
            with running(f"memcached {number}", command, directory) as child:
                _await_value(child, address, "none")
                with socket.socket(socket.AF_UNIX) as line:
                    line.connect(address)
                    for item in range(items):
                        line.sendall(b"set k%d 0 0 %d noreply\r\n%s\r\n" % (item, OBJECT_BYTES, b"x" * OBJECT_BYTES))
                _await_value(child, address, f"k{items - 1}", hit=True)
                os.kill(child.pid, number)
                await_end(child)
            # It refuses what was written in the second in which it starts.
            time.sleep(2.0)
            began = time.perf_counter()
            with running(f"memcached after {number}", command, directory) as child:
                warm = _await_value(child, address, f"k{items - 1}")
                figures.append(MemcachedFigures(name, items, warm, time.perf_counter() - began))
    finally:
        for file in memory.parent.glob(memory.name + "*"):
            file.unlink()
    return figures


def _await_value(child: BenchChild, address: str, key: str, *, hit: bool = False) -> bool:
    """Whether the key has a value, once it answers; with `hit`, once it has."""
    deadline = time.monotonic() + _PATIENCE_S
    while time.monotonic() < deadline:
        child.check_alive()
        with suppress(OSError), socket.socket(socket.AF_UNIX) as line:
            line.connect(address)
            line.sendall(f"get {key}\r\n".encode())
            answer = line.recv(64)
            if answer and (not hit or answer.startswith(b"VALUE")):
                return answer.startswith(b"VALUE")
        time.sleep(_POLL_S)
    raise child.failure(f"did not answer within {_PATIENCE_S:.0f} s")

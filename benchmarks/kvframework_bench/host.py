"""`kvframework bench host`: the speed of the bare machine, and the cost of an idle server."""

from __future__ import annotations

import time
from pathlib import Path

from kvframework_bench.console import Stage, no_progress
from kvframework_bench.copy_reference import copies, fastest
from kvframework_bench.document import Echo, HostFigures, ServerAtRest, Throughput
from kvframework_bench.process import scratch
from kvframework_bench.rounds import Latency, Spread, interleave, rate_gb_s
from kvframework_bench.server import has_mapped, idle_cores, resident, running_server
from kvframework_bench.zmq_reference import ZmqPeer, running_zmq_peer

_MIB = 1 << 20
_ECHO_BYTES = (64, 4 << 10, 128 << 10)
_FRAME_BYTES = 32 * _MIB
_ARENA_BYTES = 64 * _MIB


def bench_host(*, quick: bool, stage: Stage = no_progress) -> HostFigures:
    """Measure the machine; takes a quarter of a minute (`quick`: about three seconds). Raises `BenchFailed`."""
    nbytes = (8 if quick else 256) * _MIB
    with scratch() as directory:
        copied, copy = _copies(nbytes, 3 if quick else 15, stage)
        with running_zmq_peer(directory) as peer:
            echoes = _echoes(peer, rounds=3 if quick else 50, calls=10 if quick else 40, stage=stage)
            transfers = _transfers(peer, nbytes, 2 if quick else 10, stage)
        server = _server(directory, starts=1 if quick else 5, idle_s=0.2 if quick else 3.0, stage=stage)
    return HostFigures(copied, copy, echoes, transfers, server)


def _copies(nbytes: int, rounds: int, stage: Stage) -> tuple[list[Throughput], str]:
    with copies(nbytes) as ways, stage("copying memory", rounds) as advance:
        measured = interleave({way.name: way.run for way in ways}, rounds=rounds, advance=advance)
        figures = [Throughput(way.name, nbytes, rate_gb_s(nbytes, measured[way.name])) for way in ways]
        return figures, fastest(ways, measured).name


def _echoes(peer: ZmqPeer, *, rounds: int, calls: int, stage: Stage) -> list[Echo]:
    payloads = {str(size): bytes(size) for size in _ECHO_BYTES}
    with stage("echoing over a bare socket", rounds) as advance:
        measured = interleave(
            {name: lambda payload=payload: peer.echo(payload) for name, payload in payloads.items()},  # type: ignore[misc]
            rounds=rounds,
            calls=calls,
            advance=advance,
        )
    return [Echo(int(name), Latency.of(samples)) for name, samples in measured.items()]


def _transfers(peer: ZmqPeer, nbytes: int, rounds: int, stage: Stage) -> list[Throughput]:
    frame = min(_FRAME_BYTES, nbytes // 4)
    ways = {"sent": lambda: peer.put(nbytes, frame), "received": lambda: peer.get(nbytes, frame)}
    with stage("transferring over a bare socket", rounds) as advance:
        measured = interleave(ways, rounds=rounds, advance=advance)
    return [Throughput(name, nbytes, rate_gb_s(nbytes, measured[name])) for name in ways]


def _server(directory: Path, *, starts: int, idle_s: float, stage: Stage) -> ServerAtRest:
    seconds = []
    with stage("starting servers", starts) as advance:
        for index in range(starts):
            with running_server(directory, _ARENA_BYTES) as server:
                seconds.append(server.start_s)
                advance()
                if index + 1 < starts:
                    continue
                with server.client():
                    pass  # waits for the arena; the client then goes
                time.sleep(idle_s / 2)
                cores = idle_cores(server.child.pid, idle_s)
                pid = server.child.pid
                return ServerAtRest(resident(pid), has_mapped(pid, "libtorch"), Spread.of(seconds), cores)
    raise AssertionError("at least one start")

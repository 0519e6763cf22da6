"""The steps of `kvframework bench scale`: first more clients on one server, then servers with more objects.

All clients are connected and registered from the start; clients outside of a step are idle meanwhile. All servers of
the steps of objects run at once, so that their samples alternate. A store to a full L1 evicts as many objects as it
brings, so the number of objects stays constant.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from kvframework.storage.l1.entries import ALIGNMENT
from kvframework_bench.console import Stage, no_progress
from kvframework_bench.errors import BenchFailed
from kvframework_bench.machine import available_bytes
from kvframework_bench.process import scratch
from kvframework_bench.rounds import Case, interleave
from kvframework_bench.scale.client import OPERATIONS, Clear, ClientProcess, Fill, Operation, Report, running_clients
from kvframework_bench.scale.figures import ScaleFigures, ScaleRow
from kvframework_bench.scale.samples import Sample, Step, rows, take
from kvframework_bench.scale.workload import CHUNK_TOKENS, CHUNKS, FULL, Sizes, fitting
from kvframework_bench.server import running_server, status
from kvframework_bench.zmq_reference import ZmqPeer, running_zmq_peer

# Numbers of prompts that no other client stores.
_OWN = 1 << 40


def scale_clients(
    sizes: Sizes, directory: Path, peer: ZmqPeer, seed: int, stage: Stage
) -> tuple[list[ScaleRow], Report]:
    """Return the rows, and the report of a client's start. Takes about a minute and a half. Raises `BenchFailed` and
    `WrongBytes`."""
    samples: dict[Step, list[Sample]] = {}
    settings = [f"server.chunk_size={CHUNK_TOKENS}"]
    with running_server(directory, sizes.base_bytes, settings) as server:
        with server.client():
            pass  # waits for the arena
        with (
            stage("starting clients", max(sizes.clients)) as advance,
            running_clients(
                max(sizes.clients),
                directory,
                server=server.endpoint,
                echo=peer.endpoint,
                seed=seed,
                chunks=CHUNKS,
                advance=advance,
            ) as (clients, about),
        ):
            prompts = sizes.base_objects // CHUNKS
            _fill(clients[0], prompts)

            def case(operation: Operation, count: int) -> float:
                own = operation == "store"
                pid = peer.pid if operation == "echo" else server.child.pid
                sample = take(
                    clients[:count],
                    [_OWN * (index + 1) if own else 0 for index in range(count)],
                    operation,
                    count=prompts,
                    seconds=sizes.seconds,
                    server_pid=pid,
                )
                if own:
                    _fill(clients[0], prompts)
                samples.setdefault((operation, count, sizes.base_objects), []).append(sample)
                return sample.cost

            cases: dict[str, Case] = {
                f"{operation} {count}": partial(case, operation, count)
                for count in sizes.clients
                for operation in OPERATIONS
            }
            with stage("asking with more and more clients", sizes.rounds + 1) as advance:
                # Clients that ask for the first time map the arena's pages.
                interleave(cases, rounds=1, advance=advance)
                samples.clear()
                interleave(cases, rounds=sizes.rounds, advance=advance)
    return rows(samples, first=(sizes.clients[0], sizes.base_objects)), about


def _fill(client: ClientProcess, prompts: int) -> None:
    """Leave these prompts in L1 and no others."""
    client.do(Clear())
    client.do(Fill(0, prompts))


_FILL_PROMPTS = 256


@dataclass
class FullServer:
    """A server whose L1 has room for `prompts` and holds the `prompts` that were used last. `newest` is the number
    that the next one to be stored gets; the one before it was stored last."""

    pid: int
    client: ClientProcess
    prompts: int
    newest: int

    def sample(self, operation: Operation, peer: ZmqPeer, seconds: float) -> Sample:
        # L1 evicts the objects that were neither stored nor requested for the longest time. As only the newer half is
        # requested, at most half of L1 can overtake a prompt of that half, and less than half was stored after it.
        recent = max(self.prompts // 2 - 1, 1)
        first = self.newest if operation == "store" else self.newest - recent
        pid = peer.pid if operation == "echo" else self.pid
        sample = take([self.client], [first], operation, count=recent, seconds=seconds, server_pid=pid)
        if operation == "store":
            self.newest += len(sample.latencies)
        return sample


def scale_objects(sizes: Sizes, directory: Path, peer: ZmqPeer, seed: int, stage: Stage) -> list[ScaleRow]:
    """Return the rows. Takes about a minute and a half. Raises `BenchFailed` and `WrongBytes`."""
    samples: dict[Step, list[Sample]] = {}

    def case(operation: Operation, objects: int, server: FullServer) -> float:
        sample = server.sample(operation, peer, sizes.seconds)
        samples.setdefault((operation, 1, objects), []).append(sample)
        return sample.cost

    with ExitStack() as stack:
        servers = {
            objects: stack.enter_context(_full_server(objects, directory / str(objects), peer, seed, stage))
            for objects in sizes.objects
        }
        cases: dict[str, Case] = {
            f"{operation} {objects}": partial(case, operation, objects, server)
            for objects, server in servers.items()
            for operation in OPERATIONS
        }
        with stage("asking among more and more objects", sizes.rounds + 1) as advance:
            # Clients that ask for the first time map the arena's pages.
            interleave(cases, rounds=1, advance=advance)
            samples.clear()
            interleave(cases, rounds=sizes.rounds, advance=advance)
    return rows(samples, first=(1, sizes.objects[0]))


@contextmanager
def _full_server(objects: int, directory: Path, peer: ZmqPeer, seed: int, stage: Stage) -> Iterator[FullServer]:
    directory.mkdir()
    prompts = objects // CHUNKS
    settings = [f"server.chunk_size={CHUNK_TOKENS}"]
    with ExitStack() as stack:
        server = stack.enter_context(running_server(directory, objects * ALIGNMENT, settings))
        with server.client():
            pass  # waits for the arena
        clients, _ = stack.enter_context(
            running_clients(
                1,
                directory,
                server=server.endpoint,
                echo=peer.endpoint,
                seed=seed,
                chunks=CHUNKS,
                advance=lambda: None,
            )
        )
        with stage(f"storing {objects:,} objects", -(-prompts // _FILL_PROMPTS)) as advance:
            for first in range(0, prompts, _FILL_PROMPTS):
                clients[0].do(Fill(first, min(_FILL_PROMPTS, prompts - first)))
                advance()
        with server.client() as client:
            held = status(client)["l1"]["objects"]
        if held != objects:
            raise BenchFailed(f"L1 holds {held} objects", available=f"{objects} objects")
        yield FullServer(server.child.pid, clients[0], prompts, prompts)


def bench_scale(sizes: Sizes = FULL, *, seed: int = 1, stage: Stage = no_progress) -> ScaleFigures:
    """Run the steps; takes about three minutes. The steps that do not fit into memory are left out, and named in the
    figures. Raises `BenchFailed`, and `WrongBytes` if a retrieved byte differs from the stored one."""
    sizes, skipped = fitting(sizes, available_bytes())
    with scratch() as directory, running_zmq_peer(directory) as peer:
        by_clients, about = scale_clients(sizes, directory, peer, seed, stage)
        by_objects = scale_objects(sizes, directory, peer, seed, stage)
    return ScaleFigures(
        seed=seed,
        chunks=CHUNKS,
        object_bytes=about.object_bytes,
        slot_bytes=ALIGNMENT,
        request_bytes=about.request_bytes,
        by_clients=by_clients,
        by_objects=by_objects,
        skipped=skipped,
    )

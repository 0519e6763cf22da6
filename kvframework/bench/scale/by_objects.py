"""Owns the steps of objects: one client, and servers whose L1 is full of ever more objects.

All servers run at once, so that their samples can alternate. A store to a full L1 evicts as many objects as it brings,
so the number of objects stays what it is.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from kvframework.bench.bare import BarePeer
from kvframework.bench.errors import BenchFailed
from kvframework.bench.interleave import Case, interleave
from kvframework.bench.progress import Stage
from kvframework.bench.scale.client import ClientProcess, running_clients
from kvframework.bench.scale.document import ScaleRow
from kvframework.bench.scale.messages import OPERATIONS, Fill, Operation
from kvframework.bench.scale.rows import Step, rows
from kvframework.bench.scale.samples import Sample, take
from kvframework.bench.scale.sizes import CHUNK_TOKENS, CHUNKS, Sizes
from kvframework.bench.server import running_server, status
from kvframework.storage.l1.allocator import ALIGNMENT

_FILL_PROMPTS = 256


@dataclass
class FullServer:
    """A server whose L1 has room for `prompts` and holds the `prompts` that were used last. `newest` is the number
    that the next one to be stored gets; the one before it was stored last."""

    pid: int
    client: ClientProcess
    prompts: int
    newest: int

    def sample(self, operation: Operation, peer: BarePeer, seconds: float) -> Sample:
        # What L1 loses is what was longest neither stored nor asked for. As only the newer half is asked for, at most
        # half of L1 can overtake a prompt of that half, and less than half was stored after it.
        recent = max(self.prompts // 2 - 1, 1)
        first = self.newest if operation == "store" else self.newest - recent
        pid = peer.pid if operation == "echo" else self.pid
        sample = take([self.client], [first], operation, count=recent, seconds=seconds, server_pid=pid)
        if operation == "store":
            self.newest += len(sample.latencies)
        return sample


def scale_objects(sizes: Sizes, directory: Path, peer: BarePeer, seed: int, stage: Stage) -> list[ScaleRow]:
    """Takes about a minute and a half. Raises `BenchFailed` and `WrongBytes`."""
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
def _full_server(objects: int, directory: Path, peer: BarePeer, seed: int, stage: Stage) -> Iterator[FullServer]:
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
            raise BenchFailed(f"L1 holds {held} objects", available=f"{objects} were stored")
        yield FullServer(server.child.pid, clients[0], prompts, prompts)

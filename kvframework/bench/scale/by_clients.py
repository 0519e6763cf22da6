"""Owns the steps of clients: one server with some objects, and ever more clients that ask it at the same time.

All clients are connected and registered from the start; those that are not of a step are idle meanwhile.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path

from kvframework.bench.bare import BarePeer
from kvframework.bench.interleave import Case, interleave
from kvframework.bench.progress import Stage
from kvframework.bench.scale.client import ClientProcess, running_clients
from kvframework.bench.scale.document import ScaleRow
from kvframework.bench.scale.messages import OPERATIONS, Clear, Fill, Operation, Report
from kvframework.bench.scale.rows import Step, rows
from kvframework.bench.scale.samples import Sample, take
from kvframework.bench.scale.sizes import CHUNK_TOKENS, CHUNKS, Sizes
from kvframework.bench.server import running_server

# Numbers of prompts that no other client stores.
_OWN = 1 << 40


def scale_clients(
    sizes: Sizes, directory: Path, peer: BarePeer, seed: int, stage: Stage
) -> tuple[list[ScaleRow], Report]:
    """The rows, and the report of a client's start. Takes about a minute and a half. Raises `BenchFailed` and
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
    """Leaves these prompts in L1 and no others."""
    client.do(Clear())
    client.do(Fill(0, prompts))

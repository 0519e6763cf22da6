"""`kvframework bench store`: store and retrieve of an engine's paged memory, next to a plain copy of as many bytes.

This process is the engine; the server is another one. Needs torch, which is imported when the benchmark runs.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvframework.registry.registry import PluginRegistry
from kvframework_bench.console import Stage, no_progress
from kvframework_bench.copy_reference import fastest_copy
from kvframework_bench.document import ShapeFigures, StoreFigures, Throughput, TransferFigures
from kvframework_bench.errors import require_torch
from kvframework_bench.process import scratch
from kvframework_bench.rounds import Case, Rounds, interleave, rate_gb_s, ratio
from kvframework_bench.server import running_server
from kvframework_bench.workload import TRANSPORT, Shape, TransferPath, transport_options
from kvframework_bench.zmq_reference import running_zmq_peer

if TYPE_CHECKING:
    from kvframework_bench.engine import Memory

_ARENA_SLACK = 32 << 20
_BEFORE_FIRST_S = 1.0
# A single one says as much about the machine's moment as about the arena's pages.
_FIRSTS = 7


@dataclass(frozen=True)
class Measured:
    """A transport with the options of its engine's half, the settings of its server, and an engine's memory for it."""

    options: Mapping[str, object]
    memory: Callable[[Shape], Memory]
    transport: str = TRANSPORT
    settings: Sequence[str] = ()


def bench_store(
    shapes: Sequence[Shape],
    *,
    path: TransferPath = TransferPath.arena,
    shuffled: bool = True,
    stage: Stage = no_progress,
) -> StoreFigures:
    """Measure the shapes; takes some seconds each. Raises `BenchFailed`; `WrongBytes` if a single retrieved byte is
    wrong, and `BenchUnavailable` without torch or the path."""
    require_torch()
    from kvframework_bench.engine import PagedMemory

    options = transport_options(path, PluginRegistry())
    measured = Measured(options, lambda shape: PagedMemory(shape, shuffled=shuffled))
    figures = [measure(shape, measured, wire=path is TransferPath.wire, stage=stage) for shape in shapes]
    return StoreFigures(path.value, "shuffled" if shuffled else "contiguous", figures)


def measure(shape: Shape, what: Measured, *, wire: bool, stage: Stage) -> ShapeFigures:
    """Measure one shape; on the `wire` beside a bare transfer too. Raises as `bench_store` does."""
    from kvframework_bench.engine import Transfers

    firsts = min(_FIRSTS, shape.rounds)
    with ExitStack() as stack:
        advance = stack.enter_context(stage(f"storing and retrieving, {shape.name}", firsts + shape.rounds + 3))
        memory = what.memory(shape)
        advance()
        first_stores, first_retrieves = _firsts(firsts, shape, memory, what, advance)
        directory = stack.enter_context(scratch())
        server = stack.enter_context(running_server(directory, shape.nbytes + _ARENA_SLACK, what.settings))
        client = stack.enter_context(server.client())
        transfers = stack.enter_context(Transfers(client, shape, memory, what.options, transport=what.transport))
        transfers.store()
        transfers.verify()
        advance()
        copy = stack.enter_context(fastest_copy(shape.nbytes))
        cases: dict[str, Case] = {"copy": copy.run, "store": transfers.store, "retrieve": transfers.retrieve_found}
        if wire:
            peer = stack.enter_context(running_zmq_peer(directory))
            cases["put"] = lambda: peer.put(shape.nbytes, transfers.object_bytes)
            cases["get"] = lambda: peer.get(shape.nbytes, transfers.object_bytes)
        measured = interleave(cases, rounds=shape.rounds, advance=advance)
        transfers.verify()
        advance()
    return ShapeFigures(
        shape=shape.name,
        summary=shape.summary,
        bytes_per_token=shape.bytes_per_token,
        tokens=shape.tokens,
        nbytes=shape.nbytes,
        rounds=shape.rounds,
        verified=True,
        copy=Throughput(copy.name, shape.nbytes, rate_gb_s(shape.nbytes, measured["copy"])),
        store=_figures(shape, first_stores, measured["store"], measured["copy"], measured.get("put")),
        retrieve=_figures(shape, first_retrieves, measured["retrieve"], measured["copy"], measured.get("get")),
        target_ratio=shape.target_ratio,
    )


def _firsts(
    number: int, shape: Shape, memory: Memory, what: Measured, advance: Callable[[], None]
) -> tuple[Rounds, Rounds]:
    """Return the seconds of the first store and of the first retrieve of so many engines, one after the other in this
    process, each with a new server. Raises as `bench_store` does."""
    from kvframework_bench.engine import Transfers

    stores, retrieves = [], []
    for _ in range(number):
        with ExitStack() as stack:
            directory = stack.enter_context(scratch())
            server = stack.enter_context(running_server(directory, shape.nbytes + _ARENA_SLACK, what.settings))
            client = stack.enter_context(server.client())
            transfers = stack.enter_context(Transfers(client, shape, memory, what.options, transport=what.transport))
            # An engine computes a prompt before it stores one: meanwhile the arena is mapped in the background.
            time.sleep(_BEFORE_FIRST_S)
            stores.append([transfers.store()])
            retrieves.append([transfers.verify()])
        advance()
    return stores, retrieves


def _figures(shape: Shape, firsts: Rounds, own: Rounds, copy: Rounds, bare: Rounds | None) -> TransferFigures:
    return TransferFigures(
        gb_s=rate_gb_s(shape.nbytes, own),
        first_gb_s=rate_gb_s(shape.nbytes, firsts),
        ratio_to_copy=ratio(copy, own),
        ratio_to_zmq=ratio(bare, own) if bare else None,
    )

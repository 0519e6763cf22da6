"""Owns `kvframework bench store`: store and retrieve of an engine's paged memory, beside a plain copy of as many bytes.

This process is the engine; the server is another one. Needs torch, which is imported when the bench runs.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack

from kvframework.bench.attempt import require_torch
from kvframework.bench.bare import running_peer
from kvframework.bench.child import scratch
from kvframework.bench.copying import fastest_copy
from kvframework.bench.document import ShapeFigures, StoreFigures, Throughput, TransferFigures
from kvframework.bench.interleave import Case, interleave
from kvframework.bench.paths import Path, transport_options
from kvframework.bench.progress import Stage, no_progress
from kvframework.bench.server import running_server
from kvframework.bench.shapes import Shape
from kvframework.bench.statistics import Rounds, rate_gb_s, ratio
from kvframework.registry.registry import PluginRegistry

_ARENA_SLACK = 32 << 20


def bench_store(
    shapes: Sequence[Shape], *, path: Path = Path.arena, shuffled: bool = True, stage: Stage = no_progress
) -> StoreFigures:
    """Takes some seconds a shape. Raises `BenchFailed`; `WrongBytes` if a single byte that came back is wrong, and
    `BenchUnavailable` without torch or the path."""
    require_torch()
    options = transport_options(path, PluginRegistry())
    figures = [_shape(shape, path, options, shuffled=shuffled, stage=stage) for shape in shapes]
    return StoreFigures(path.value, "shuffled" if shuffled else "contiguous", figures)


def _shape(shape: Shape, path: Path, options: dict[str, object], *, shuffled: bool, stage: Stage) -> ShapeFigures:
    from kvframework.bench.paged_memory import PagedMemory
    from kvframework.bench.transfers import Transfers

    with ExitStack() as stack:
        directory = stack.enter_context(scratch())
        advance = stack.enter_context(stage(f"storing and retrieving, {shape.name}", shape.repetitions + 3))
        server = stack.enter_context(running_server(directory, shape.nbytes + _ARENA_SLACK))
        client = stack.enter_context(server.client())
        memory = PagedMemory(shape, shuffled=shuffled)
        advance()
        transfers = stack.enter_context(Transfers(client, shape, memory, options))
        first = transfers.store(), transfers.verify()
        advance()
        copy = stack.enter_context(fastest_copy(shape.nbytes))
        cases: dict[str, Case] = {"copy": copy.run, "store": transfers.store, "retrieve": transfers.retrieve}
        if path is Path.wire:
            peer = stack.enter_context(running_peer(directory))
            cases["put"] = lambda: peer.put(shape.nbytes, transfers.object_bytes)
            cases["get"] = lambda: peer.get(shape.nbytes, transfers.object_bytes)
        measured = interleave(cases, rounds=shape.repetitions, advance=advance)
        transfers.verify()
        advance()
    return ShapeFigures(
        shape=shape.name,
        summary=shape.summary,
        bytes_per_token=shape.bytes_per_token,
        tokens=shape.tokens,
        nbytes=shape.nbytes,
        repetitions=shape.repetitions,
        verified=True,
        copy=Throughput(copy.name, shape.nbytes, rate_gb_s(shape.nbytes, measured["copy"])),
        store=_figures(shape, first[0], measured["store"], measured["copy"], measured.get("put")),
        retrieve=_figures(shape, first[1], measured["retrieve"], measured["copy"], measured.get("get")),
        reach=shape.reach,
    )


def _figures(shape: Shape, first_s: float, own: Rounds, copy: Rounds, bare: Rounds | None) -> TransferFigures:
    return TransferFigures(
        gb_s=rate_gb_s(shape.nbytes, own),
        first_gb_s=shape.nbytes / first_s / 1e9,
        of_copy=ratio(copy, own),
        of_bare_transfer=ratio(bare, own) if bare else None,
    )

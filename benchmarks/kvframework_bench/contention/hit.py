"""The part `hit`: the processor time that one hit takes of the engine's process, besides that of the copy.

This process is the engine, scheduler and worker at once; the server is another one. The time is that of all
threads of the process: whichever of them runs takes the interpreter, and a core, from the engine.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from kvframework.registry.registry import PluginRegistry
from kvframework_bench.console import Stage
from kvframework_bench.contention.figures import HitFigures, HitRow
from kvframework_bench.contention.profile import FILE, CopyClock, copy_clock, hottest, profiled
from kvframework_bench.contention.sizes import HIT_US, Sizes
from kvframework_bench.errors import BenchFailed, require_torch
from kvframework_bench.rounds import Spread
from kvframework_bench.server import running_server
from kvframework_bench.workload import Shape, TransferPath, transport_options

if TYPE_CHECKING:
    from kvframework_bench.engine import Transfers

_ARENA_SLACK = 32 << 20
_WARM_UP = 3
_TOP = 8


def bench_hit(sizes: Sizes, directory: Path, registry: PluginRegistry, stage: Stage) -> HitFigures:
    """Measure hits. Raises `BenchUnavailable` without torch or the copy kernel, `BenchFailed` if a hit is a miss, and
    `WrongBytes`."""
    require_torch()
    options = transport_options(TransferPath.arena, registry)
    rows = []
    for shape, count in sizes.hits:
        with _running_hits(shape, directory, options) as hits, stage(f"hits, {shape.name}", count) as advance:
            costs = []
            for _ in range(count):
                costs.append(hits.measured())
                advance()
            hits.transfers.verify()
        rows.append(_row(shape, costs))
    shape = sizes.hits[0][0]
    with _running_hits(shape, directory, options) as hits, stage("profiling hits", 1) as advance:
        entries = profiled(hits.hit, sizes.profiled)
        advance()
    spots = hottest(entries, sizes.profiled, top=_TOP, without=(FILE,))
    return HitFigures(rows, shape.name, sizes.profiled, spots)


class Cost(NamedTuple):
    """The cost of one hit, in seconds: wall time; processor time of the process, of its copy, and of the asking thread
    without the copy."""

    wall: float
    processor: float
    copy: float
    asking: float


class Hits:
    """Hits of the one stored prompt. For one thread."""

    def __init__(self, transfers: Transfers, clock: CopyClock, tokens: int) -> None:
        self.transfers = transfers
        self._clock = clock
        self._tokens = tokens
        self._scheduler = transfers.scheduler()

    def hit(self) -> None:
        """Run LOOKUP, retrieve, free. Raises `BenchFailed` unless all of it was a hit."""
        found = self._scheduler.lookup(self.transfers.request)
        if found.hit_tokens != self._tokens:
            raise BenchFailed(f"a lookup found {found.hit_tokens} tokens", available=f"{self._tokens} tokens")
        self.transfers.retrieve()
        self._scheduler.free(found)

    def measured(self) -> Cost:
        """Return the cost of one hit. Raises `BenchFailed`, also if its copy was not seen."""
        clock = self._clock
        calls, copied, copied_here = clock.calls, clock.seconds, clock.own
        started, before, before_here = time.perf_counter(), time.process_time(), time.thread_time()
        self.hit()
        here = time.thread_time() - before_here
        processor = time.process_time() - before
        wall = time.perf_counter() - started
        if clock.calls == calls:
            raise BenchFailed("the profiler saw no copy of a hit, so the copy's time cannot be subtracted")
        return Cost(wall, processor, clock.seconds - copied, here - (clock.own - copied_here))


@contextmanager
def _running_hits(shape: Shape, directory: Path, options: dict[str, object]) -> Iterator[Hits]:
    """Yield hits of a prompt in a new server's L1, with all of its pages mapped here and its bytes compared."""
    from kvframework_bench.engine import PagedMemory, Transfers

    with ExitStack() as stack:
        clock = stack.enter_context(copy_clock())
        server = stack.enter_context(running_server(directory, shape.nbytes + _ARENA_SLACK))
        client = stack.enter_context(server.client())
        transfers = stack.enter_context(Transfers(client, shape, PagedMemory(shape, shuffled=True), options))
        transfers.store()
        transfers.verify()
        hits = Hits(transfers, clock, shape.tokens)
        for _ in range(_WARM_UP):
            hits.hit()
        yield hits


def _row(shape: Shape, costs: list[Cost]) -> HitRow:
    return HitRow(
        shape=shape.name,
        tokens=shape.tokens,
        nbytes=shape.nbytes,
        hits=len(costs),
        wall_us=Spread.of([cost.wall * 1e6 for cost in costs]),
        processor_us=Spread.of([cost.processor * 1e6 for cost in costs]),
        copy_us=Spread.of([cost.copy * 1e6 for cost in costs]),
        asking_us=Spread.of([cost.asking * 1e6 for cost in costs]),
        overhead_us=Spread.of([(cost.processor - cost.copy) * 1e6 for cost in costs]),
        target_us=HIT_US,
    )

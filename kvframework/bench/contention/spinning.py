"""Owns the part `spinning`: stores and retrieves while other processes spin on the cores that the engine would share.

This process is the engine; server and spinners are others. Needs torch, which is imported when the part runs.
"""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

from kvframework.bench.attempt import require_torch
from kvframework.bench.contention.disturbance import measure_halves
from kvframework.bench.contention.document import SpinningShape, SpinningTransfers
from kvframework.bench.contention.sizes import SPINNING_SHARE, Sizes
from kvframework.bench.contention.spinners import running_spinners
from kvframework.bench.copying import fastest_copy
from kvframework.bench.paths import Path as BytePath
from kvframework.bench.paths import transport_options
from kvframework.bench.progress import Stage
from kvframework.bench.server import running_server
from kvframework.bench.shapes import Shape
from kvframework.bench.statistics import Rounds, Spread, rate_gb_s, ratio
from kvframework.registry import PluginRegistry

_ARENA_SLACK = 32 << 20


def bench_spinning(sizes: Sizes, directory: Path, registry: PluginRegistry, stage: Stage) -> list[SpinningShape]:
    """Raises `BenchUnavailable` without torch, `BenchFailed`, and `WrongBytes` if a byte that came back is wrong."""
    require_torch()
    options = transport_options(BytePath.arena, registry)
    return [_shape(shape, directory, options, stage) for shape in sizes.shapes]


def _shape(shape: Shape, directory: Path, options: dict[str, object], stage: Stage) -> SpinningShape:
    from kvframework.bench.paged_memory import PagedMemory
    from kvframework.bench.transfers import Transfers

    with ExitStack() as stack:
        advance = stack.enter_context(stage(f"beside spinning cores, {shape.name}", shape.repetitions + 3))
        server = stack.enter_context(running_server(directory, shape.nbytes + _ARENA_SLACK))
        client = stack.enter_context(server.client())
        memory = PagedMemory(shape, shuffled=True)
        advance()
        transfers = stack.enter_context(Transfers(client, shape, memory, options))
        copy = stack.enter_context(fastest_copy(shape.nbytes))
        spinners = stack.enter_context(running_spinners(directory))
        spinners.begin()
        transfers.store()
        transfers.verify()
        spinners.end()
        advance()
        spinners.cores.clear()
        cases = {"copy": copy.run, "store": transfers.store, "retrieve": transfers.retrieve}
        quiet, beside = measure_halves(spinners, cases, rounds=shape.repetitions, advance=advance)
        spun = Spread.of(spinners.cores)
        spinners.begin()
        transfers.verify()
        spinners.end()
        advance()
    return SpinningShape(
        shape=shape.name,
        nbytes=shape.nbytes,
        repetitions=shape.repetitions,
        verified=True,
        spinners=spinners.count,
        spun_cores=spun,
        copy_name=copy.name,
        copy_gb_s=rate_gb_s(shape.nbytes, quiet["copy"]),
        copy_of_quiet=ratio(quiet["copy"], beside["copy"]),
        transfers=[_transfers(shape, name, quiet, beside) for name in ("store", "retrieve")],
    )


def _transfers(shape: Shape, name: str, quiet: dict[str, Rounds], beside: dict[str, Rounds]) -> SpinningTransfers:
    return SpinningTransfers(
        operation=name,
        quiet_gb_s=rate_gb_s(shape.nbytes, quiet[name]),
        gb_s=rate_gb_s(shape.nbytes, beside[name]),
        quiet_of_copy=ratio(quiet["copy"], quiet[name]),
        of_copy=ratio(quiet["copy"], beside[name]),
        of_quiet=ratio(quiet[name], beside[name]),
        reach=shape.reach * SPINNING_SHARE,
    )

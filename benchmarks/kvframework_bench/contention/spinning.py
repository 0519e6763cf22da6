"""The part `spinning`: stores and retrieves while other processes spin on the cores that the engine would share.

This process is the engine; server and spinners are others. Needs torch, which is imported when the part runs.
"""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

from kvframework.registry.registry import PluginRegistry
from kvframework_bench.console import Stage
from kvframework_bench.contention.figures import SpinningShape, SpinningTransfers
from kvframework_bench.contention.sizes import SPINNING_RATIO, Sizes
from kvframework_bench.contention.spinners import running_spinners
from kvframework_bench.copy_reference import fastest_copy
from kvframework_bench.errors import require_torch
from kvframework_bench.rounds import Rounds, Spread, measure_quiet_and_disturbed, rate_gb_s, ratio
from kvframework_bench.server import running_server
from kvframework_bench.workload import Shape, TransferPath, transport_options

_ARENA_SLACK = 32 << 20


def bench_spinning(sizes: Sizes, directory: Path, registry: PluginRegistry, stage: Stage) -> list[SpinningShape]:
    """Measure the shapes. Raises `BenchUnavailable` without torch, `BenchFailed`, and `WrongBytes` if a retrieved byte
    is wrong."""
    require_torch()
    options = transport_options(TransferPath.arena, registry)
    return [_shape(shape, directory, options, stage) for shape in sizes.shapes]


def _shape(shape: Shape, directory: Path, options: dict[str, object], stage: Stage) -> SpinningShape:
    from kvframework_bench.engine import PagedMemory, Transfers

    with ExitStack() as stack:
        advance = stack.enter_context(stage(f"with busy cores, {shape.name}", shape.rounds + 3))
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
        quiet, disturbed = measure_quiet_and_disturbed(spinners, cases, rounds=shape.rounds, advance=advance)
        spun = Spread.of(spinners.cores)
        spinners.begin()
        transfers.verify()
        spinners.end()
        advance()
    return SpinningShape(
        shape=shape.name,
        nbytes=shape.nbytes,
        rounds=shape.rounds,
        verified=True,
        spinners=spinners.count,
        spun_cores=spun,
        copy_name=copy.name,
        copy_gb_s=rate_gb_s(shape.nbytes, quiet["copy"]),
        copy_ratio_to_quiet=ratio(quiet["copy"], disturbed["copy"]),
        transfers=[_transfers(shape, name, quiet, disturbed) for name in ("store", "retrieve")],
    )


def _transfers(shape: Shape, name: str, quiet: dict[str, Rounds], disturbed: dict[str, Rounds]) -> SpinningTransfers:
    return SpinningTransfers(
        operation=name,
        quiet_gb_s=rate_gb_s(shape.nbytes, quiet[name]),
        gb_s=rate_gb_s(shape.nbytes, disturbed[name]),
        quiet_ratio_to_copy=ratio(quiet["copy"], quiet[name]),
        ratio_to_copy=ratio(quiet["copy"], disturbed[name]),
        ratio_to_quiet=ratio(quiet[name], disturbed[name]),
        target_ratio=shape.target_ratio * SPINNING_RATIO,
    )

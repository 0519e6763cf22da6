"""The parts of `kvframework bench contention`, one after the other, each with separate processes."""

from __future__ import annotations

from collections.abc import Callable, Collection
from pathlib import Path
from typing import TypeVar

from kvframework.registry.registry import PluginRegistry
from kvframework_bench.console import Stage, no_progress
from kvframework_bench.contention.figures import ContentionFigures
from kvframework_bench.contention.hit import bench_hit
from kvframework_bench.contention.sizes import FULL, Sizes
from kvframework_bench.contention.spinning import bench_spinning
from kvframework_bench.contention.storing import bench_storing
from kvframework_bench.errors import Skipped, measure_or_skip
from kvframework_bench.process import scratch

PARTS = ("spinning", "storing", "hit")

T = TypeVar("T")


def bench_contention(
    sizes: Sizes = FULL, *, parts: Collection[str] = PARTS, stage: Stage = no_progress
) -> ContentionFigures:
    """Run the parts; takes about a minute. For the main thread. A part that cannot be measured here is named in the
    figures. Raises `BenchFailed`, and `WrongBytes` if a retrieved byte differs from the stored one."""
    registry = PluginRegistry()
    skipped: list[Skipped] = []

    def part(name: str, make: Callable[[Sizes, Path, PluginRegistry, Stage], T]) -> T | None:
        if name not in parts:
            return None
        with scratch() as directory:
            return measure_or_skip(skipped, name, lambda: make(sizes, directory, registry, stage))

    return ContentionFigures(
        spinning=part("spinning", bench_spinning) or [],
        storing=part("storing", bench_storing),
        hit=part("hit", bench_hit),
        skipped=skipped,
    )

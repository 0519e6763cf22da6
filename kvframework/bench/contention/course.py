"""Owns the course of `kvframework bench contention`: its parts, one after the other, each with processes of its own."""

from __future__ import annotations

from collections.abc import Callable, Collection
from pathlib import Path
from typing import TypeVar

from kvframework.bench.attempt import NotMeasured, attempt
from kvframework.bench.child import scratch
from kvframework.bench.contention.document import ContentionFigures
from kvframework.bench.contention.hit import bench_hit
from kvframework.bench.contention.sizes import FULL, Sizes
from kvframework.bench.contention.spinning import bench_spinning
from kvframework.bench.contention.storing import bench_storing
from kvframework.bench.progress import Stage, no_progress
from kvframework.registry import PluginRegistry

PARTS = ("spinning", "storing", "hit")

T = TypeVar("T")


def bench_contention(
    sizes: Sizes = FULL, *, parts: Collection[str] = PARTS, stage: Stage = no_progress
) -> ContentionFigures:
    """Takes about a minute. For the main thread. A part that cannot be measured here is named in the figures. Raises
    `BenchFailed`, and `WrongBytes` if what is retrieved is not what was stored."""
    registry = PluginRegistry()
    not_measured: list[NotMeasured] = []

    def part(name: str, make: Callable[[Sizes, Path, PluginRegistry, Stage], T]) -> T | None:
        if name not in parts:
            return None
        with scratch() as directory:
            return attempt(not_measured, name, lambda: make(sizes, directory, registry, stage))

    return ContentionFigures(
        spinning=part("spinning", bench_spinning) or [],
        storing=part("storing", bench_storing),
        hit=part("hit", bench_hit),
        not_measured=not_measured,
    )

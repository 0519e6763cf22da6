"""The parts of `kvframework bench l2`, one after the other, each with separate processes."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Collection
from pathlib import Path
from typing import TypeVar

from kvframework.registry.registry import PluginRegistry
from kvframework_bench.console import Stage, no_progress
from kvframework_bench.errors import BenchUnavailable, Skipped, measure_or_skip
from kvframework_bench.l2.codec import bench_codec
from kvframework_bench.l2.disk import bench_disk
from kvframework_bench.l2.engine import bench_engine
from kvframework_bench.l2.figures import CodecRow, DiskFigures, L2Figures, MemoryRow
from kvframework_bench.l2.memory import bench_memory
from kvframework_bench.l2.mooncake import bench_mooncake
from kvframework_bench.l2.new_prompt import bench_new_prompts
from kvframework_bench.l2.redis import bench_redis
from kvframework_bench.l2.s3 import bench_s3
from kvframework_bench.l2.sizes import FULL, Sizes
from kvframework_bench.l2.stalled import bench_stalled
from kvframework_bench.process import scratch

PARTS = ("redis", "s3", "mooncake", "engine", "disk", "stalled", "new", "memory", "codec")
CODECS = ("none", "zstd", "planes")

T = TypeVar("T")


def bench_l2(
    sizes: Sizes = FULL,
    *,
    parts: Collection[str] = PARTS,
    folder: Path | None = None,
    kv: Path | None = None,
    stage: Stage = no_progress,
) -> L2Figures:
    """Run the parts; takes about two minutes. The part `disk` has its files in a new folder below `folder`; None: the
    one for temporary files. The part `codec` packs the bytes of the file `kv`; None: made-up ones.
    Raises `BenchFailed`, `WrongBytes`, and `BenchUnavailable` if `folder` is no folder."""
    if folder is not None and not folder.is_dir():
        raise BenchUnavailable("the folder does not exist", where=str(folder))
    registry = PluginRegistry()
    skipped: list[Skipped] = []

    def part(name: str, make: Callable[[Path], T], what: str = "") -> T | None:
        if name not in parts:
            return None
        with scratch() as directory:
            return measure_or_skip(skipped, what or name, lambda: make(directory))

    def disk(directory: Path) -> DiskFigures:
        with tempfile.TemporaryDirectory(prefix="kvf-bench-", dir=folder or directory) as place:
            return bench_disk(sizes, Path(place), registry, skipped, stage)

    def memory(codec: str) -> list[MemoryRow]:
        made = part("memory", lambda at: bench_memory(sizes, at, registry, codec, stage), f"memory, codec {codec}")
        return made or []

    def codecs(codec: str) -> list[CodecRow]:
        made = part("codec", lambda _at: bench_codec(sizes, registry, codec, kv, stage), f"codec {codec}")
        return [made] if made else []

    return L2Figures(
        redis=part("redis", lambda at: bench_redis(sizes, at, registry, skipped, stage)),
        s3=part("s3", lambda at: bench_s3(sizes, at, registry, stage)),
        mooncake=part("mooncake", lambda at: bench_mooncake(sizes, at, registry, stage)) or [],
        engine=part("engine", lambda at: bench_engine(sizes, at, registry, skipped, stage)) or [],
        disk=part("disk", disk),
        stalled=part("stalled", lambda at: bench_stalled(sizes, at, registry, stage)) or [],
        new=part("new", lambda at: bench_new_prompts(sizes, at, registry, stage)) or [],
        memory=[row for codec in CODECS for row in memory(codec)],
        codecs=[row for codec in CODECS[1:] for row in codecs(codec)],
        skipped=skipped,
    )

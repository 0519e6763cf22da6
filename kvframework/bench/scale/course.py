"""Owns the course of `kvframework bench scale`: first more clients, then more objects, with processes of their own."""

from __future__ import annotations

from kvframework.bench.bare import running_peer
from kvframework.bench.child import scratch
from kvframework.bench.machine import available_bytes
from kvframework.bench.progress import Stage, no_progress
from kvframework.bench.scale.by_clients import scale_clients
from kvframework.bench.scale.by_objects import scale_objects
from kvframework.bench.scale.document import ScaleFigures
from kvframework.bench.scale.sizes import CHUNKS, FULL, Sizes, fitting
from kvframework.storage.l1.allocator import ALIGNMENT


def bench_scale(sizes: Sizes = FULL, *, seed: int = 1, stage: Stage = no_progress) -> ScaleFigures:
    """Takes about three minutes. The steps that do not fit into memory are left out, and named in the figures. Raises
    `BenchFailed`, and `WrongBytes` if what is retrieved is not what was stored."""
    sizes, left_out = fitting(sizes, available_bytes())
    with scratch() as directory, running_peer(directory) as peer:
        by_clients, about = scale_clients(sizes, directory, peer, seed, stage)
        by_objects = scale_objects(sizes, directory, peer, seed, stage)
    return ScaleFigures(
        seed=seed,
        chunks=CHUNKS,
        object_bytes=about.object_bytes,
        slot_bytes=ALIGNMENT,
        request_bytes=about.request_bytes,
        by_clients=by_clients,
        by_objects=by_objects,
        left_out=left_out,
    )

"""Owns the options of `cpu_gather`. They are the engine's; a server needs none."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta

from kvframework.api import Options

Path = Literal["auto", "arena", "wire"]


class CpuGatherOptions(Options, frozen=True):
    """See the descriptions of the fields."""

    path: Annotated[
        Path, Meta(description="how bytes move: over the shared arena, over the wire, or the arena where it is mapped")
    ] = "auto"

"""Owns the options of the `pinned` tier, as they stand in the `[l1]` table."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from kvframework.api import ByteSize, Options

LEAST = ByteSize(1 << 20)


class PinnedOptions(Options, frozen=True):
    """See the descriptions of the fields."""

    capacity: Annotated[ByteSize, Meta(description="size of the arena, at least 1 MiB")] = ByteSize(1 << 30)

    def __post_init__(self) -> None:
        if self.capacity < LEAST:
            raise ValueError(f"capacity is at least {LEAST}, found {self.capacity}")

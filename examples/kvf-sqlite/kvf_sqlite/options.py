"""The options of the tier, as they stand in its `[[l2]]` table."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta

from kvframework.api.plugin import ByteSize, Options


class SqliteOptions(Options, frozen=True):
    """Options of the tier; each field has a description."""

    path: Annotated[str, Meta(min_length=1, description="the file; made with mode 0600 if it is missing")]
    capacity: Annotated[
        ByteSize, Meta(description="most bytes of values; above it the least recently used values are deleted")
    ] = ByteSize(10 << 30)
    sync: Annotated[
        Literal["normal", "full"],
        Meta(description="what a power failure may lose: normal, the last values; full, nothing, at a sync per write"),
    ] = "normal"

    def __post_init__(self) -> None:
        if self.capacity < 1:
            raise ValueError("capacity is at least 1 byte, found 0")

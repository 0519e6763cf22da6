"""The options of the `pinned` memory, as they stand in the `[l1]` table; and how files of /proc and /sys are read."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from msgspec import Meta

from kvframework.api.plugin import ByteSize, Options

LEAST = ByteSize(1 << 20)

# The kernel's node masks have this many bits.
Numa = Literal["auto", "off"] | list[Annotated[int, Meta(ge=0, le=1023)]]

HugePages = Literal["auto", "on", "off", "transparent"]


class PinnedOptions(Options, frozen=True):
    """Options of the `pinned` memory; each field has a description."""

    capacity: Annotated[ByteSize, Meta(description="size of the arena, at least 1 MiB")] = ByteSize(1 << 30)
    numa: Annotated[
        Numa,
        Meta(
            description='NUMA nodes of the arena: "auto", the nodes of the accelerators; "off", chosen by the kernel; '
            "or a list of node numbers"
        ),
    ] = "auto"
    huge_pages: Annotated[
        HugePages,
        Meta(
            description='huge pages: "auto", reserved pages if enough are free, else transparent pages '
            'if the kernel allows them for shared memory; "transparent", never reserved pages; '
            '"on", refuse to start without huge pages; "off", normal pages'
        ),
    ] = "auto"

    def __post_init__(self) -> None:
        if self.capacity < LEAST:
            raise ValueError(f"capacity is {self.capacity!s}, expected at least {LEAST}")
        if not self.numa:
            raise ValueError('numa is "auto", "off" or a list of at least one node, found []')


def text_in(file: Path) -> str:
    """What the file says, "" if it cannot be read."""
    try:
        return file.read_text().strip()
    except OSError:
        return ""


def number_in(file: Path) -> int | None:
    try:
        return int(text_in(file), 0)
    except ValueError:
        return None

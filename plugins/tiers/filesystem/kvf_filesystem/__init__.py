"""The `filesystem` L2 tier: a file per object in one folder. Runs in the server process, in its storage threads."""

from __future__ import annotations

import os
from typing import Annotated, Literal

from msgspec import Meta

from kvframework.api.plugin import ByteSize, Finding, Options
from kvframework.api.tier import TableContext, Tier, TierProvider, hookimpl


class FilesystemOptions(Options, frozen=True):
    """Options of the `filesystem` tier; each field has a description."""

    path: Annotated[
        str,
        Meta(
            min_length=1,
            description="path of the folder; a missing one is made with mode 0700. A folder with other files, or that "
            "any user may write to, is refused",
        ),
    ]
    capacity: Annotated[ByteSize, Meta(description="bytes of values that the folder may hold")] = ByteSize(10 << 30)
    fsync: Annotated[
        Literal["none", "data", "full"],
        Meta(
            description='when a put returns, the disk holds: with "none", perhaps nothing; with "data", the file; with '
            '"full", also the file\'s name. Only a power failure or a kernel crash makes a difference; checksums '
            "detect values cut short by one"
        ),
    ] = "none"
    direct: Annotated[
        Literal["auto", "on", "off"],
        Meta(
            description="which values of 1 MiB or more bypass the page cache: auto, values written to a folder "
            "that is not shared, if the file system supports it; on, all values written and read"
        ),
    ] = "auto"
    shared: Annotated[
        bool,
        Meta(
            description="several servers use the folder at the same time, for example by NFS; every server sets it. "
            "Without it a second server is refused"
        ),
    ] = False
    recount_s: Annotated[
        float, Meta(gt=0, le=86400, description="with shared: seconds between two counts of the bytes in the folder")
    ] = 60.0

    def __post_init__(self) -> None:
        if self.capacity < 1:
            raise ValueError("capacity is at least 1 byte, found 0")


def _probe() -> str | None:
    if not hasattr(os, "preadv"):
        return "the tier needs Linux, whose kernel has vectored file access"
    return None


def _create(options: FilesystemOptions, context: TableContext) -> Tier:
    from kvf_filesystem.tier import open_tier

    return open_tier(options, where=context.where)


def _check(options: FilesystemOptions, context: TableContext) -> None:
    from kvf_filesystem.root import check_root

    check_root(options, where=context.where, replaces=context.replaces)


def _store(options: FilesystemOptions) -> str:
    return f"the folder {os.path.realpath(os.path.expanduser(options.path))}"


def _diagnose(options: FilesystemOptions, _context: TableContext, _deadline: float) -> list[Finding]:
    from kvf_filesystem.root import diagnose

    return diagnose(options)


@hookimpl
def kvf_tiers() -> list[TierProvider[FilesystemOptions]]:
    """The provider of the filesystem tier."""
    return [
        TierProvider(
            name="filesystem",
            summary="a file per object in one folder, on a local disk or shared by NFS",
            options=FilesystemOptions,
            shared=True,
            probe=_probe,
            create=_create,
            check=_check,
            store=_store,
            diagnose=_diagnose,
            loads=4,
            writes=2,
        )
    ]

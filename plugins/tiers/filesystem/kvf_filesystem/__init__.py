"""The `filesystem` L2 tier: a file per object in one folder. Runs in the server process, in its storage threads."""

from __future__ import annotations

import os

from kvf_filesystem.options import FilesystemOptions
from kvframework.api.plugin import Finding
from kvframework.api.tier import TableContext, Tier, TierProvider, hookimpl


def _probe() -> str | None:
    if not hasattr(os, "preadv"):
        return "the kernel has no vectored file access: it needs Linux"
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

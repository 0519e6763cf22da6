"""The L2 tier `nixl`: files that NIXL writes and reads, in a helper process: a transfer of NIXL has no deadline,
and goes on after it was given up.

Importing this module imports nothing of NIXL, and neither does the server.
"""

from __future__ import annotations

import os

from kvf_nixl.build import installed_build
from kvf_nixl.options import NixlOptions
from kvframework.api.helper_tier import HelperTier
from kvframework.api.tier import TableContext, Tier, TierProvider, hookimpl
from kvframework.errors import ConfigFieldError


def make_tier(options: NixlOptions, where: str) -> Tier:
    """Return the tier that the helper process serves. The process imports this function by its name."""
    from kvf_nixl.tier import NixlTier

    return NixlTier(options.path, where=where)


def _probe() -> str | None:
    return None if installed_build() else "NIXL is not installed: pip install nixl"


def _check(options: NixlOptions, context: TableContext) -> None:
    if os.path.lexists(options.path) and not os.path.isdir(options.path):
        raise ConfigFieldError(f"{options.path} is no folder", where=f"{context.where} path", hint="name a folder")


def _create(options: NixlOptions, context: TableContext) -> Tier:
    _check(options, context)
    return HelperTier(make_tier, options, name="nixl", where=context.where)


@hookimpl
def kvf_tiers() -> list[TierProvider[NixlOptions]]:
    """The provider of the tier."""
    return [
        TierProvider(
            name="nixl",
            summary="files, by NIXL's POSIX backend in a helper process",
            options=NixlOptions,
            store=lambda options: f"nixl {os.path.realpath(options.path)}",
            probe=_probe,
            check=_check,
            create=_create,
        )
    ]

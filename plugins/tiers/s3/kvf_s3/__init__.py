"""The `s3` L2 tier: an object of a bucket per value, in any S3-compatible store, Google's or Azure's. Runs in the
server process, in its storage threads and one thread of its own.

Importing this module does not import obstore, so that a list of plugins stays cheap.
"""

from __future__ import annotations

from importlib.util import find_spec

from kvf_s3.options import S3Options
from kvframework.api.installing import install_command
from kvframework.api.plugin import Finding
from kvframework.api.tier import TableContext, Tier, TierProvider, hookimpl


def _probe() -> str | None:
    if find_spec("obstore") is None:
        return f"obstore is not installed: {install_command(distribution='kvframework-s3')}"
    return None


def _create(options: S3Options, context: TableContext) -> Tier:
    from kvf_s3.tier import open_tier

    return open_tier(options, where=context.where)


def _check(options: S3Options, context: TableContext) -> None:
    from kvf_s3.settings import read_settings

    read_settings(options, where=context.where)


def _store(options: S3Options) -> str:
    from kvf_s3.addresses import Address

    return Address.parse(options.url).shown(options.endpoint)


def _diagnose(options: S3Options, context: TableContext, deadline: float) -> list[Finding]:
    from kvf_s3.advice import diagnose

    return diagnose(options, context, deadline)


@hookimpl
def kvf_tiers() -> list[TierProvider[S3Options]]:
    """The provider of the S3 tier."""
    return [
        TierProvider(
            name="s3",
            summary="an object store: S3 and what is compatible with it, Google Cloud Storage, Azure Blob Storage",
            options=S3Options,
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

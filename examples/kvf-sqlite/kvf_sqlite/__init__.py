"""The L2 tier `sqlite`: all values in one file. Runs in the server process, in its storage threads."""

from __future__ import annotations

from importlib.util import find_spec

from kvf_sqlite.options import SqliteOptions
from kvframework.api.tier import TableContext, Tier, TierProvider, hookimpl


def _probe() -> str | None:
    if find_spec("_sqlite3") is None:
        return "this Python was built without SQLite: install its package, or build it beside libsqlite3"
    return None


def _create(options: SqliteOptions, context: TableContext) -> Tier:
    from kvf_sqlite.tier import open_tier

    return open_tier(options, where=context.where)


@hookimpl
def kvf_tiers() -> list[TierProvider[SqliteOptions]]:
    """The provider of the tier."""
    return [
        TierProvider(
            name="sqlite",
            summary="all values in one SQLite file, which servers of one machine may share",
            options=SqliteOptions,
            shared=True,
            probe=_probe,
            create=_create,
        )
    ]

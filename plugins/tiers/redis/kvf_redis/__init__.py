"""The `redis` L2 tier: one Redis server, Sentinel or Cluster, shared between nodes. Runs in the server process, in its
storage threads.

Importing this module does not import redis-py, so that a list of plugins stays cheap.
"""

from __future__ import annotations

from importlib.util import find_spec

from kvf_redis.options import RedisOptions
from kvframework.api.installing import install_command
from kvframework.api.plugin import Finding
from kvframework.api.tier import TableContext, Tier, TierProvider, hookimpl


def _probe() -> str | None:
    if find_spec("redis") is None:
        return f"redis is not installed: {install_command(distribution='kvframework-redis')}"
    return None


def _create(options: RedisOptions, context: TableContext) -> Tier:
    from kvf_redis.tier import open_tier

    return open_tier(options, where=context.where)


def _check(options: RedisOptions, context: TableContext) -> None:
    from kvf_redis.settings import read_settings

    read_settings(options, where=context.where)


def _diagnose(options: RedisOptions, context: TableContext, deadline: float) -> list[Finding]:
    from kvf_redis.advice import diagnose

    return diagnose(options, context, deadline)


@hookimpl
def kvf_tiers() -> list[TierProvider[RedisOptions]]:
    """The provider of the Redis tier."""
    return [
        TierProvider(
            name="redis",
            summary="Redis: one server, Sentinel or Cluster, over TCP, TLS or a Unix socket",
            options=RedisOptions,
            shared=True,
            probe=_probe,
            create=_create,
            check=_check,
            diagnose=_diagnose,
        )
    ]

"""The `redis` L2 tier: one Redis server, Sentinel or Cluster, shared between nodes. Runs in the server process, in its
storage threads.

Importing this module does not import redis-py, so that a list of plugins stays cheap.
"""

from __future__ import annotations

from importlib.util import find_spec
from typing import Annotated, Literal

from msgspec import Meta

from kvframework.api.installing import install_command
from kvframework.api.plugin import ByteSize, Finding, Options, SecretUrl
from kvframework.api.tier import TableContext, Tier, TierProvider, hookimpl

_YEAR_S = 365 * 24 * 3600

# Redis closes the connection at a longer value (proto-max-bulk-len), which would fail the whole batch.
MOST_VALUE_BYTES = ByteSize(512 << 20)
LEAST_VALUE_BYTES = ByteSize(64 << 10)


class RedisOptions(Options, frozen=True):
    """Options of the `redis` tier. Its repr holds no password: `url` is shown without user, password and query."""

    url: Annotated[
        SecretUrl,
        Meta(
            min_length=1,
            description="redis://host:6379/0, rediss://host:6379/0 (TLS) or unix:///path/redis.sock?db=0, with "
            "redis-py's parameters; for a cluster or sentinels: one node or one sentinel",
        ),
    ]
    topology: Annotated[
        Literal["single", "sentinel", "cluster"],
        Meta(description="kind of deployment: one server, Redis Sentinel or Redis Cluster"),
    ] = "single"
    nodes: Annotated[
        list[str],
        Meta(
            description='more nodes of the cluster, or more sentinels: ["host:port", ...]; the tier finds all nodes '
            "through the first that answers"
        ),
    ] = []  # noqa: RUF012  msgspec gives each its own
    master_name: Annotated[
        str,
        Meta(description="name of the Redis master in the sentinels' configuration; required for topology sentinel"),
    ] = ""
    username: Annotated[str, Meta(description="ACL user; overrides the user in url")] = ""
    password_env: Annotated[
        str,
        Meta(
            description="name of the environment variable that holds the password, read when the server starts; "
            "overrides the password in url"
        ),
    ] = ""
    password_file: Annotated[
        str,
        Meta(
            description="file that holds the password, read for each new connection, so that it may be rotated; "
            "overrides the password in url"
        ),
    ] = ""
    sentinel_password_env: Annotated[
        str, Meta(description="name of the environment variable that holds the password of the sentinels themselves")
    ] = ""
    tls_ca: Annotated[str, Meta(description="PEM file of trusted certificates; empty: the system's")] = ""
    tls_cert: Annotated[str, Meta(description="PEM file of the client's certificate")] = ""
    tls_key: Annotated[str, Meta(description="PEM file of the client's private key")] = ""
    prefix: Annotated[str, Meta(description="text before the object's key of 72 bytes in every key")] = "kvf:"
    ttl_s: Annotated[
        int,
        Meta(
            ge=0,
            le=10 * _YEAR_S,
            description="seconds after which a key that is neither stored nor used expires; 0: never; "
            "the server's maxmemory-policy then evicts keys",
        ),
    ] = 0
    max_value_bytes: Annotated[
        ByteSize,
        Meta(description="largest value that is stored, 64 KiB to 512 MiB; at most the server's proto-max-bulk-len"),
    ] = MOST_VALUE_BYTES
    connections: Annotated[
        int, Meta(ge=1, le=64, description="most connections to each server; a call uses one per server that it needs")
    ] = 8

    def __post_init__(self) -> None:
        if not LEAST_VALUE_BYTES <= self.max_value_bytes <= MOST_VALUE_BYTES:
            raise ValueError(
                f"max_value_bytes is between {LEAST_VALUE_BYTES} and {MOST_VALUE_BYTES}, found {self.max_value_bytes}"
            )


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
            summary="stores values in Redis: one server, Sentinel or Cluster, over TCP, TLS or a Unix socket",
            options=RedisOptions,
            shared=True,
            probe=_probe,
            create=_create,
            check=_check,
            diagnose=_diagnose,
        )
    ]

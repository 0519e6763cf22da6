"""Owns the options of the `redis` tier, as they stand in its `[[l2]]` table."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from kvframework.api import Options, SecretUrl

_YEAR_S = 365 * 24 * 3600


class RedisOptions(Options, frozen=True):
    """Its repr holds no password: `url` is shown without user, password and query."""

    url: Annotated[
        SecretUrl,
        Meta(
            min_length=1,
            description="redis://host:6379/0, rediss://host:6379/0 (TLS) or unix:///path/redis.sock?db=0",
        ),
    ]
    username: Annotated[str, Meta(description="ACL user; takes precedence over the one in url")] = ""
    password_env: Annotated[
        str, Meta(description="environment variable that holds the password; takes precedence over the one in url")
    ] = ""
    prefix: Annotated[str, Meta(description="comes before the 72 bytes of every key")] = "kvf:"
    ttl_s: Annotated[
        int,
        Meta(ge=0, le=10 * _YEAR_S, description="keys expire this long after they were last stored or used; 0: never"),
    ] = 0
    connections: Annotated[int, Meta(ge=1, le=64, description="connections at most; a call uses one")] = 2

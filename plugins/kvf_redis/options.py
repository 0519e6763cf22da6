"""Owns the options of the `redis` tier, as they stand in its `[[l2]]` table, and how they are shown without secrets."""

from __future__ import annotations

from typing import Annotated

import msgspec

from kvframework.api import Options

_YEAR_S = 365 * 24 * 3600


class RedisOptions(Options, frozen=True):
    """See the table in the plugin's README. Its repr holds no password."""

    url: Annotated[str, msgspec.Meta(min_length=1)]
    username: str = ""
    password_env: str = ""
    prefix: str = "kvf:"
    ttl_s: Annotated[int, msgspec.Meta(ge=0, le=10 * _YEAR_S)] = 0
    connections: Annotated[int, msgspec.Meta(ge=1, le=64)] = 2

    def __repr__(self) -> str:
        return f"RedisOptions({', '.join(f'{name}={value!r}' for name, value in self.__rich_repr__())})"

    def __rich_repr__(self) -> list[tuple[str, object]]:
        shown = [(name, getattr(self, name)) for name in self.__struct_fields__]
        return [(name, masked(value) if name == "url" else value) for name, value in shown]


def masked(url: str) -> str:
    """`url` without user name, password and query, whatever is wrong with it."""
    scheme, separator, rest = url.partition("://")
    if not separator or "password" in rest.lower():
        return "***"
    _, at, place = rest.rpartition("@")
    return f"{scheme}://{'***@' if at else ''}{place.partition('?')[0]}"

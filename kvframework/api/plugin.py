"""The common part of plugins of every kind: the mark of a hook, and the base of the descriptors that hooks return."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Annotated, ClassVar, Generic, Literal, TypeVar

import pluggy
from msgspec import Meta, Struct

from kvframework.api.options import NoOptions, Options

__all__ = ["API_VERSION", "Finding", "Provider", "ServerTerms", "TableContext", "hookimpl"]

PROJECT = "kvframework"
ENTRY_POINT_GROUP = "kvframework.v1"
API_VERSION = (1, 0)

hookimpl = pluggy.HookimplMarker(PROJECT)

O = TypeVar("O", bound=Options)  # noqa: E741


def always_available() -> str | None:
    """The default probe: the plugin can run."""
    return None


@dataclass(frozen=True)
class ServerTerms:
    """What a configuration's `[server]` says to its plugins: the tokens of a chunk, the endpoints at which the server
    listens, and whether it has CURVE keys, which admit clients over TCP."""

    chunk_size: int = 256
    endpoints: tuple[str, ...] = ()
    has_keys: bool = False


@dataclass(frozen=True)
class TableContext:
    """The TOML table for which `create`, `check` or `diagnose` is called. `where` is its place, for error texts.

    `replaces` is for `check`: the process of the server whose place the new one will take, None: no server runs. What
    that process holds, such as a lock, is free by then. `server` is of the same configuration.
    """

    where: str
    replaces: int | None = None
    server: ServerTerms = ServerTerms()


Level = Literal["ok", "warn", "fail"]


class Finding(Struct, frozen=True):
    """The result of one check.

    `id` is stable, of the form "subject.thing", such as "redis.policy". `level` "fail": it will not work; "warn": it
    works, but badly or not for long. `fact` is the observation, with its numbers and never a secret; `advice` is the
    one thing to do about it, "" if there is none. `where` is the place in the TOML; the doctor fills it in for plugins.
    """

    id: Annotated[str, Meta(pattern=r"^[a-z0-9_-]+(\.[a-z0-9_-]+)+$")]
    level: Level
    fact: str
    advice: str = ""
    where: str = ""


# (options, TableContext, deadline) -> Sequence[Finding]: the report of `kvframework doctor` on a plugin's store or
# device.
Diagnose = Callable[[O, TableContext, float], Sequence[Finding]]


# (options, TableContext): raises what `create` would raise.
Check = Callable[[O, TableContext], None]


@dataclass(frozen=True, kw_only=True)
class Provider(Generic[O]):
    """Base of every descriptor.

    `name` is the part of the entry point after the kind. `options` validates the plugin's TOML table. `requires_api` is
    the lowest API version "major.minor" that the plugin needs. `probe` says why the plugin cannot run here (with the
    command that installs the missing part), or None; it must be quick and without side effects. `serve` and
    `config check` end with an error if a hook, `probe` or `check` has not returned within 20 s, the import or `create`
    within 60 s. Time in which the call waits for a core does not count, up to ten times as long.

    `check` is a function (options, TableContext) that raises the `KVFrameworkError` that `create` would raise, as far
    as that can be seen beforehand: a size beyond the machine, a folder that is none. `serve` calls it before it creates
    anything, `config check` and `kvframework doctor` call it for their reports. It changes nothing, takes no lock, and
    blocks for a second at most.
    """

    kind: ClassVar[str]

    name: str
    summary: str
    options: type[O] = NoOptions  # type: ignore[assignment]
    requires_api: str = "1.0"
    probe: Callable[[], str | None] = always_available
    check: Check[O] | None = None

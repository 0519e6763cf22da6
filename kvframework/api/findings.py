"""The result of one check of `kvframework doctor`, of the core or of a plugin."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta, Struct

__all__ = ["Finding"]

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

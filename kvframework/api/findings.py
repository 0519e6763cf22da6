"""Owns the type in which checks of `kvframework doctor` say what they saw, those of plugins too."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta, Struct

__all__ = ["Finding"]

Level = Literal["ok", "warn", "fail"]


class Finding(Struct, frozen=True):
    """What one check saw.

    `id` is stable, of the form "subject.thing", such as "redis.policy". "fail": it will not work; "warn": it works, and
    badly or not for long. `fact` says what was seen, with its numbers and never a secret; `advice` is the one thing to
    do about it, "" if there is nothing. `where` is the place in the TOML; the doctor fills it in for plugins.
    """

    id: Annotated[str, Meta(pattern=r"^[a-z0-9_-]+(\.[a-z0-9_-]+)+$")]
    level: Level
    fact: str
    advice: str = ""
    where: str = ""

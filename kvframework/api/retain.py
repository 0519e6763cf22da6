"""`Retain`: what a request says of the future of its KV, and how an engine's users write it.

Ranges and their fields (`start`, `end`, `priority`, `duration`) are spelled as in vLLM's proposed
`retention_directives`, which follow TensorRT-LLM's `KvCacheRetentionConfig`; docs/hints.md has the sources.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Literal

import msgspec

from kvframework.api.types import Message
from kvframework.errors import RequestError

__all__ = ["MAX_RETAINS", "Retain", "retain_of"]

MAX_RETAINS = 16
# An hour, and what "soon" means.
MAX_DURATION_S, SOON_S = 3600.0, 300.0
PRIORITY = 50
_MAX_TOKEN = 1 << 40
_WORDS = ("done", "soon")
_FIELDS = ("retain", "priority", "duration", "start", "end")
_FORMS = '"done", "soon", seconds, or objects of ' + ", ".join(_FIELDS)

Token = Annotated[int, msgspec.Meta(ge=0, le=_MAX_TOKEN)]


class Retain(Message, frozen=True):
    """`what` "done": no one asks for these tokens again; "keep": keep them before others for `duration` seconds, those
    of a higher `priority` (1 to 100) longest.

    It is said of the tokens `[start, end)` of the prompt, of all chunks that lie in there as a whole; `end` None: up to
    the end. With `start` None it is said of the request, and "done" then only of what the request is the first to
    store: others may use what it found, and what came again although that had been said of it before.
    """

    what: Literal["done", "keep"]
    duration: Annotated[float, msgspec.Meta(ge=0.0, le=MAX_DURATION_S)] = SOON_S
    priority: Annotated[int, msgspec.Meta(ge=1, le=100)] = PRIORITY
    start: Token | None = None
    end: Token | None = None

    def __post_init__(self) -> None:
        if not 0.0 <= self.duration <= MAX_DURATION_S:  # also for what is not a number
            raise ValueError(f"duration is {self.duration}, expected 0 to {MAX_DURATION_S:.0f} seconds")
        if not 1 <= self.priority <= 100:
            raise ValueError(f"priority is {self.priority}, expected 1 to 100")


def retain_of(value: object) -> tuple[Retain, ...]:
    """Return what a user has written as JSON: "done", "soon", a number of seconds, one object of `retain`, `priority`
    (0 to 100; 0 is "done"), `duration` (seconds), `start` and `end` (tokens), or a list of them, of which the first
    that fits a chunk counts. None is nothing. Raises `RequestError`, which names what is wrong."""
    if value is None:
        return ()
    items = value if isinstance(value, (list, tuple)) else [value]
    if len(items) > MAX_RETAINS:
        raise _wrong(f"{len(items)} ranges", f"at most {MAX_RETAINS}")
    return tuple(_one(item) for item in items)


def _one(item: object) -> Retain:
    if not isinstance(item, Mapping):
        return _said(item, {})
    unknown = [key for key in item if key not in _FIELDS]
    if unknown:
        raise _wrong(f"the field {str(unknown[0])[:40]!r}", ", ".join(_FIELDS))
    limits: dict[str, int | None] = {}
    for name in ("start", "end"):
        limits[name] = token = item.get(name)
        if token is not None and not (_is_int(token) and 0 <= token <= _MAX_TOKEN):
            raise _wrong(f"{name} is {_shown(token)}", "a number of tokens from the prompt's first one")
    priority, duration = item.get("priority"), item.get("duration")
    if priority is not None and not (_is_int(priority) and 0 <= priority <= 100):
        raise _wrong(f"priority is {_shown(priority)}", "0 to 100")
    if "retain" in item:
        if priority is not None or duration is not None:
            raise _wrong("retain beside priority or duration", "either of them")
        return _said(item["retain"], limits)
    if priority is None and duration is None:
        raise _wrong("an object without a hint", "retain, priority or duration")
    if priority == 0:
        return _made("done", limits)
    seconds = SOON_S if duration is None else _seconds(duration)
    return _made("keep", limits, seconds, PRIORITY if priority is None else int(priority))


def _said(value: object, limits: Mapping[str, int | None]) -> Retain:
    if isinstance(value, str):
        if value not in _WORDS:
            raise _wrong(f"the word {value[:40]!r}", _FORMS)
        return _made("done" if value == "done" else "keep", limits)
    return _made("keep", limits, _seconds(value))


def _made(
    what: Literal["done", "keep"], limits: Mapping[str, int | None], duration: float = SOON_S, priority: int = PRIORITY
) -> Retain:
    start, end = limits.get("start"), limits.get("end")
    if end is not None and start is None:
        start = 0
    if end is not None and start is not None and end <= start:
        raise _wrong(f"end is {end}", f"more than start, which is {start}")
    return Retain(what, duration, priority, start, end)


def _seconds(value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0.0 <= value <= MAX_DURATION_S:
        raise _wrong(_shown(value), f'"done", "soon", or 0 to {MAX_DURATION_S:.0f} seconds')
    return float(value)


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _shown(value: object) -> str:
    return repr(value)[:40]


def _wrong(fact: str, expected: str) -> RequestError:
    return RequestError(fact, where="retain", available=expected, hint="see docs/hints.md")

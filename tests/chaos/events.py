"""Owns what an engine process is told, and what it tells the harness: one message of JSON each. Times are those of
`time.monotonic`, which all processes of a machine share."""

from __future__ import annotations

import msgspec


class Settings(msgspec.Struct, frozen=True):
    """Of an engine process. `incarnation` counts its starts."""

    endpoint: str
    seed: int
    number: int
    model: str
    path: str
    deadline_scale: float
    incarnation: int = 0


class Event(msgspec.Struct, frozen=True, tag=True):
    """One message."""


class Tally(Event, frozen=True):
    """What has happened since the last one."""

    turns: int = 0
    loads: int = 0
    failed_loads: int = 0
    chunks_loaded: int = 0
    bytes_checked: int = 0
    chunks_stored: int = 0
    chunks_dropped: int = 0
    aborted: int = 0


class Claim(Event, frozen=True):
    """STORE said that every chunk of this prompt from `first` on is there. `evictions` and `boot_id` are the server's,
    before the store, at `began`."""

    model: str
    namespace: bytes
    digests: bytes
    first: int
    evictions: int
    boot_id: str
    began: float


class Complaint(Event, frozen=True):
    """A broken promise, between two times. `excuses` are the faults that explain it."""

    text: str
    began: float
    ended: float
    excuses: tuple[str, ...] = ()


class TimedOut(Event, frozen=True):
    """A control call was given up."""

    name: str
    ended: float


AnyEvent = Tally | Claim | Complaint | TimedOut
_decoder = msgspec.json.Decoder(AnyEvent)  # type: ignore[arg-type]


def encode(event: Event) -> bytes:
    return msgspec.json.encode(event)


def decode(message: bytes) -> AnyEvent:
    """Raises `msgspec.DecodeError`."""
    event: AnyEvent = _decoder.decode(message)
    return event

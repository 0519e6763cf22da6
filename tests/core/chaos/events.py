"""Messages between the harness and an engine process, each one a JSON document. Times are those of `time.monotonic`,
which all processes of a machine share."""

from __future__ import annotations

import msgspec


class Settings(msgspec.Struct, frozen=True):
    endpoint: str
    seed: int
    number: int
    model: str
    path: str
    deadline_scale: float
    incarnation: int = 0


class Event(msgspec.Struct, frozen=True, tag=True):
    """One message from an engine to the harness."""


class Tally(Event, frozen=True):
    turns: int = 0
    loads: int = 0
    failed_loads: int = 0
    chunks_loaded: int = 0
    bytes_checked: int = 0
    chunks_stored: int = 0
    chunks_dropped: int = 0
    aborted: int = 0


class Claim(Event, frozen=True):
    """A STORE that stored every chunk of this prompt from `first` on. `evictions` and `boot_id` are those of the server
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
    """A control call that timed out."""

    name: str
    ended: float


AnyEvent = Tally | Claim | Complaint | TimedOut
_decoder = msgspec.json.Decoder(AnyEvent)  # type: ignore[arg-type]


def encode(event: Event) -> bytes:
    return msgspec.json.encode(event)


def decode(message: bytes) -> AnyEvent:
    """Decode an event. Raises `msgspec.DecodeError`."""
    event: AnyEvent = _decoder.decode(message)
    return event

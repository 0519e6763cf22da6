"""The file in which pins and conversations outlast their process: the server that started it may be replaced.

It holds salts and digests, and is for its owner alone. A file that cannot be read, or is of another format, is as none.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated

import msgspec

from kvf_control.orders import MOST_PIN_S, MOST_PINS, Prefetch
from kvf_control.runs import Held, Place, Run
from kvframework.api.keys import DIGEST_BYTES

log = logging.getLogger(__name__)

FORMAT = 1
# Of a file that is read, and of the digests that are written.
MOST_FILE, MOST_DIGESTS = 64 << 20, 16 << 20
# A process that saves takes at most a twentieth of its time for it.
PAUSE = 20.0


class SavedRun(msgspec.Struct, frozen=True, array_like=True):
    place: Place
    salt: str
    nbytes: Annotated[int, msgspec.Meta(ge=0)]
    digests: Annotated[bytes, msgspec.Meta(min_length=DIGEST_BYTES)]

    def __post_init__(self) -> None:
        if len(self.digests) % DIGEST_BYTES:
            raise ValueError("a digest is incomplete")


class SavedPin(msgspec.Struct, frozen=True, array_like=True):
    """`at` and `until` are Unix seconds."""

    id: str
    tenant: str
    conversation: str
    at: float
    until: Annotated[float, msgspec.Meta(ge=0)]
    runs: tuple[SavedRun, ...]


class Saved(msgspec.Struct, frozen=True, array_like=True):
    format: int
    pins: Annotated[tuple[SavedPin, ...], msgspec.Meta(max_length=MOST_PINS)]
    conversations: tuple[tuple[str, str, tuple[SavedRun, ...]], ...]


class StateFile:
    """`read` and `write` block for the file. No error of theirs is raised: it is logged, and the orders go on."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._due = 0.0

    @property
    def is_due(self) -> bool:
        """Whether enough time has passed since the last write."""
        return time.monotonic() >= self._due

    def read(self, make: Callable[..., Run]) -> tuple[list[Held], dict[tuple[str, str], list[Run]]]:
        """Return the pins whose time has not passed, and the conversations by tenant and name."""
        try:
            saved = self._read()
        except FileNotFoundError:
            return [], {}
        except (OSError, msgspec.MsgspecError) as error:
            log.error("pins and conversations of before are lost: %s: %s", self._path, error)
            return [], {}

        def runs(given: Iterable[SavedRun]) -> list[Run]:
            return [make(each.place, each.salt, digests=each.digests, nbytes=each.nbytes) for each in given]

        now, clock = time.time(), time.monotonic()
        pins = []
        for pin in saved.pins:
            if pin.until > now:
                order = Prefetch(tenant=pin.tenant, conversation=pin.conversation)
                until = clock + min(pin.until - now, MOST_PIN_S)
                pins.append(Held(pin.id, "pin", order, runs(pin.runs), until, "held", pin.at, clock))
        return pins, {(tenant, name): runs(given) for tenant, name, given in saved.conversations}

    def write(self, pins: Sequence[Held], conversations: Mapping[tuple[str, str], Sequence[Run]]) -> None:
        """Replace the file, without waiting for a disk: where a node has lost power, the engines' KV is gone too."""
        began = time.monotonic()
        told = [(pin, pin.told().until) for pin in pins]
        saved = Saved(
            FORMAT,
            tuple(
                SavedPin(pin.id, pin.order.tenant, pin.order.conversation, pin.at, until, tuple(map(_saved, pin.runs)))
                for pin, until in told
            ),
            tuple(_latest(conversations)),
        )
        draft = self._path.with_name(f"{self._path.name}.{os.getpid()}")
        try:
            with open(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, 0o600), "wb") as file:
                file.write(msgspec.msgpack.encode(saved))
            draft.replace(self._path)
        except OSError as error:
            log.error("pins and conversations would not outlast this process: %s: %s", self._path, error.strerror)
        now = time.monotonic()
        self._due = now + PAUSE * (now - began)

    def _read(self) -> Saved:
        with open(os.open(self._path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK), "rb") as file:
            found = os.fstat(file.fileno())
            if found.st_uid != os.geteuid() or found.st_mode & 0o077:
                raise PermissionError("the file is another user's, or open to others")
            saved = msgspec.msgpack.decode(file.read(MOST_FILE), type=Saved)
        if saved.format != FORMAT:
            raise msgspec.ValidationError(f"the format is {saved.format}, not {FORMAT}")
        return saved


def _saved(run: Run) -> SavedRun:
    return SavedRun(run.place, run.salt, run.nbytes, run.digests)


def _latest(
    conversations: Mapping[tuple[str, str], Sequence[Run]],
) -> Iterator[tuple[str, str, tuple[SavedRun, ...]]]:
    """Yield what fits of the conversations, those that were named last."""
    room, chosen = MOST_DIGESTS, []
    for (tenant, name), runs in reversed(list(conversations.items())):
        room -= sum(len(run.digests) for run in runs)
        if room < 0:
            break
        chosen.append((tenant, name, tuple(map(_saved, runs))))
    yield from reversed(chosen)

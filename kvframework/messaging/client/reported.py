"""What a client's PINGs and LOOKUPs carry besides: losses, short prompts, tickets to free. Thread-safe."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterable

from kvframework.api.transport import LostKind
from kvframework.wire.messages import (
    LOST_AMOUNTS,
    LOST_CALLS,
    MAX_FREED,
    MAX_LOST,
    MAX_LOST_CODE,
    MAX_SHORT,
    MAX_SHORT_ID,
    MOST_LOST,
    Lost,
    ShortPrompt,
)

# The losses that a client has not reported to its server yet: failed calls by kind and error code. Thread-safe.
#
# PINGs carry them. A server that answered such a PING knows them, whichever session it was.

_OTHERS = "other"


class Losses:
    """Losses that no server knows of yet; `report` covers the time since `begin`, so that a repeated report counts
    once."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._untold: dict[str, Lost] = {}
        self._known: tuple[Lost, ...] = ()

    def add(self, kind: LostKind, code: str, nbytes: int = 0) -> None:
        """Add one failed call, and the bytes that it was to move."""
        code = code[:MAX_LOST_CODE]
        with self._lock:
            if code not in self._untold and len(self._untold) >= MAX_LOST - 1:
                code = _OTHERS
            lost = self._untold.get(code) or Lost(code)
            one = Lost(code, nbytes=nbytes, **{kind: 1})
            self._untold[code] = _combined(lost, one, 1)

    def begin(self) -> None:
        """Start a new session: its reports contain the losses that no earlier session acknowledged."""
        with self._lock:
            known, self._known = {each.code: each for each in self._known}, ()
            left = {
                code: _combined(lost, known[code], -1) if code in known else lost for code, lost in self._untold.items()
            }
            self._untold = {code: lost for code, lost in left.items() if _counts(lost)}

    def report(self) -> tuple[Lost, ...]:
        """Return all losses of this session; () if its server knows them already."""
        with self._lock:
            all_of_it = tuple(self._untold.values())
            return () if all_of_it == self._known else all_of_it

    def acknowledged(self, report: tuple[Lost, ...]) -> None:
        """Record that the server of this session has answered a PING with this report."""
        if report:
            with self._lock:
                self._known = report


def _combined(one: Lost, other: Lost, sign: int) -> Lost:
    amounts = {name: min(max(getattr(one, name) + sign * getattr(other, name), 0), MOST_LOST) for name in LOST_AMOUNTS}
    return Lost(one.code, **amounts)


def _counts(lost: Lost) -> bool:
    return any(getattr(lost, name) for name in LOST_CALLS)


# The prompts shorter than a chunk that a client has not looked up, for the server's explanations. Thread-safe.
#
# PINGs carry them. Without them an operator would look for a lookup that was never sent.


class ShortPrompts:
    """The number of such prompts in this session, and the last `MAX_SHORT` of them."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._count = self._known = 0
        self._last: deque[ShortPrompt] = deque(maxlen=MAX_SHORT)

    def add(self, request_id: str, tokens: int) -> None:
        """Add a prompt, unless it is the last one: a scheduler may ask for one request again and again."""
        prompt = ShortPrompt(request_id[:MAX_SHORT_ID], tokens)
        with self._lock:
            if not self._last or self._last[-1] != prompt:
                self._count = min(self._count + 1, MOST_LOST)
                self._last.append(prompt)

    def begin(self) -> None:
        """Start a new session: its server knows of none."""
        with self._lock:
            self._count, self._known = self._count - self._known, 0

    def report(self) -> tuple[int, tuple[ShortPrompt, ...]]:
        """Return the number of this session, and the last ones; (0, ()) if its server knows them already."""
        with self._lock:
            unknown = self._count - self._known
            return (self._count, tuple(self._last)[-min(unknown, MAX_SHORT) :]) if unknown else (0, ())

    def acknowledged(self, count: int) -> None:
        """Record that the server has answered a PING with this number."""
        with self._lock:
            self._known = max(self._known, count)


# The tickets that a client has done with, until a request takes them to the server. Thread-safe.
#
# A LOOKUP carries them, or the next PING, and no caller waits. A PING is sent for them alone only ahead of a request
# that needs their room. At the link's end they are forgotten, since its session's tickets end with it.


class FreedTickets:
    """The tickets, oldest first."""

    def __init__(self) -> None:
        self._tickets: deque[str] = deque()

    def begin(self) -> None:
        """Start a new session, which has no tickets."""
        self._tickets.clear()

    def add(self, tickets: Iterable[str]) -> None:
        """Add tickets; more than once does no harm."""
        self._tickets.extend(tickets)

    def take(self) -> tuple[str, ...]:
        """Remove and return the next ones, `MAX_FREED` at most. Who cannot send them gives them back by `add`."""
        taken: list[str] = []
        while self._tickets and len(taken) < MAX_FREED:
            try:
                taken.append(self._tickets.popleft())
            except IndexError:  # another thread took it
                break
        return tuple(taken)

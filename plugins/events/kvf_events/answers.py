"""The answers to readers that lack messages, each sent as fast as its reader takes it. Pure.

A reader that takes nothing costs what its queue holds, and one of `MOST_ANSWERS` places until it has left: the rest of
its answer is given up. The end of the answer, without which some readers wait for ever, is sent once there is room.
However many ask, answers take a share of a core, since the serving thread has the same interpreter.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator

from kvf_events.history import Numbered

END = Numbered(b"", (1 << 64) - 1, b"")

# Answers under way, and questions that wait for one of these places.
MOST_ANSWERS = 32
MOST_WAITING = 1024
# Without a message taken, after which an answer is given up.
STALLED_S = 10.0
# Of messages in one turn; a message counts for some more than its own.
_TURN_BYTES = 1 << 18
MESSAGE_BYTES = 1 << 10
# Of a core.
_SHARE = 0.25
_SOON_S, _LATER_S = 0.001, 0.02


class _Answer:
    """`message` is sent next, then those that are left; `moved_at` is when the last one was taken."""

    def __init__(self, messages: Iterator[Numbered], now: float) -> None:
        self.left = messages
        self.message = next(messages, END)
        self.moved_at = now

    def end(self) -> None:
        self.left, self.message = iter(()), END


class Answers:
    """See the module. `send` sends a message to a client: False if there is no room for it yet, None if the client has
    left. `messages` returns those from a number on, and changes no more with the state. `spent` is the clock of the
    processor time of this thread."""

    def __init__(
        self,
        send: Callable[[bytes, Numbered], bool | None],
        messages: Callable[[int], Iterable[Numbered]],
        spent: Callable[[], float] = time.thread_time,
    ) -> None:
        self.given_up = 0
        self._spent = spent
        self._share = _SHARE
        self._rest_until = -math.inf
        self._send = send
        self._messages = messages
        self._waiting: dict[bytes, int] = {}
        self._open: dict[bytes, _Answer] = {}

    def ask(self, client: bytes, number: int) -> None:
        """A client lacks the messages from a number on. Of its questions the last one is answered."""
        if len(self._waiting) >= MOST_WAITING and client not in self._waiting:
            self.given_up += 1
            return
        self._waiting[client] = number

    def end(self) -> bool:
        """Send nothing any more but the ends, and those at once, also to who asks from now on. True if any are due."""
        self._share, self._rest_until = math.inf, -math.inf
        self._messages = lambda _number: ()
        for client in self._waiting:
            self._open.setdefault(client, _Answer(iter(()), 0.0))
        self._waiting.clear()
        for answer in self._open.values():
            answer.end()
        return bool(self._open)

    def turn(self, now: float) -> float:
        """Begin an answer and send what readers take, for a few milliseconds at most; return the seconds until the next
        turn, infinity if all is sent. Does nothing before that turn."""
        if not self._open and not self._waiting:
            return math.inf
        if now < self._rest_until:
            return self._rest_until - now
        began = self._spent()
        self._begin(now)
        nbytes = _TURN_BYTES
        for client in list(self._open):
            if nbytes > 0:
                nbytes -= self._go_on(client, now, nbytes)
        pause = _SOON_S if self._waiting or nbytes < _TURN_BYTES else _LATER_S
        lasts = (self._spent() - began) / self._share
        self._rest_until = now + lasts
        return max(pause, lasts) if self._open or self._waiting else math.inf

    def _begin(self, now: float) -> None:
        for client in self._waiting:
            if client in self._open or len(self._open) < MOST_ANSWERS:
                self._open[client] = _Answer(iter(self._messages(self._waiting.pop(client))), now)
                return

    def _go_on(self, client: bytes, now: float, most: int) -> int:
        """Send about so many bytes of an answer, and return how many; after that it is the turn of all others."""
        answer, nbytes = self._open.pop(client), 0
        while nbytes < most:
            sent = self._send(client, answer.message)
            if sent is None or (sent and answer.message is END):
                return nbytes + MESSAGE_BYTES
            if not sent:
                if answer.message is not END and now - answer.moved_at > STALLED_S:
                    self.given_up += 1
                    answer.end()
                break
            answer.moved_at = now
            nbytes += MESSAGE_BYTES + len(answer.message.payload)
            answer.message = next(answer.left, END)
        self._open[client] = answer
        return nbytes

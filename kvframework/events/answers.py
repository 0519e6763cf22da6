"""The answers to readers that lack messages, each sent as fast as its reader takes it. Pure.

A reader that takes nothing costs what its queue holds, and one of `MOST_ANSWERS` places until it has left: the rest of
its answer is given up. The end of the answer, without which some readers wait for ever, is sent once there is room.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator

from kvframework.events.history import Numbered

END = Numbered(b"", (1 << 64) - 1, b"")

# Answers under way, and questions that wait for one of these places.
MOST_ANSWERS = 32
MOST_WAITING = 1024
# Without a message taken, after which an answer is given up.
STALLED_S = 10.0
# Of messages in one turn; a message counts for some more than its own.
_TURN_BYTES = 1 << 18
_MESSAGE_BYTES = 1 << 10
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
    left. `messages` returns those from a number on, and changes no more with the state."""

    def __init__(
        self, send: Callable[[bytes, Numbered], bool | None], messages: Callable[[int], Iterable[Numbered]]
    ) -> None:
        self.given_up = 0
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

    def end(self) -> None:
        """Send nothing any more but the ends."""
        for client in self._waiting:
            self._open.setdefault(client, _Answer(iter(()), 0.0))
        self._waiting.clear()
        for answer in self._open.values():
            answer.end()

    def turn(self, now: float) -> float:
        """Send what readers take, for a few milliseconds at most; return the seconds until the next turn, infinity if
        all is sent."""
        for client in list(self._waiting):
            if client in self._open or len(self._open) < MOST_ANSWERS:
                self._open[client] = _Answer(iter(self._messages(self._waiting.pop(client))), now)
        moved = False
        for client, answer in list(self._open.items()):
            moved |= self._go_on(client, answer, now, _TURN_BYTES // len(self._open) + 1)
        if not self._open:
            return _SOON_S if self._waiting else math.inf
        return _SOON_S if moved else _LATER_S

    def _go_on(self, client: bytes, answer: _Answer, now: float, nbytes: int) -> bool:
        """Send so many bytes of an answer. True if any was sent."""
        moved = False
        while nbytes > 0:
            sent = self._send(client, answer.message)
            if sent is None or (sent and answer.message is END):
                del self._open[client]
                return True
            if not sent:
                if answer.message is not END and now - answer.moved_at > STALLED_S:
                    self.given_up += 1
                    answer.end()
                return moved
            moved, answer.moved_at = True, now
            nbytes -= _MESSAGE_BYTES + len(answer.message.payload)
            answer.message = next(answer.left, END)
        return moved

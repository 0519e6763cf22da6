"""Which batches of a publisher are taken in, and when it is asked for those that are missing. Pure.

A publisher numbers its batches. Numbers may go on, jump (batches were lost) or begin again (it was restarted), and a
connection may have ended between two that seem to follow each other. In every doubt there is one question: *replay from
the last batch that is certain*. If the answer begins with that very batch, nothing else can have come between, and what
follows it is taken in. If not, what is known proves nothing: it is forgotten, and the replay is asked for from 0, whose
answer is taken as it comes.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

import xxhash


class Sink(Protocol):
    """What batches are taken into. To take the same ones again, in order, changes nothing."""

    def apply(self, topic: bytes, payload: bytes) -> None: ...

    def clear(self) -> None: ...


class _Batch(NamedTuple):
    number: int
    digest: bytes


class Follower:
    """Gets what happens to one subscription, in order. While `question` is a number, live batches have to wait.

    `lost` counts batches that no replay gave, `forgotten` how often everything was forgotten.
    """

    def __init__(self, sink: Sink, *, has_replay: bool) -> None:
        self.lost = self.forgotten = 0
        # The number from which a replay is wanted; None if none is.
        self.question: int | None = None
        # Whether batches may be missing, and no replay could be had.
        self.in_doubt = False
        self._sink = sink
        self._has_replay = has_replay
        self._last: int | None = None
        self._last_live: int | None = None
        # Up to here nothing is missing.
        self._certain: _Batch | None = None
        # The batch with which the answer under way has to begin, None if it may begin anywhere; whether it has begun.
        self._asked: _Batch | None = None
        self._proven = False
        # The live batch that waits for the answer.
        self._waiting: int | None = None

    def connected(self) -> None:
        """A connection is made, the first one or another; or it is time to ask again after `failed`."""
        if self._has_replay:
            self._last_live = None
            self._ask()

    def live(self, topic: bytes, number: int, payload: bytes) -> bool:
        """A batch arrives. False if it is not taken in, and has to be given again after the replay."""
        fell = self._last_live is not None and number <= self._last_live
        if not fell and self._last is not None and number <= self._last:
            self._last_live = number  # a replay has brought it before
            return True
        if number != 0 if self._last is None else fell or number > self._last + 1:
            if self._has_replay and not self.in_doubt and self._waiting != number:
                self._waiting, self._last_live = number, None
                self._ask()
                return False
            if fell:
                self._forget()
            elif self._last is not None:
                self.lost += number - self._last - 1
        self._waiting = None
        self._last_live = number
        self._take(topic, number, payload)
        return True

    def answer(self, topic: bytes, number: int, payload: bytes) -> bool:
        """A batch of the replay arrives. False if the rest of it is of no use: `question` is another one."""
        if self._asked is None:
            self._begin()
            if self._last is None or number > self._last:
                self.lost += number - self._last - 1 if self._last is not None else 0
                self._take(topic, number, payload)
            return True
        if self._proven and self._last is not None and number == self._last + 1:
            self._take(topic, number, payload)
            return True
        if not self._proven and self._asked == _Batch(number, _digest(payload)):
            self._proven, self._last = True, number
            return True
        self._forget()
        self._ask()
        return False

    def end(self) -> None:
        """The replay ends. There may be another question."""
        if self._asked is not None and not self._proven:
            self._forget()
            self._ask()
        else:
            self._begin()
            self.question = None
            self.in_doubt = False

    def failed(self) -> None:
        """The replay could not be had, or not to its end: live batches are taken as they come until `connected`."""
        self.question = None
        self.in_doubt = True
        self._last_live = self._last

    def _ask(self) -> None:
        self._asked, self._proven = self._certain, False
        self.question = 0 if self._asked is None else self._asked.number

    def _begin(self) -> None:
        """An answer from 0 begins, or has ended empty: what was taken in doubt may be another publisher's."""
        if not self._proven and self._last is not None:
            self._forget()
        self._proven = True

    def _take(self, topic: bytes, number: int, payload: bytes) -> None:
        self._sink.apply(topic, payload)
        self._last = number
        if self.question is not None or not self.in_doubt:
            self._certain = _Batch(number, _digest(payload))

    def _forget(self) -> None:
        self.forgotten += 1
        self._sink.clear()
        self._last = self._last_live = self._certain = None


def _digest(payload: bytes) -> bytes:
    return xxhash.xxh3_128_digest(payload)

"""The thread that tells routers: news on a PUB socket, and what a reader lacks on a ROUTER socket, as vLLM's publisher
does. It starts with what the ledger says was announced before.

Each life of a server begins with a jump in the numbers, and each new subscriber gets a message at once: so a reader
notices at once that it lacks something, and asks. After the last news empty messages follow, since a reader may lack
that very message. Nothing here can fail a request: errors are logged and are problems of the status document.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence

from kvf_events.announcer import Announcer
from kvf_events.block_index import Medium, News, Removed, Stored
from kvf_events.history import ANSWER_BYTES, Answers, History, Numbered
from kvf_events.ledger import RESERVE, Found, Ledger
from kvf_events.sockets import EventSockets
from kvframework.api.listener import Records

log = logging.getLogger(__name__)

# News are collected for so long, and for longer with each number that a late reader has to be given.
BATCH_S = 0.05
_BATCH_S_A_NUMBER = 1e-7
# After the last news comes an empty message, and the next ones after twice the time each, up to the longest.
BEAT_S = 1.0
_LONGEST_BEAT_S = 60.0
# After so many bytes of messages the serving thread gets its turn.
_PAUSE_BYTES = 1 << 18
_PAUSE_S = 0.0005
# After a ledger that could not be written.
_WRITE_AGAIN_S = 10.0
# A turn that takes longer is a problem: of the disk of the ledger, most likely.
HANGS_S = 30.0
# A subscriber that learns of a gap at the end requests a replay at once; replays under way end then, read or not, and a
# further request is answered by the end alone.
_LAST_QUESTIONS_S = 0.1
_LAST_ENDS_S = 0.5


class Publisher:
    """`sockets` are bound and owned from here on, and so is the ledger, which `found` was read from. `history` makes
    the stream from the first number on."""

    def __init__(
        self,
        announcer: Announcer,
        ledger: Ledger,
        found: Found,
        history: Callable[[int], History],
        sockets: EventSockets,
        *,
        batch_s: float = BATCH_S,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.counters = {"batches": 0, "replays": 0, "subscribers": 0, "bad_requests": 0}
        self.problem = ""
        self._announcer = announcer
        self._ledger = ledger
        self._found: Found | None = found
        self._history = history(found.next and found.next + RESERVE)
        self._reserved = 0
        self._silence_s = BEAT_S
        self._beat_at = 0.0
        self._write_at = 0.0
        self._turn_at = math.inf
        self._sockets = sockets
        self._answers = Answers(sockets.answer, self._from)
        self._batch_s = batch_s
        self._clock = clock

    @property
    def hangs(self) -> str:
        """What is wrong with a turn that does not end, "" for nothing. From any thread."""
        seconds = time.monotonic() - self._turn_at
        return f"the publisher of events hangs for {seconds:.0f} s" if seconds > HANGS_S else ""

    @property
    def next_number(self) -> int:
        return self._history.next

    @property
    def unread_replays(self) -> int:
        return self._answers.given_up

    @property
    def ledger_bytes(self) -> int:
        return self._ledger.nbytes

    def run(self, records: Records) -> None:
        """Announce until the records end, then the removals that come with this server's end, answer replay requests,
        and close: a reader may wait for ever for the end of a replay. If L1 is handed over, the next server reads its
        content in the ledger."""
        try:
            self._turn_at = time.monotonic()
            self._begin(records)
            while not records.ended:
                self._turn_at = time.monotonic()
                self._turn(records)
            self._announce(self._announcer.turn(records.take()))
            if records.handed_over and not self._ledger.keeps:
                self._ledger.keeps = True
                self._anew(self._announcer.index.announced())
            if not self._ledger.keeps:
                self._announcer.index.forget()
                self._announce(self._announcer.index.take())
            self._listen(_LAST_QUESTIONS_S)
            if self._answers.end():
                # Who reads an end goes on with what it has heard meanwhile, lacks what is between, and asks again.
                self._listen(_LAST_ENDS_S)
        except Exception as error:
            self.problem = f"the server sends no events to routers: {error!r}"
            log.exception("the server stopped sending events to routers")
        finally:
            self._turn_at = math.inf
            self._sockets.close()
            self._ledger.close()

    def _begin(self, records: Records) -> None:
        found, self._found = self._found, None
        assert found is not None
        for number, removed in found.gone:
            self._history.gone(removed, number)
        for namespace, contents in found.contents.items():
            self._announcer.adopt(namespace, list(contents.values()))
        news = _changed(found, self._announcer.turn(records.take()), self._announcer.index.announced())
        self._anew(found.announced)
        self._announce(news, empty=not news)

    def _turn(self, records: Records) -> None:
        joined = self._listen(max(self._batch_s, self._history.next * _BATCH_S_A_NUMBER), records)
        self._announce(self._announcer.turn(records.take()), empty=joined or time.monotonic() >= self._beat_at)

    def _listen(self, seconds: float, records: Records | None = None) -> bool:
        """Answer readers for so long, or until `records` end. True if there are new ones."""
        until = time.monotonic() + seconds
        joined = 0
        while (left := until - time.monotonic()) > 0 and not (records is not None and records.ended):
            subscribers, requests = self._sockets.wait(min(left, self._answers.turn(time.monotonic())))
            joined += subscribers
            for client, asked in requests:
                if asked is None:
                    self.counters["bad_requests"] += 1
                else:
                    self.counters["replays"] += 1
                    self._answers.ask(client, asked)
        self.counters["subscribers"] += joined
        return joined > 0

    def _from(self, number: int) -> Iterator[Numbered]:
        return self._history.replay(number, self._clock(), self._announcer.index)

    def _announce(self, news: Sequence[News], *, empty: bool = False) -> None:
        if not news and not empty:
            return
        self._silence_s = BEAT_S if news else min(2 * self._silence_s, _LONGEST_BEAT_S)
        self._beat_at = time.monotonic() + self._silence_s
        messages = list(self._history.publish(self._clock(), news))
        self._record(messages[-1].number, news)
        for message in _in_turns(messages):
            self._sockets.publish(message)
            self.counters["batches"] += 1

    def _record(self, number: int, news: Sequence[News]) -> None:
        """Write down what is sent next, up to `number`: in a ledger that is whole behind all others, else in another
        one, since nothing is read that follows a torn record."""
        if self.problem or self._ledger.is_long:
            if time.monotonic() >= self._write_at:
                self._anew(self._announcer.index.announced())
            return
        end = self._history.next + RESERVE if self._history.next >= self._reserved else 0
        try:
            if end or news:
                self._ledger.write(end, number, news)
                self._reserved = end or self._reserved
        except OSError as error:
            self._unwritten(error)

    def _anew(self, announced: dict[tuple[str, Medium], set[int]]) -> None:
        end = max(self._reserved, self._history.next + RESERVE)
        try:
            self._ledger.rewrite(end, announced, self._history.removals(), self._announcer.index.kept())
            self._reserved = end
        except OSError as error:
            self._unwritten(error)
            return
        if self.problem:
            log.info("the ledger of events can be written again")
        self.problem = ""

    def _unwritten(self, error: OSError) -> None:
        self._write_at = time.monotonic() + _WRITE_AGAIN_S
        if not self.problem:
            log.error("the ledger of events cannot be written: %s", error.strerror or error)
        self.problem = f"the ledger cannot be written, so the next server cannot report removals: {error.strerror}"


def pause() -> None:
    """Give way to the serving thread."""
    time.sleep(_PAUSE_S)


def _in_turns(messages: Iterable[Numbered]) -> Iterator[Numbered]:
    nbytes = 0
    for message in messages:
        nbytes += ANSWER_BYTES + len(message.payload)
        if nbytes >= _PAUSE_BYTES:
            nbytes = 0
            pause()
        yield message


def _changed(found: Found, news: list[News], now: dict[tuple[str, Medium], set[int]]) -> list[News]:
    """Return what of `news` a reader of the server before does not know, and what it must forget."""
    changed: list[News] = []
    for (model, medium), hashes in found.announced.items():
        gone = hashes - now.get((model, medium), set())
        if gone:
            changed.append(Removed(model, medium, list(gone)))
    for each in news:
        if isinstance(each, Stored):
            before = found.announced.get((each.model, each.medium), set())
            hashes = set(each.chunk.hashes[each.first :])
            if hashes <= before:
                continue
            if hashes & before:
                changed.append(Removed(each.model, each.medium, list(hashes & before)))
        changed.append(each)
    return changed

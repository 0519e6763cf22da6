"""The thread that tells routers: news on a PUB socket, and what a reader lacks on a ROUTER socket, as vLLM's publisher
does. It starts with what the ledger says was announced before.

Each life of a server begins with a jump in the numbers, and each new subscriber gets a message at once: so a reader
notices at once that it lacks something, and asks. After the last news empty messages follow, since a reader may lack
that very message. Nothing here can fail a request: errors are logged and are problems of the status document.
"""

from __future__ import annotations

import hashlib
import logging
import math
import os
import socket
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from kvframework.api.hasher import KeyHasher
from kvframework.api.keys import PackedKey
from kvframework.config import EventsConfig
from kvframework.events.feed import Feed, Shape, Teller
from kvframework.events.history import Encoder, History, Numbered
from kvframework.events.known import Medium, News, Removed, Stored
from kvframework.events.ledger import RESERVE, Found, Ledger
from kvframework.events.sockets import EventSockets
from kvframework.messaging.curve import ServerKeys

log = logging.getLogger(__name__)

# The answers to readers that lack messages, each sent as fast as its reader takes it. Pure.
#
# A reader that takes nothing costs what its queue holds, and one of `MOST_ANSWERS` places until it has left: the rest
# of its answer is given up. The end of the answer, without which some readers wait for ever, is sent once there is
# room. However many ask, answers take a share of a core, since the serving thread has the same interpreter.

END = Numbered(b"", (1 << 64) - 1, b"")

# Answers under way, and questions that wait for one of these places.
MOST_ANSWERS = 32
MOST_WAITING = 1024
# Without a message taken, after which an answer is given up.
STALLED_S = 10.0
# Of messages in one turn; a message counts for some more than its own.
_TURN_BYTES = 1 << 18
_MESSAGE_BYTES = 1 << 10
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
        """Begin one answer: the messages of some take long to find."""
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
                return nbytes + _MESSAGE_BYTES
            if not sent:
                if answer.message is not END and now - answer.moved_at > STALLED_S:
                    self.given_up += 1
                    answer.end()
                break
            answer.moved_at = now
            nbytes += _MESSAGE_BYTES + len(answer.message.payload)
            answer.message = next(answer.left, END)
        self._open[client] = answer
        return nbytes


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
_STOP_S = 2.0
# Who is told at the end that something is missing asks at once; answers under way end then, read or not, and who asks
# again gets the end alone.
_LAST_QUESTIONS_S = 0.1
_LAST_ENDS_S = 0.5


class Publisher:
    """`sockets` are bound and owned from here on, and so is the ledger, which `found` was read from. `history` makes
    the stream from the first number on."""

    def __init__(
        self,
        teller: Teller,
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
        self._teller = teller
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
        self._handed_over = False
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="kvf-events", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self, *, handed_over: bool = False) -> None:
        """Announce what is waiting, and what ends with this server, answer who asks, and end: a reader may wait for
        ever for the end of an answer. If L1 is `handed_over` the next server learns from the ledger what it is. Blocks
        for a moment, for `_STOP_S` seconds at most. Idempotent."""
        self._handed_over = handed_over
        self._stopping.set()
        if self._thread.ident is not None:
            self._thread.join(_STOP_S)

    @property
    def hangs(self) -> str:
        """What is wrong with a turn that does not end, "" for nothing. From any thread."""
        seconds = time.monotonic() - self._turn_at
        return f"the publisher hangs: one turn takes {seconds:.0f} s" if seconds > HANGS_S else ""

    @property
    def next_number(self) -> int:
        return self._history.next

    @property
    def unread_replays(self) -> int:
        return self._answers.given_up

    @property
    def ledger_bytes(self) -> int:
        return self._ledger.nbytes

    def _run(self) -> None:
        try:
            self._turn_at = time.monotonic()
            self._begin()
            while not self._stopping.is_set():
                self._turn_at = time.monotonic()
                self._turn()
            self._announce(self._teller.turn())
            if self._handed_over and not self._ledger.keeps:
                self._ledger.keeps = True
                self._anew(self._teller.known.announced())
            if not self._ledger.keeps:
                self._teller.known.forget()
                self._announce(self._teller.known.take())
            self._listen(_LAST_QUESTIONS_S)
            if self._answers.end():
                # Who reads an end goes on with what it has heard meanwhile, lacks what is between, and asks again.
                self._listen(_LAST_ENDS_S)
        except Exception as error:
            self.problem = f"nothing is announced: {error!r}"
            log.exception("nothing is announced to routers any more")
        finally:
            self._turn_at = math.inf
            self._sockets.close()
            self._ledger.close()

    def _begin(self) -> None:
        """Tell what has changed since the server before."""
        found, self._found = self._found, None
        assert found is not None
        for number, removed in found.gone:
            self._history.gone(removed, number)
        for namespace, contents in found.contents.items():
            self._teller.adopt(namespace, list(contents.values()))
        news = _changed(found, self._teller.turn(), self._teller.known.announced())
        self._anew(found.announced)
        self._announce(news, empty=not news)

    def _turn(self) -> None:
        joined = self._listen(max(self._batch_s, self._history.next * _BATCH_S_A_NUMBER))
        self._announce(self._teller.turn(), empty=joined or time.monotonic() >= self._beat_at)

    def _listen(self, seconds: float) -> bool:
        """Answer readers for so long, or until `stop`. True if there are new ones."""
        until = time.monotonic() + seconds
        joined = 0
        stopping = self._stopping.is_set()
        while (left := until - time.monotonic()) > 0 and self._stopping.is_set() == stopping:
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
        return self._history.replay(number, self._clock(), self._teller.known)

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
                self._anew(self._teller.known.announced())
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
            self._ledger.rewrite(end, announced, self._history.removals(), self._teller.known.kept())
            self._reserved = end
        except OSError as error:
            self._unwritten(error)
            return
        if self.problem:
            log.info("the ledger of events is written again")
        self.problem = ""

    def _unwritten(self, error: OSError) -> None:
        self._write_at = time.monotonic() + _WRITE_AGAIN_S
        if not self.problem:
            log.error("the ledger of events cannot be written: %s", error.strerror or error)
        self.problem = f"the ledger cannot be written, so a next server cannot tell removals: {error.strerror}"


def pause() -> None:
    """Give way to the serving thread."""
    time.sleep(_PAUSE_S)


def _in_turns(messages: Iterable[Numbered]) -> Iterator[Numbered]:
    """Yield messages, with pauses."""
    nbytes = 0
    for message in messages:
        nbytes += _MESSAGE_BYTES + len(message.payload)
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


# The whole of events in a server with `[events]`: made before the storage, which feeds it, and started with the sockets
# of the server.

_NAME_BYTES = 8


class RouterEvents:
    """See the module. `name` is the endpoint of the server, one ledger for each."""

    def __init__(
        self,
        config: EventsConfig,
        name: str,
        hasher: KeyHasher,
        *,
        keys: ServerKeys | None = None,
        admit_uids: Collection[int] = (),
    ) -> None:
        self.feed = Feed(salts=config.salted == "tell")
        self._config = config
        self._name = name
        self._hasher = hasher
        self._keys = None if config.insecure else keys
        self._admit_uids = admit_uids
        self._teller: Teller | None = None
        self._sockets: EventSockets | None = None
        self._publisher: Publisher | None = None

    def start(
        self,
        shape_of: Callable[[bytes, str], Shape | None],
        present: Callable[[Sequence[PackedKey]], Sequence[bool]],
        *,
        keeps: bool,
    ) -> None:
        """Bind, and begin to tell; see `Teller` for the functions. `keeps`: what L1 holds outlives the server. Raises
        `EndpointError` and `EventLedgerError`; blocks for seconds if an earlier server has not ended."""
        config = self._config
        ledger = Ledger(_state_folder(config) / f"events-{_short(self._name)}", keeps=keeps)
        found = ledger.open()
        try:
            self._sockets = EventSockets(config, keys=self._keys, admit_uids=self._admit_uids)
        except BaseException:
            ledger.close()
            raise
        encoder = Encoder(config.format, config.block_size)
        engines = config.engines or (socket.gethostname(),)
        self._teller = Teller(
            self.feed,
            self._hasher,
            block_size=config.block_size,
            salts=config.salted == "tell",
            shape_of=shape_of,
            present=present,
            pause=pause,
        )
        self._publisher = Publisher(
            self._teller, ledger, found, lambda first: History(encoder, engines, first, pause), self._sockets
        )
        self._publisher.start()

    def stop(self, *, handed_over: bool = False) -> None:
        """Announce what is waiting, and close; a next server has L1 if it is `handed_over`. Blocks for a moment, for
        seconds at most. Idempotent."""
        if self._publisher is not None:
            self._publisher.stop(handed_over=handed_over)

    def admit(self, readers: bool) -> None:
        """Let further readers in, or keep them out; who is connected stays. From any thread. Raises `OSError`."""
        if self._sockets is not None:
            self._sockets.admit(readers)

    def status(self) -> dict[str, object]:
        """Return the part of the status document. From any thread."""
        publisher, teller, sockets = self._publisher, self._teller, self._sockets
        if publisher is None or teller is None or sockets is None:
            return {}
        return {
            "endpoint": self._config.endpoint,
            "replay": self._config.replay,
            "blocks": teller.known.blocks,
            "next_number": publisher.next_number,
            "waiting": self.feed.waiting,
            "ledger_bytes": publisher.ledger_bytes,
            "problem": publisher.problem or publisher.hangs,
            "counters": {
                **publisher.counters,
                "unread_replays": publisher.unread_replays,
                **sockets.counters,
                "dropped": self.feed.dropped,
                "mismatched": teller.mismatched,
                "withheld": teller.withheld,
            },
        }


def _state_folder(config: EventsConfig, environ: Mapping[str, str] = os.environ) -> Path:
    if config.state:
        return Path(config.state)
    # systemd names several folders with colons in between.
    of_unit = environ.get("STATE_DIRECTORY", "").partition(":")[0]
    if of_unit:
        return Path(of_unit)
    home = environ.get("XDG_STATE_HOME", "")
    return Path(home if os.path.isabs(home) else Path.home() / ".local" / "state") / "kvframework"


def _short(name: str) -> str:
    return hashlib.blake2b(name.encode(), digest_size=_NAME_BYTES).hexdigest()

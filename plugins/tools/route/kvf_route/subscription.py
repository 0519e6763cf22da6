"""The connection to one publisher: its socket of events, its replay, what the network does to both.

Everything here runs in one event loop, in slices of `SLICE_S`: neither a publisher with much to say, whose message may
have 65,536 events, nor one that sends nonsense keeps the loop from others. A publisher can make this process hold
`_MOST_WAITING` messages of `_MOST_BYTES`.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import reduce
from itertools import chain
from operator import or_
from typing import Any

import zmq
import zmq.asyncio
from zmq.utils.monitor import recv_monitor_message

from kvf_route.contents import Contents
from kvf_route.follower import Follower
from kvf_route.settings import Publisher
from kvframework.client import LoadedKeys

log = logging.getLogger(__name__)
SLICE_S = 0.002
ANSWER_S = 10.0  # between two messages of a replay
LONGEST_REPLAY_S = 1800.0  # a hundred million batches; without an end, news and readiness would wait for ever
ASK_AGAIN_S = 30.0  # after a replay that failed; live events wait while one is asked for
# After the last batch: the next one would show that it was lost, but vLLM is silent until it has news.
SILENT_S = 90.0
AWAY_S = 10.0  # a connection that is lost for longer is a node that is not there
# Without a connection for so long, another socket tries: libzmq never does again after some refusals, such as that of a
# key or another kind of socket, and after minutes only where a host swallows what it is sent.
ANEW_S = 10.0
_MOST_BYTES = 16 << 20  # the tokens of a prompt of millions
_MOST_WAITING = 128
# A publisher's ROUTER drops what does not fit here, and vLLM's has 10,000 batches.
_MOST_ANSWERS = 20_000
_HEARTBEAT_MS = 5_000
_POLL_MS = 1_000
_END = -1
_REFUSED = "the publisher does not admit this router's key"
_STRANGE = "the publisher has another server_key or no CURVE, or the port is not that of a publisher of events"
_UNREACHED = "nothing listens at the address, or the host name has no address"
_TROUBLES: dict[int, str] = {
    zmq.EVENT_CONNECT_RETRIED: _UNREACHED,
    zmq.EVENT_HANDSHAKE_FAILED_AUTH: _REFUSED,
    zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL: _STRANGE,
    zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL: _STRANGE,
    zmq.EVENT_DISCONNECTED: _STRANGE,
}


class Intake:
    """Where a `Follower` puts batches; `advance` does the work. `busy`: some is left."""

    def __init__(self, contents: Contents, clock: Callable[[], float] = time.monotonic) -> None:
        self.busy = False
        self._contents = contents
        self._clock = clock
        self._steps: Iterator[None] = iter(())

    def apply(self, topic: bytes, payload: bytes) -> None:
        """Take a batch in after those before."""
        self._steps = chain(self._steps, self._contents.steps(topic, payload))
        self.busy = True

    def clear(self) -> None:
        """Forget everything, with what is left."""
        self._steps, self.busy = iter(()), False
        self._contents.clear()

    def advance(self, until: float) -> bool:
        """Work until that time of the clock, for one step at least. True if nothing is left."""
        while self.busy:
            if next(self._steps, self) is self:
                self.busy = False
            elif self._clock() >= until:
                break
        return not self.busy


class Subscription:
    """Follows one publisher from `run` to its cancellation. `malformed` counts messages that are none of a publisher's,
    `failures` replays that were not answered. `trouble` is why there is no connection, "" if none is known."""

    def __init__(
        self,
        context: zmq.asyncio.Context,
        publisher: Publisher,
        follower: Follower,
        intake: Intake,
        keys: LoadedKeys | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.publisher = publisher
        self.malformed = self.failures = self.batches = 0
        self.trouble = ""
        # Whether a first replay has ended, or could not be had.
        self.begun = not publisher.replay
        self._context = context
        self._follower = follower
        self._intake = intake
        self._keys = keys
        self._clock = clock
        self._connected = False
        # Whether the last change ended a connection: the pause before the next attempt is shown as a failed attempt.
        self._ended = False
        self._changed_at = clock()
        self._ask_at = clock() + SILENT_S
        self._answered_at = 0.0
        # A message that waits for a replay.
        self._held: list[bytes] | None = None

    @property
    def connected(self) -> bool:
        return self._connected

    @property
    def is_away(self) -> bool:
        """Whether the publisher has not been there for `AWAY_S`."""
        return not self._connected and self._clock() - self._changed_at > AWAY_S

    @property
    def in_step(self) -> bool:
        """Whether the index is as the publisher says, as far as that can be known."""
        heard = self._follower.question is None and not self._follower.in_doubt
        return self._connected and heard and not self._intake.busy

    async def run(self) -> None:
        """Follow for ever. An error of this code ends a turn, never the subscription."""
        while True:
            try:
                await self._follow()
            except zmq.ZMQError as error:
                self._say(f"connecting to the address failed: {error.strerror}")
                await asyncio.sleep(ANEW_S)
            except Exception:
                log.exception("%s: reading events failed", self.publisher.events)
                self._held = None
                await asyncio.sleep(1.0)

    async def _follow(self) -> None:
        events = self._socket(zmq.SUB, _MOST_WAITING)
        monitor = events.get_monitor_socket(reduce(or_, _TROUBLES, zmq.EVENT_HANDSHAKE_SUCCEEDED))
        # The plain sockets read without waiting.
        source, changes = _plain(events), _plain(monitor)
        poller = zmq.asyncio.Poller()
        poller.register(events, zmq.POLLIN)
        poller.register(monitor, zmq.POLLIN)
        try:
            events.subscribe(b"")
            events.connect(self.publisher.events)
            anew_at = self._clock() + ANEW_S
            while self._connected or self._clock() < anew_at:
                anew_at = self._clock() + ANEW_S if self._connected else anew_at
                if self._follower.question is not None:
                    await self._replay(changes)
                else:
                    self.begun = self.begun or self._connected
                    await poller.poll(0 if self._intake.busy else _POLL_MS)
                    self._hear(changes)
                    if self._connected and self._clock() >= self._ask_at:
                        self._ask_at += SILENT_S
                        self._follower.connected()
                    self._drain(source, changes)
                await asyncio.sleep(0)
        finally:
            self._changed_at = self._clock() if self._connected else self._changed_at
            self._connected = False
            events.disable_monitor()
            monitor.close(linger=0)
            events.close(linger=0)

    def _drain(self, source: zmq.Socket[bytes], changes: zmq.Socket[bytes]) -> None:
        end = self._clock() + SLICE_S
        while self._intake.advance(end) and self._follower.question is None and self._clock() < end:
            frames, self._held = self._held, None
            if frames is None:
                try:
                    frames = source.recv_multipart(zmq.NOBLOCK)
                except zmq.Again:
                    return
            # It may come over a connection that is newer than the one that the follower knows of.
            if self._hear(changes):
                self._held = frames
                return
            if len(frames) != 3 or len(frames[1]) != 8:
                self.malformed += 1
                continue
            topic, number, payload = frames
            if self._follower.live(topic, int.from_bytes(number, "big"), payload):
                self.batches += 1
                self._heard()
            else:
                self._held = frames

    def _hear(self, changes: zmq.Socket[bytes]) -> bool:
        """Take note of what has become of the connection. True if there is a new one."""
        renewed = False
        while True:
            try:
                change = recv_monitor_message(changes, zmq.NOBLOCK)
            except zmq.Again:
                break
            connected = change["event"] == zmq.EVENT_HANDSHAKE_SUCCEEDED
            self._note(change["event"])
            if connected != self._connected:
                log.info(
                    "%s: %s",
                    self.publisher.events,
                    "connected" if connected else "the connection to the publisher is lost",
                )
                self._connected, self._changed_at = connected, self._clock()
            renewed = renewed or connected
        if renewed:
            self._follower.connected()
        return renewed

    def _note(self, change: int) -> None:
        """Say once why there is no connection. After a failed handshake libzmq tells of the connection's end, too."""
        trouble = "" if self._connected else _TROUBLES.get(change, "")
        ended, self._ended = self._ended, self._connected or trouble not in ("", _UNREACHED)
        if trouble == _UNREACHED and ended:
            return
        if change == zmq.EVENT_DISCONNECTED and self.trouble not in ("", _UNREACHED):
            return
        self._say(trouble)

    def _say(self, trouble: str) -> None:
        if trouble and trouble != self.trouble:
            level = logging.INFO if trouble == _UNREACHED else logging.WARNING  # a node may start later, or again
            log.log(level, "%s: no connection: %s", self.publisher.events, trouble)
        self.trouble = trouble

    async def _replay(self, changes: zmq.Socket[bytes]) -> None:
        """Ask the question of now and take the answer in, until its end, another question or a failure."""
        asked = self._follower.question
        replay = self._socket(zmq.DEALER, _MOST_ANSWERS)
        source = _plain(replay)
        try:
            replay.connect(self.publisher.replay)
            await replay.send_multipart([b"", (asked or 0).to_bytes(8, "big")])
            self._answered_at = began = self._clock()
            while self._intake.busy or await replay.poll(_POLL_MS) or self._clock() - self._answered_at < ANSWER_S:
                if self._hear(changes) or self._take_answers(source):
                    return
                if self._clock() - began > LONGEST_REPLAY_S:
                    self._fail("the publisher's replay does not end")
                    return
                await asyncio.sleep(0)
            self._fail("the publisher did not answer")
        except zmq.ZMQError as error:
            self._fail(str(error))
        finally:
            replay.close(linger=0)

    def _take_answers(self, source: zmq.Socket[bytes]) -> bool:
        """Take in what has arrived of a replay, for one slice. True if that was all of it, or the rest is of no use."""
        end = self._clock() + SLICE_S
        with suppress(zmq.Again):
            while self._clock() < end:
                self._answered_at = self._clock() if self._intake.busy else self._answered_at
                if not self._intake.advance(end):
                    break
                frames = source.recv_multipart(zmq.NOBLOCK)
                self._answered_at = self._clock()
                if len(frames) != 4 or len(frames[2]) != 8:
                    self.malformed += 1
                    continue
                _, topic, number, payload = frames
                if int.from_bytes(number, "big", signed=True) == _END:
                    self._follower.end()
                    self._heard()
                    self.begun = self.begun or self._follower.question is None
                    return True
                self.batches += 1
                if not self._follower.answer(topic, int.from_bytes(number, "big"), payload):
                    return True
        return False

    def _heard(self) -> None:
        """A batch was taken in, or all of a replay: another one is asked for after a silence."""
        if not self._follower.in_doubt:
            self._ask_at = self._clock() + SILENT_S

    def _fail(self, why: str) -> None:
        """No replay: events are taken as they come, and it is asked for again later."""
        self.failures += 1
        self.begun = True
        self._follower.failed()
        self._ask_at = self._clock() + ASK_AGAIN_S
        log.warning("%s: the replay at %s failed: %s", self.publisher.events, self.publisher.replay, why)

    def _socket(self, kind: int, most_waiting: int) -> Any:
        made = self._context.socket(kind)
        made.setsockopt(zmq.LINGER, 0)
        made.setsockopt(zmq.IPV6, 1)
        made.setsockopt(zmq.RCVHWM, most_waiting)
        made.setsockopt(zmq.MAXMSGSIZE, _MOST_BYTES)
        made.setsockopt(zmq.RECONNECT_IVL, 100)
        made.setsockopt(zmq.RECONNECT_IVL_MAX, 2_000)
        made.setsockopt(zmq.HEARTBEAT_IVL, _HEARTBEAT_MS)
        made.setsockopt(zmq.HEARTBEAT_TIMEOUT, 3 * _HEARTBEAT_MS)
        if self._keys is not None:
            self._keys.apply(made)
        return made


def _plain(socket: Any) -> zmq.Socket[bytes]:
    """The same socket for reads that do not wait."""
    plain: zmq.Socket[bytes] = zmq.Socket.shadow(socket)
    return plain

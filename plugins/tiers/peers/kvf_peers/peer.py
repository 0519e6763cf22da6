"""One other node as this one sees it: whether it answers, who it is, and connections to it.

A thread connects while the node is not known to answer, with growing pauses, and ends once it does; so no load waits
for a node that has ended. Whatever goes wrong on a connection closes it.
"""

from __future__ import annotations

import logging
import socket
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Literal, NamedTuple

from kvf_peers import messages as m
from kvf_peers.settings import Address, Settings
from kvf_peers.wire import Wire, explain, introduce
from kvframework.api.process import Backoff
from kvframework.api.tier import Outcome, PackedKey
from kvframework.errors import ConfigFieldError, TierError

log = logging.getLogger(__name__)

_CONNECT_S = 1.0
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.5, 8.0
_USELESS_S = 30.0
# For one that sent a value that was none: bad memory, or another release.
_DISTRUSTED_S = 60.0
# A connection is used for so long, then another one: who the node is gets known again by that.
_OLD_S = 60.0
_MOST_IDLE = 8
_MOST_MS = 600_000
_OUTCOMES = {m.MISSING: Outcome.MISSING, m.BUSY: Outcome.FAILED, m.TOO_LONG: Outcome.DAMAGED}

# The family and the address of a socket.
Place = tuple[int, tuple[object, ...]]
State = Literal["connecting", "up", "down", "useless"]


class Verdict(NamedTuple):
    """What a node is to this one: `useless` if nothing can be had from it; `problem` is one for an operator, or ""."""

    useless: bool
    problem: str = ""


Judge = Callable[[m.Welcome], Verdict]


@dataclass
class Counts:
    """What came from a node, and how often it gave nothing: values it had no longer, would not lend now, or that did
    not come."""

    values: int = 0
    nbytes: int = 0
    questions: int = 0
    gone: int = 0
    busy: int = 0
    failed: int = 0
    damaged: int = 0


class Peer:
    """Thread-safe. `start` comes first. The state `useless` is that of a node that shares nothing with this one, or is
    this one."""

    def __init__(self, address: Address, settings: Settings, judge: Judge) -> None:
        self.address = address
        self.who: m.Welcome | None = None
        self.problem = ""
        self.state: State = "connecting"
        self.changed = threading.Condition()
        self.counts = Counts()
        self._settings = settings
        self._judge = judge
        self._closed = False
        self._idle: list[Wire] = []
        self._used: set[Wire] = set()
        self._place: Place | None = None
        self._thread: threading.Thread | None = None
        self._told_down = False
        # Questions in a row that it did not answer.
        self._unanswered_in_a_row = 0
        self._passed_over = Backoff(_FIRST_PAUSE_S, _LONGEST_PAUSE_S)
        self._not_before = 0.0

    def start(self) -> None:
        """Begin to connect, in a thread, unless it answers."""
        with self.changed:
            if self._thread is None and self.state != "up" and not self._closed:
                self._thread = threading.Thread(target=self._connect_until_up, name=f"peer-{self.address}", daemon=True)
                try:
                    self._thread.start()
                except RuntimeError:  # the machine has no more threads
                    self._thread = None

    def judge_again(self) -> None:
        """Judges who it is once more, as more is known of this node now."""
        if self.who is not None and self.state in ("up", "useless"):
            self._settle_as(self.who)

    def settle(self, until: float) -> bool:
        """Wait while it is being connected for the first time, or again; return whether it can be asked."""
        with self.changed:
            while self.state == "connecting" and not self._closed and (left := until - time.monotonic()) > 0:
                self.changed.wait(left)
            return self.state == "up"

    def ask(self, keys: Sequence[PackedKey], until: float) -> bytes:
        """Return a byte for each of `keys`, 1 if the node has it, else 0. Raises `TierError`."""
        wire, began, here = self._take(until), time.monotonic(), b""
        try:
            for first in range(0, len(keys), m.ASK_KEYS):
                some = keys[first : first + m.ASK_KEYS]
                wire.write(m.Ask(m.joined_keys(some)), until)
                found = wire.read(m.Found, until, m.ANSWER_BYTES).here
                if len(found) != len(some):
                    raise m.ProtocolError(f"the node answered {len(found)} of {len(some)} keys")
                here += found
        except (OSError, EOFError, m.ProtocolError) as error:
            if isinstance(error, TimeoutError):
                self._unanswered(time.monotonic() - began)
            raise self._failed(wire, error) from None
        with self.changed:
            self.counts.questions += 1
            self._unanswered_in_a_row = 0
            self._passed_over.reset()
        self._give_back(wire)
        return here

    def fetch(
        self,
        keys: Sequence[PackedKey],
        parts: Sequence[Sequence[memoryview]],
        outcomes: list[int | Outcome],
        deadline: float,
    ) -> None:
        """Receive the values of `keys` into `parts`, and note each in `outcomes`, which are FAILED before. Raises
        `TierError`: the connection is closed then, and nothing arrives any more; what is noted is right."""
        wire = self._take(deadline)
        try:
            for first in range(0, len(keys), m.GET_KEYS):
                some = range(first, min(first + m.GET_KEYS, len(keys)))
                rooms = [sum(part.nbytes for part in parts[index]) for index in some]
                left_ms = min(max(int((deadline - time.monotonic()) * 1e3), 1), _MOST_MS)
                wire.write(m.Get(m.joined_keys([keys[index] for index in some]), rooms, left_ms), deadline)
                for index, room in zip(some, rooms, strict=True):
                    outcomes[index] = outcome = _receive(wire, parts[index], room, deadline)
                    self._count(outcome)
        except (OSError, EOFError, m.ProtocolError) as error:
            raise self._failed(wire, error) from None
        self._give_back(wire)

    def status(self) -> dict[str, object]:
        """For the server's status. Never blocks for the node."""
        with self.changed:
            return {"node": str(self.address), "state": self.state, **asdict(self.counts)}

    def close(self) -> None:
        """End its calls in flight. Blocks for a connection that is being made, half a second at most."""
        with self.changed:
            self._closed = True
            idle, self._idle = self._idle, []
            for wire in self._used:
                wire.cut()
            self.changed.notify_all()
        for wire in idle:
            wire.close()
        thread = self._thread
        if thread is not None:
            thread.join(0.5)

    # the connections

    def _take(self, deadline: float) -> Wire:
        # A call that ended too late for its caller has closed its connection, and says nothing of the node.
        self.settle(min(deadline, time.monotonic() + _CONNECT_S))
        with self.changed:
            now = time.monotonic()
            while self._idle and self.state == "up":
                wire = self._idle.pop()
                if now - wire.opened_at < _OLD_S and wire.is_quiet():
                    self._used.add(wire)
                    return wire
                wire.close()
            if self.state != "up" or self._closed:
                raise TierError("the node does not answer", where=str(self.address))
        wire, who = self._connect(deadline)
        with self.changed:
            if not self._closed:
                self._used.add(wire)
        if self._closed:
            wire.close()
            raise TierError("the tier is closed", where=str(self.address))
        self._settle_as(who)
        if self.state != "up":
            self._drop(wire)
            raise TierError("the node shares no KV with this node", where=str(self.address))
        return wire

    def _give_back(self, wire: Wire) -> None:
        with self.changed:
            self._used.discard(wire)
            if not self._closed and self.state == "up" and len(self._idle) < _MOST_IDLE:
                self._idle.append(wire)
                return
        wire.close()

    def _drop(self, wire: Wire) -> None:
        with self.changed:
            self._used.discard(wire)
        wire.close()

    def _failed(self, wire: Wire, error: BaseException) -> TierError:
        """Close a connection that failed, and have the node connected again before it is asked."""
        self._drop(wire)
        with self.changed:
            self.counts.failed += 1
        return self._lost(explain(error))

    def _unanswered(self, waited_s: float) -> None:
        """A node that takes connections and does not answer, once more, is passed over for a pause: each question would
        wait for it. A caller that had no time says nothing of the node."""
        with self.changed:
            if self.state == "up" and waited_s >= self._settings.options.ask_s / 2:
                self._unanswered_in_a_row += 1
                if self._unanswered_in_a_row > 1:
                    now = time.monotonic()
                    self._not_before = now + self._passed_over.delay(now)

    def distrust(self) -> None:
        """It sent a value that was none: it is passed over for a minute."""
        with self.changed:
            self.counts.damaged += 1
            self._not_before = time.monotonic() + _DISTRUSTED_S
        self._lost("the node sent a damaged value")

    def _count(self, outcome: int | Outcome) -> None:
        with self.changed:
            if isinstance(outcome, int):
                self.counts.values += 1
                self.counts.nbytes += outcome
            elif outcome is Outcome.MISSING:
                self.counts.gone += 1
            elif outcome is Outcome.FAILED:
                self.counts.busy += 1

    def _lost(self, why: str) -> TierError:
        with self.changed:
            if self.state == "up":
                self.state = "connecting"
                if self._not_before > time.monotonic():
                    self._is_down(why)
            idle, self._idle = self._idle, []
        for each in idle:
            each.close()
        self.start()
        return TierError(why, where=str(self.address))

    def _connect(self, deadline: float) -> tuple[Wire, m.Welcome]:
        """A connection whose other side has proved itself, for a load. Raises `TierError`."""
        try:
            return self._opened(min(deadline, time.monotonic() + _CONNECT_S), self._place)
        except (OSError, EOFError, m.ProtocolError, ConfigFieldError) as error:
            raise self._lost(_said(error)) from None

    def _opened(self, deadline: float, place: Place | None) -> tuple[Wire, m.Welcome]:
        """A connection to `place`, or to the first address of its name that takes one."""
        places = [place] if place is not None else _places(self.address)
        for number, each in enumerate(places, 1):
            wire = Wire(socket.socket(each[0], socket.SOCK_STREAM))
            try:
                wire.connect(each[1], deadline)
                self._place = each
                return wire, introduce(wire, self._settings, self.address.host, deadline)
            except ConnectionError:
                wire.close()
                if number == len(places):
                    raise
            except BaseException:
                wire.close()
                raise
        raise OSError(f"{self.address.host} cannot be resolved to an address")

    def _connect_until_up(self) -> None:
        backoff = Backoff(_FIRST_PAUSE_S, _LONGEST_PAUSE_S)
        with self.changed:
            self.changed.wait_for(lambda: self._closed, max(self._not_before - time.monotonic(), 0.0))
        while not self._closed:
            wire = None
            try:
                wire, who = self._opened(time.monotonic() + _CONNECT_S, None)
                self._settle_as(who)
            except (OSError, EOFError, m.ProtocolError, ConfigFieldError) as error:
                self._is_down(_said(error))
            except Exception as error:  # a bug, which must not leave the node without this thread
                log.exception("connecting to %s failed", self.address)
                self._is_down(_said(error))
            with self.changed:
                if wire is not None and self.state == "up" and not self._closed:
                    self._idle.append(wire)
                    wire = None
                if self.state == "up" or self._closed:
                    self._thread = None
                    if wire is not None:
                        wire.close()
                    return
                if wire is not None:
                    wire.close()
            self._pause(backoff.delay(time.monotonic()))

    def _pause(self, pause_s: float) -> None:
        """Wait before the next attempt; not for one that was judged again, nor after `close`."""
        with self.changed:
            pause_s = _USELESS_S if self.state == "useless" else pause_s
            self.changed.wait_for(lambda: self._closed or self.state in ("up", "connecting"), pause_s)

    def _settle_as(self, who: m.Welcome) -> None:
        useless, problem = self._judge(who)
        with self.changed:
            restarted = self.who is not None and self.who.boot_id != who.boot_id
            self.who = who
            self.state = "useless" if useless else "up"
            if problem and problem != self.problem:
                log.error("node %s: %s", self.address, problem)
            elif self._told_down and not useless:
                log.info("node %s answers%s", self.address, " after a restart" if restarted else "")
            self.problem, self._told_down = problem, False
            self.changed.notify_all()

    def _is_down(self, why: str) -> None:
        with self.changed:
            if not self._told_down and not self._closed:
                log.warning("node %s is not used: %s", self.address, why)
            self._told_down, self.problem, self.state = True, why, "down"
            self.changed.notify_all()


def _places(address: Address) -> list[Place]:
    """Ask the system's resolver, which knows no deadline. Raises `OSError`."""
    return [(each[0], each[4]) for each in socket.getaddrinfo(*address, type=socket.SOCK_STREAM)]


def _receive(wire: Wire, parts: Sequence[memoryview], room: int, deadline: float) -> int | Outcome:
    head = bytearray(m.VALUE_HEAD.size)
    wire.receive_into(memoryview(head), deadline)
    status, nbytes = m.VALUE_HEAD.unpack(head)
    if status in _OUTCOMES and not nbytes:
        return _OUTCOMES[status]
    if status != m.VALUE or nbytes > room:
        raise m.ProtocolError(f"the node answered {nbytes} bytes with status {status} for a buffer of {room}")
    left = int(nbytes)
    for part in parts:
        wanted = min(left, part.nbytes)
        wire.receive_into(part[:wanted], deadline)
        left -= wanted
    return int(nbytes)


def _said(error: BaseException) -> str:
    return error.fact if isinstance(error, ConfigFieldError) else explain(error)

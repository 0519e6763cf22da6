"""Which clients a server admits: those with listed CURVE keys, and new ones only while descriptors are left; and which
it has refused."""

from __future__ import annotations

import logging
import math
import threading
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import zmq

from kvframework.api.plugin import Message
from kvframework.config.schema import SESSIONS_SHARE
from kvframework.errors import KVFrameworkError, ProtocolError, ServerFull
from kvframework.messaging.curve import AdmittedClients
from kvframework.messaging.polling import descriptor_limit, descriptors_in_use
from kvframework.messaging.server.sessions import ClientSession, printable
from kvframework.wire.frames import Envelope, decode

# The ZAP handler, which libzmq asks at every CURVE handshake whether to admit the client.
#
# Served by the server's loop; a handshake waits for the answer, and delays no other client. Not `zmq.auth`: its
# authenticators need a thread or an asyncio loop, and read the directory of clients once.

logger = logging.getLogger(__name__)

_ADDRESS = "inproc://zeromq.zap.01"
_VERSION = b"1.0"
_PER_ROUND = 64

# Records of refusals.
MAX_KEPT = 32
TELL_AGAIN_S = 60.0  # for the same client and reason
TELL_NEXT_S = 1.0  # for any others
_MAX_NAME, _MAX_REASON = 128, 512


class ZapHandler:
    """Admits the clients whose keys are listed. Must be made before the socket that it guards, and closed after it."""

    def __init__(self, context: zmq.Context[Any], admitted: AdmittedClients, counters: dict[str, int]) -> None:
        self._admitted = admitted
        self._counters = counters
        self.socket: zmq.Socket[bytes] = context.socket(zmq.REP)
        self.socket.setsockopt(zmq.LINGER, 0)
        self.socket.bind(_ADDRESS)

    def serve(self) -> None:
        """Answer the waiting requests, a bounded number. Never blocks."""
        for _ in range(_PER_ROUND):
            try:
                frames = self.socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            self.socket.send_multipart(self._decide(frames))

    def close(self) -> None:
        self.socket.close(0)

    def _decide(self, frames: list[bytes]) -> list[bytes]:
        request_id = frames[1] if len(frames) > 1 else b""
        name = None
        if len(frames) == 7 and frames[0] == _VERSION and frames[5] == b"CURVE":
            name = self._admitted.name_of(frames[6])
        if name is None:
            self._counters["curve_refused"] += 1
            where = frames[3].decode("ascii", "replace") if len(frames) > 3 else "?"
            logger.warning("a client at %s was refused: its public key is not among those admitted", where)
            return [_VERSION, request_id, b"400", b"not admitted", b"", b""]
        return [_VERSION, request_id, b"200", b"", name.encode()[:255], b""]


# The gate of a server: it keeps new clients out while descriptors run low, so that connected ones, and libzmq, never
# lack one.
#
# libzmq ends the process if an `ipc://` listener gets no descriptor, and accepts as fast as connections come. So the
# gate's thread counts the descriptors in use, at shorter intervals the fewer are left, and shuts out one kind after the
# other: local readers of events, new sessions, local connections. Unbinding the sockets would also end their accepted
# connections. At a tcp:// listener without a descriptor libzmq just waits for one.

# Shares of the limit from which on a kind is not admitted. The rest is not wasted: tiers and copiers use it, and so do
# connections accepted before the next look.
READERS_SHARE, LOCAL_SHARE = 0.4, 0.7
REOPEN_SHARE = 0.9  # of the threshold at which it was shut
# Connections do not come faster; the necessary room above a limit follows from it.
FASTEST_PER_S = 100_000
SOONEST_S, LATEST_S = 0.002, 0.1


@dataclass(frozen=True)
class Admission:
    """Which kinds of new clients are admitted. Pure."""

    readers: bool = True
    sessions: bool = True
    local: bool = True

    def after(self, in_use: int, limit: int) -> Admission:
        """Return what is admitted with so many descriptors in use."""
        return Admission(
            _stays_open(self.readers, in_use, READERS_SHARE * limit),
            _stays_open(self.sessions, in_use, SESSIONS_SHARE * limit),
            _stays_open(self.local, in_use, LOCAL_SHARE * limit),
        )

    def look_again_in(self, in_use: int, limit: int) -> float:
        """Return the seconds within which even the fastest flood cannot take all that is left below the next limit."""
        limits = ((self.readers, READERS_SHARE), (self.local, LOCAL_SHARE))
        left = [share * limit - in_use for is_open, share in limits if is_open]
        return min(max(min(left, default=math.inf) / FASTEST_PER_S, SOONEST_S), LATEST_S)


def _stays_open(is_open: bool, count: int, most: float) -> bool:
    return count < (most if is_open else REOPEN_SHARE * most)


class Gate:
    """Counts in its own thread between `start` and `close`. `show_local(True or False)` shows or hides the local
    socket, `admit_readers` those of events; they raise `OSError`. None: there are none. Other methods may be called
    from any thread."""

    def __init__(
        self,
        show_local: Callable[[bool], None] | None,
        counters: dict[str, int],
        admit_readers: Callable[[bool], None] | None = None,
    ) -> None:
        self.admission = Admission()
        self._show_local = show_local
        self._admit_readers = admit_readers
        self._counters = counters
        self._ended = threading.Event()
        self._failing = False
        self._thread = threading.Thread(target=self._run, name="kvf-gate", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        """End the thread. Blocks until it has ended. Idempotent."""
        self._ended.set()
        if self._thread.ident is not None:
            self._thread.join()

    def check(self) -> None:
        """Raise `ServerFull` if no new session may be opened."""
        if not self.admission.sessions:
            raise ServerFull(
                f"more than {SESSIONS_SHARE:.0%} of the server's {descriptor_limit()} descriptors are in use",
                hint="close connections that are not used, or raise LimitNOFILE of the server",
            )

    def status(self) -> dict[str, object]:
        return {"in_use": descriptors_in_use(), "limit": descriptor_limit(), **vars(self.admission)}

    def _run(self) -> None:
        pause = 0.0
        while not self._ended.wait(pause):
            try:
                pause = self._look()
                self._failing = False
            except Exception:
                if not self._failing:  # one line, not ten a second
                    logger.exception("the gate continues after an internal error")
                self._failing, pause = True, LATEST_S

    def _look(self) -> float:
        """Count once and adjust what is admitted; return the seconds until the next look."""
        limit, in_use = descriptor_limit(), descriptors_in_use()
        before, now = self.admission, self.admission.after(in_use, limit)
        now = replace(now, readers=now.readers or not self._admit_readers, local=now.local or not self._show_local)
        if now != before:
            self.admission = now
            if self._show_local and now.local != before.local:
                _move(self._show_local, now.local, "the local socket")
            if self._admit_readers and now.readers != before.readers:
                _move(self._admit_readers, now.readers, "the sockets of events")
            self._counters["local_shut"] += before.local and not now.local
            for shut, what in (
                (before.readers and not now.readers, "new readers of events wait"),
                (before.sessions and not now.sessions, "new clients are refused"),
            ):
                if shut:
                    logger.warning("%d of %d descriptors are in use: %s", in_use, limit, what)
            if now == Admission():
                logger.info("%d of %d descriptors are in use: new clients are accepted again", in_use, limit)
        return now.look_again_in(in_use, limit)


def _move(show: Callable[[bool], None], shown: bool, what: str) -> None:
    try:
        show(shown)
    except OSError as error:  # another process has removed a socket
        logger.error("%s cannot be %s: %s", what, "shown" if shown else "hidden", error)


class Introduction(Message, frozen=True):
    """The readable part of a HELLO that is refused."""

    client: str = "?"
    pid: int = 0
    min_version: int = 1
    max_version: int = 1
    client_version: str = ""


@dataclass
class Refusal:
    """One client's refusals for one reason, as the status document has them. `what` is the name of the request;
    "server": the client refuses this server."""

    client: str
    pid: int
    what: str
    code: str
    reason: str
    versions: str
    client_version: str
    count: int = 0


class Refusals:
    """The latest refusals, a bounded number: kept for `status` and logged, since a refused client looks like a cache
    without hits. Serving thread, except for `report`."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        # With the times of the last one and of its log line.
        self._kept: dict[tuple[str, int, str, str], tuple[Refusal, float, float]] = {}
        self._tell_at = clock()

    def hello(self, envelope: Envelope, error: KVFrameworkError) -> None:
        """Record a refused HELLO, readable or not."""
        try:
            who = decode(envelope.payload, Introduction, where="HELLO")
        except ProtocolError:
            who = Introduction()
        versions = f"{who.min_version} to {who.max_version}"
        self._add(who.client, who.pid, "HELLO", error.code, _reason(error), versions, who.client_version)

    def request(self, session: ClientSession | None, name: str, error: KVFrameworkError) -> None:
        """Record a message of a session, or of an unknown peer, that could not be parsed or served."""
        if session is None:
            self._add("?", 0, name, error.code, _reason(error))
        else:
            self._of(session, name, error.code, _reason(error))

    def server(self, session: ClientSession, code: str, reason: str) -> None:
        """Record that the client left because it cannot use this server."""
        self._of(session, "server", code, reason)

    def report(self) -> list[dict[str, object]]:
        """Return the refusals for the status document, the latest first."""
        now, latest = self._clock(), reversed(list(self._kept.values()))
        return [{**vars(refusal), "ago_s": round(now - last, 1)} for refusal, last, _ in latest]

    def _of(self, session: ClientSession, what: str, code: str, reason: str) -> None:
        self._add(session.name, session.pid, what, code, reason, str(session.version), session.client_version)

    def _add(
        self, client: str, pid: int, what: str, code: str, reason: str, versions: str = "", client_version: str = ""
    ) -> None:
        now = self._clock()
        key = (printable(client[:_MAX_NAME]), pid, printable(what), printable(code[:_MAX_NAME]))
        texts = (printable(reason[:_MAX_REASON]), versions, printable(client_version[:_MAX_NAME]))
        before, _, logged_at = self._kept.pop(key, (Refusal(*key, *texts), 0.0, now - TELL_AGAIN_S))
        if len(self._kept) >= MAX_KEPT:
            del self._kept[next(iter(self._kept))]
        refusal = Refusal(*key, *texts, before.count + 1)
        if now >= self._tell_at and now - logged_at >= TELL_AGAIN_S:
            logged_at, self._tell_at = now, now + TELL_NEXT_S
            _log(refusal)
        self._kept[key] = (refusal, now, logged_at)


def _reason(error: KVFrameworkError) -> str:
    return f"{error.fact}; available: {error.available}" if error.available else error.fact


def _log(refusal: Refusal) -> None:
    release = f", kvframework {refusal.client_version}" if refusal.client_version else ""
    who = f"{refusal.client!r} (process {refusal.pid}{release})"
    done = {"HELLO": "was refused", "server": "refuses this server"}.get(refusal.what)
    logger.warning("%s %s: [%s] %s", who, done or f"was refused {refusal.what!r}", refusal.code, refusal.reason)

"""Dispatch of one message: its session, HELLO, or the calls in flight; the records of refused clients. Serving thread
only.

Every message is answered, with a typed error frame if need be, unless even its request id cannot be read.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from kvframework.api.requests import Buffer, Handler, RequestSpec
from kvframework.api.types import Message
from kvframework.errors import (
    HelloRequired,
    InvalidPayload,
    KVFrameworkError,
    MalformedFrames,
    PluginBroken,
    ProtocolError,
    ServerFull,
    ShuttingDown,
)
from kvframework.messaging.server.handlers import InFlight, RequestDurations
from kvframework.messaging.server.sessions import ClientSession, LivenessServer, SessionTable, printable
from kvframework.messaging.server.sockets import ReplySender
from kvframework.wire.frames import MAX_TYPE_BYTES, NO_ANSWER, REQUEST_ID_BYTES, Envelope, decode, split
from kvframework.wire.messages import Empty, Goodbye, Hello, HelloReply
from kvframework.wire.protocol import ONE_WAY_REQUESTS, negotiate

# Records of refused clients and the reasons: kept for `status` and logged, since a refused client looks like a cache
# without hits. Serving thread, except for `report`.

logger = logging.getLogger(__name__)

MAX_KEPT = 32
TELL_AGAIN_S = 60.0  # for the same client and reason
TELL_NEXT_S = 1.0  # for any others
_MAX_NAME, _MAX_REASON = 128, 512


class Introduction(Message, frozen=True):
    """The readable part of a HELLO that is refused."""

    client: str = "?"
    pid: int = 0
    min_version: int = 1
    max_version: int = 1
    client_version: str = ""


@dataclass
class Refusal:
    """One client's refusals for one reason. `what` is the name of the request; "server": the client refuses this
    server. The times are on the clock."""

    client: str
    pid: int
    what: str
    code: str
    reason: str
    versions: str
    client_version: str
    count: int
    last: float
    logged_at: float


class Refusals:
    """The latest refusals, a bounded number. `report` may be called from any thread."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._kept: dict[tuple[str, int, str, str], Refusal] = {}
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
        now = self._clock()
        return [
            {
                "client": each.client,
                "pid": each.pid,
                "client_version": each.client_version,
                "versions": each.versions,
                "what": each.what,
                "code": each.code,
                "reason": each.reason,
                "count": each.count,
                "ago_s": round(now - each.last, 1),
            }
            for each in reversed(list(self._kept.values()))
        ]

    def _of(self, session: ClientSession, what: str, code: str, reason: str) -> None:
        self._add(session.name, session.pid, what, code, reason, str(session.version), session.client_version)

    def _add(
        self, client: str, pid: int, what: str, code: str, reason: str, versions: str = "", client_version: str = ""
    ) -> None:
        now = self._clock()
        key = (printable(client[:_MAX_NAME]), pid, printable(what), printable(code[:_MAX_NAME]))
        known = self._kept.pop(key, None)
        if known is None and len(self._kept) >= MAX_KEPT:
            del self._kept[next(iter(self._kept))]
        count, logged_at = (known.count + 1, known.logged_at) if known else (1, now - TELL_AGAIN_S)
        refusal = Refusal(
            *key,
            printable(reason[:_MAX_REASON]),
            versions,
            printable(client_version[:_MAX_NAME]),
            count,
            now,
            logged_at,
        )
        self._kept[key] = refusal
        if now >= self._tell_at and now - logged_at >= TELL_AGAIN_S:
            refusal.logged_at, self._tell_at = now, now + TELL_NEXT_S
            _tell(refusal)


def _reason(error: KVFrameworkError) -> str:
    return f"{error.fact}; available: {error.available}" if error.available else error.fact


def _tell(refusal: Refusal) -> None:
    release = f", kvframework {refusal.client_version}" if refusal.client_version else ""
    who = f"{refusal.client!r} (process {refusal.pid}{release})"
    done = {"HELLO": "was refused", "server": "refuses this server"}.get(refusal.what)
    logger.warning("%s %s: [%s] %s", who, done or f"was refused {refusal.what!r}", refusal.code, refusal.reason)


OWN_REQUESTS = frozenset({"HELLO", "GOODBYE", "CANCEL"})  # served by messaging itself
MAX_LEFT = 4096
Welcome = Callable[[Hello, ClientSession, int, bool], HelloReply]


@dataclass(frozen=True)
class Served:
    """The callbacks behind a message server. Called on the serving thread, except for pooled handlers.

    `handlers` are those of `check_handlers`. `welcome(hello, session, version, returns)` makes HELLO's reply;
    its `session`, `version` and `liveness` are filled in by messaging; `returns` means that the client has used an
    earlier server. `arena_for(session id)` returns a descriptor of the arena for a client of this node, which is closed
    once it is sent, and raises `OSError`; None: there is no arena. `on_session_end(session)` is called exactly once for
    every session, unless very many end with the server; its exceptions and those of `on_tick()` are logged. `on_time()`
    is called when the time `next_at()`, on `time.monotonic()`, has come; `MessageServer.wake` makes the loop ask for it
    again.
    """

    handlers: Mapping[str, Handler[Any]]
    welcome: Welcome
    hasher_fingerprint: str
    on_session_end: Callable[[ClientSession], None]
    on_tick: Callable[[], None]
    arena_for: Callable[[int], int] | None = None
    next_at: Callable[[], float] = lambda: math.inf
    on_time: Callable[[], None] = lambda: None


def check_handlers(
    handlers: Mapping[str, Handler[Any]] | Iterable[Handler[Any]], table: Mapping[str, RequestSpec]
) -> dict[str, Handler[Any]]:
    """Return the handlers by name, checked against the request table.

    Every request but HELLO, GOODBYE and CANCEL has exactly one handler, with the table's own spec: else `RuntimeError`,
    a bug of the core. A handler of CANCEL serves targets that are no message in flight. Other handlers belong to
    plugins and are named `plugin.NAME`: else `PluginBroken`.
    """
    by_name: dict[str, Handler[Any]] = {}
    for handler in handlers.values() if isinstance(handlers, Mapping) else handlers:
        name = handler.spec.name
        if name in table:
            if name in OWN_REQUESTS and name != "CANCEL":
                raise RuntimeError(f"{name} is served by messaging itself, a handler for it was given")
            if handler.spec != table[name]:
                raise RuntimeError(f"the handler of {name} has another spec than the request table")
        elif "." not in name.strip(".") or not name.isascii() or not name.isprintable() or len(name) > MAX_TYPE_BYTES:
            raise PluginBroken(
                f"a request is named {name[:80]!r}",
                available=f"plugin.NAME, printable ASCII, at most {MAX_TYPE_BYTES} bytes",
            )
        if name in by_name:
            where = handler.call.__module__
            raise (RuntimeError if name in table else PluginBroken)(f"two handlers of {name}, one of them in {where}")
        by_name[name] = handler
    if missing := sorted(table.keys() - OWN_REQUESTS - by_name.keys()):
        raise RuntimeError(f"no handler for {', '.join(missing)}")
    return by_name


class Dispatcher:
    """Takes messages in and ends sessions. Borrows all its arguments; `liveness_path(identity)` is "" for clients that
    have no liveness socket. `check_room()` raises the error with which a new session is refused."""

    def __init__(
        self,
        served: Served,
        *,
        sessions: SessionTable,
        calls: InFlight,
        replies: ReplySender,
        liveness: LivenessServer | None,
        liveness_path: Callable[[bytes], str],
        counters: dict[str, int],
        refusals: Refusals,
        durations: RequestDurations,
        clock: Callable[[], float],
        check_room: Callable[[], None],
    ) -> None:
        self._sessions = sessions
        self._calls = calls
        self._replies = replies
        self._liveness = liveness
        self._liveness_path = liveness_path
        self._served = served
        self._counters = counters
        self._refusals = refusals
        self._durations = durations
        self._clock = clock
        # Routing ids of sessions that have ended: messages they sent earlier still arrive, and are no failure.
        self._left: dict[bytes, None] = {}
        self._check_room = check_room
        self.stopping = False

    def on_message(self, frames: Sequence[Buffer]) -> None:
        """Handle one message, identity first. Never raises because of a peer's message or a handler."""
        received = self._clock()
        identity = bytes(frames[0])
        try:
            envelope = split(frames[1:])
        except ProtocolError as error:
            self._counters["malformed"] += 1
            self._refusals.request(self._sessions.by_identity(identity), "malformed message", error)
            if len(frames) > 1 and len(frames[1]) == REQUEST_ID_BYTES:
                self._replies.send_error(identity, int.from_bytes(frames[1], "little"), error)
            else:
                self._counters["unanswerable"] += 1
            return
        self._counters["requests"] += 1
        try:
            self._on_request(identity, envelope, received)
        except Exception as error:
            if isinstance(error, (ProtocolError, ServerFull)):
                self._refused(identity, envelope, error)
            elif not isinstance(error, ShuttingDown):
                logger.exception("%s failed", envelope.type)
            if isinstance(error, HelloRequired) and identity in self._left:
                self._replies.send_farewell(identity, envelope.request_id, error)
            else:
                self._replies.send_error(identity, envelope.request_id, error)
            self._durations.add(envelope.type, self._clock() - received)

    def end(self, session: ClientSession) -> None:
        """End a session: cancel its calls in flight, then call `on_session_end`, exactly once per session."""
        if not self._sessions.end(session):
            return
        self._counters["sessions_ended"] += 1
        self._left.update(dict.fromkeys(session.identities))
        while len(self._left) > MAX_LEFT:
            del self._left[next(iter(self._left))]
        if self._liveness is not None:
            self._liveness.drop(session)
        session.local = False
        self._calls.end_session(session)
        try:
            self._served.on_session_end(session)
        except Exception:
            logger.exception("ending session %d of %s failed", session.session_id, session.name)

    def _on_request(self, identity: bytes, envelope: Envelope, received: float) -> None:
        session = self._sessions.by_identity(identity)
        if session is not None:
            self._sessions.touch(session)
        if self.stopping:
            raise ShuttingDown("the server is stopping")
        if envelope.request_id == NO_ANSWER and envelope.type not in ONE_WAY_REQUESTS:
            raise MalformedFrames("a request id that asks for no answer", where=envelope.type, available="another id")
        if envelope.type == "HELLO":
            self._hello(identity, session, envelope)
            self._durations.add("HELLO", self._clock() - received)
            return
        if session is None:
            raise HelloRequired(f"{envelope.type!r} came before HELLO or after the session's end", hint="say HELLO")
        if envelope.type == "GOODBYE":
            self._goodbye(identity, session, envelope)
            self._durations.add("GOODBYE", self._clock() - received)
            return
        self._calls.submit(session, identity, envelope, received)

    def _refused(self, identity: bytes, envelope: Envelope, error: ProtocolError | ServerFull) -> None:
        if isinstance(error, HelloRequired):
            return  # its session has just ended, and it connects again
        if envelope.type == "HELLO":
            self._counters["hello_refused"] += 1
            self._refusals.hello(envelope, error)
        else:
            self._refusals.request(self._sessions.by_identity(identity), envelope.type, error)

    def _open(self, identity: bytes, hello: Hello) -> ClientSession:
        self._check_room()
        return self._sessions.open(identity, hello, remote=not self._liveness_path(identity))

    def _goodbye(self, identity: bytes, session: ClientSession, envelope: Envelope) -> None:
        self.end(session)
        self._replies.send(identity, envelope.request_id, "GOODBYE", Empty())
        try:
            goodbye = decode(envelope.payload, Goodbye, where="GOODBYE")
        except InvalidPayload as error:
            goodbye = Goodbye(error.code, error.fact)
        if goodbye.reason:
            self._counters["server_refused"] += 1
            self._refusals.server(session, goodbye.code, goodbye.reason)

    def _hello(self, identity: bytes, known: ClientSession | None, envelope: Envelope) -> None:
        if envelope.buffers:
            raise MalformedFrames(f"{len(envelope.buffers)} buffers", where="HELLO", available="none")
        hello = decode(envelope.payload, Hello, where="HELLO")
        version = negotiate(hello, self._served.hasher_fingerprint)
        lost = self._sessions.by_token(hello.replaces)
        returns = bool(hello.replaces) and not self._sessions.was_opened(hello.replaces)
        # A local session ends with its liveness socket only: until then its process may still write into the arena.
        if lost is not None and lost is not known and not lost.local:
            self.end(lost)
        if hello.session:
            session, opened = self._sessions.join(identity, hello.session), False
        else:
            session, opened = known or self._open(identity, hello), known is None
        session.version = version
        self._counters["sessions_opened"] += opened
        welcomed = False
        try:
            reply = msgspec.structs.replace(
                self._served.welcome(hello, session, version, returns),
                session=session.token,
                version=version,
                liveness=self._liveness_path(identity),
            )
            welcomed = self._replies.send(identity, envelope.request_id, "HELLO", reply)
        finally:
            if opened and not welcomed:  # refused, or the client has left meanwhile and will never send anything
                self.end(session)

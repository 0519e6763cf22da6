"""Client sessions: the connected clients, their routing ids, the time each was last heard, and the liveness socket
whose end ends them; and the clients that were refused. Serving thread only, unless a method says otherwise."""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import secrets
import select
import socket
import time
from collections import deque
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import Any

import msgspec

from kvframework.api.plugin import Message
from kvframework.api.requests import ClientInfo
from kvframework.errors import HelloRequired, KVFrameworkError, ProtocolError, ServerFull
from kvframework.logs.limit import LogLimit
from kvframework.messaging.polling import WITH_ARENA, WITHOUT_ARENA, close_after_fork, descriptor_limit, peer_of
from kvframework.messaging.server.sockets import socket_umask
from kvframework.status import Refused
from kvframework.wire.frames import Envelope, decode
from kvframework.wire.messages import Hello

logger = logging.getLogger(__name__)

TOKEN_BYTES = 16
MAX_SESSIONS = 4096
MAX_IDENTITIES = 64
MAX_PROCESSES = 64  # of one session
# The timeout of silent clients without a liveness socket while the table is more than half full.
PRESSED_S = 2.0
_MAX_NAME, _MAX_REASON = 128, 512
MAX_KEPT = 32
TELL_AGAIN_S = 60.0  # for the same client and reason
TELL_NEXT_S = 1.0  # for any others


@dataclass(eq=False)
class ClientSession(ClientInfo):
    """One client, of one process or several. `local` is True while one of them holds a liveness socket; `token` is its
    secret name; `version` is the negotiated protocol version. `remote` means a connection over TCP. `in_flight` and
    `bytes_in_flight` are of its requests, and `ordered` are those that wait for their turn."""

    session_id: int
    pid: int
    name: str
    last_seen: float
    local: bool = False
    version: int = 0
    client_version: str = ""
    remote: bool = False
    token: bytes = field(default_factory=lambda: secrets.token_bytes(TOKEN_BYTES), repr=False)
    identities: set[bytes] = field(default_factory=set, repr=False)
    in_flight: int = 0
    bytes_in_flight: int = 0
    ordered: deque[Any] = field(default_factory=deque, repr=False)
    # The liveness sockets of its processes, each with a pidfd, if the process can be watched.
    processes: dict[socket.socket, int | None] = field(default_factory=dict, repr=False)

    @property
    def liveness(self) -> socket.socket | None:
        """The liveness socket of the first of its processes that lives."""
        return next(iter(self.processes), None)

    def liveness_fd(self) -> int | None:
        first = self.liveness
        return None if first is None or not self.local or first.fileno() < 0 else os.dup(first.fileno())


class SessionTable:
    """All sessions that have not ended, found by routing id or by token. Session ids are never reused."""

    def __init__(
        self, clock: Callable[[], float], *, session_timeout_s: float = 30.0, max_sessions: int = MAX_SESSIONS
    ) -> None:
        self._clock = clock
        self.timeout_s = session_timeout_s
        self._max = max_sessions
        self._last_id = 0
        self._remote = 0
        self._by_identity: dict[bytes, ClientSession] = {}
        self._by_token: dict[bytes, ClientSession] = {}
        # Return a session, None for an unknown routing id or token.
        self.by_identity, self.by_token = self._by_identity.get, self._by_token.get
        # Tokens of sessions that have ended, the latest `max_sessions`.
        self._ended: dict[bytes, None] = {}

    def __len__(self) -> int:
        return len(self._by_token)

    def sessions(self) -> list[ClientSession]:
        """Return a snapshot; may be called from any thread."""
        return list(self._by_token.values())

    def open(self, identity: bytes, hello: Hello, *, remote: bool = False) -> ClientSession:
        """Open a session for this routing id. Raises `ServerFull` if the table is full; local clients have half."""
        if identity in self._by_identity:
            raise ProtocolError("this connection has already sent HELLO")
        taken, most = (self._remote, self._max // 2) if remote else (len(self._by_token), self._max)
        if taken >= most or len(self._by_token) >= self._max:
            fact = f"{taken} client sessions are open{' over TCP' if remote else ''}"
            raise ServerFull(fact, available=f"at most {most}", hint="close clients that are not used")
        self._remote += remote
        self._last_id += 1
        session = ClientSession(self._last_id, hello.pid, printable(hello.client[:_MAX_NAME]), self._clock())
        session.client_version = printable(hello.client_version[:_MAX_NAME])
        session.remote = remote
        self._by_token[session.token] = session
        self._bind(identity, session)
        return session

    def join(self, identity: bytes, token: bytes) -> ClientSession:
        """Add another connection to the session. Raises `HelloRequired` if the session has ended, `ProtocolError` if
        the routing id belongs to another session or there are too many."""
        session = self._by_token.get(token)
        if session is None:
            raise HelloRequired("the session to join does not exist", hint="send HELLO without a session")
        if self._by_identity.get(identity, session) is not session:
            raise ProtocolError("this connection belongs to another session")
        if identity not in session.identities and len(session.identities) >= MAX_IDENTITIES:
            raise ProtocolError(f"the session has {MAX_IDENTITIES} connections")
        self._bind(identity, session)
        self.touch(session)
        return session

    def was_opened(self, token: bytes) -> bool:
        """Whether a session of this table has or had the token, as far as is remembered."""
        return token in self._by_token or token in self._ended

    def touch(self, session: ClientSession) -> None:
        session.last_seen = self._clock()

    def expire(self, now: float) -> list[ClientSession]:
        """Return the sessions to end: without a liveness socket, and silent for the timeout, which is short while the
        table is more than half full. Changes nothing."""
        patience = min(self.timeout_s, PRESSED_S) if 2 * len(self) > self._max else self.timeout_s
        return [s for s in self._by_token.values() if not s.local and now - s.last_seen >= patience]

    def end(self, session: ClientSession) -> bool:
        """Forget the session; False if it had ended before."""
        if self._by_token.pop(session.token, None) is None:
            return False
        self._remote -= session.remote
        self._ended[session.token] = None
        if len(self._ended) > self._max:
            del self._ended[next(iter(self._ended))]
        for identity in session.identities:
            del self._by_identity[identity]
        return True

    def _bind(self, identity: bytes, session: ClientSession) -> None:
        self._by_identity[identity] = session
        session.identities.add(identity)


def printable(name: str) -> str:
    """Return a client's own description in a form that is safe in logs and on terminals."""
    return "".join(letter if letter.isprintable() else "?" for letter in name)


# The server's half of the liveness socket, whose end means the client's death. A client connects, sends its 16-byte
# session token and gets one byte, with the arena's descriptor if there is one; then neither side sends anything. A
# child forked from C keeps a copy of its parent's socket open, so the process is also watched by a pidfd: that ends
# with its last thread, and no forked child has the arena mapped (client/arena_mapping.py), so nothing writes there.
#
# A session may have several processes, which all send its token, as an engine's scheduler that holds the leases and its
# workers that write under them: it ends with the last of them.

MAX_HALF_OPEN = 256
HALF_OPEN_SHARE = 1 / 16  # of the limit of descriptors
HALF_OPEN_S = 1.0
# For all clients of a node that connect at once, as after a restart: the kernel refuses those it cannot queue.
BACKLOG = 1024
_SO_PEERPIDFD = 77  # since Linux 6.5; Python does not name it
_EVENTS_PER_ROUND = 64
_ACCEPTS_PER_ROUND = 16


def peer_process(sock: socket.socket) -> int | None:
    """Return a pidfd, owned by the caller, of the process that has connected a Unix socket: readable once all its
    threads have ended. None for a process of another pid namespace before Linux 6.5, where only its id is known. Raises
    `ProcessLookupError` if it has ended."""
    with contextlib.suppress(OSError):
        return sock.getsockopt(socket.SOL_SOCKET, _SO_PEERPIDFD)
    pid, _ = peer_of(sock)
    try:
        return os.pidfd_open(pid) if pid > 0 else None
    except ProcessLookupError:
        raise
    except OSError:
        return None


@dataclass(eq=False, repr=False)
class LivenessServer:
    """Listens at `path`, to processes of this user and of `admit_uids`. `find` returns the session of a token; sessions
    become `local` when their socket is admitted. `arena_for(session id)` returns a descriptor, which is closed here.
    Driven by the serving loop through one pollable descriptor (`fileno`); nothing here blocks."""

    path: str
    arena_for: Callable[[int], int] | None
    find: Callable[[bytes], ClientSession | None]
    counters: dict[str, int]
    admit_uids: Collection[int] = ()

    def __post_init__(self) -> None:
        self._admitted = {os.geteuid(), *self.admit_uids}
        # Connections that have not sent their token, by descriptor, with their deadlines.
        self._half_open: dict[int, tuple[socket.socket, float]] = {}
        # Sessions and their sockets, by the socket's descriptor and by the pidfd of its process.
        self._live: dict[int, tuple[ClientSession, socket.socket]] = {}
        self._listening = False
        self._epoll = select.epoll()
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        close_after_fork(self)
        try:
            self._listener.setblocking(False)
            with socket_umask(shared=bool(self.admit_uids)):
                self._listener.bind(self.path)
            self._listener.listen(BACKLOG)
            self._listen()
        except OSError:
            self.close()
            raise

    def fileno(self) -> int:
        """Return a descriptor that is readable whenever `serve()` has work."""
        return self._epoll.fileno()

    def serve(self) -> list[ClientSession]:
        """Handle ready events, a bounded number. Returns the sessions whose liveness socket or process has ended."""
        ready = [fd for fd, _ in self._epoll.poll(0, _EVENTS_PER_ROUND)]
        # Ends before tokens: a new connection may get the number of a socket that ends in this round.
        dead = []
        for session, sock in dict.fromkeys(self._live[fd] for fd in ready if fd in self._live):
            self._drop(session, sock)
            if not session.processes:
                session.local = False
                dead.append(session)
        for fd in ready:
            if fd in self._half_open:
                self._hear(self._half_open[fd][0])
        # After the connections that have sent something: silent ones may have to make room.
        for _ in range(_ACCEPTS_PER_ROUND if self._listener.fileno() in ready else 0):
            if not self._accept():
                break
        return dead

    def expire(self, now: float) -> None:
        """Drop connections that did not send their token in time, and listen again after descriptors ran out."""
        for sock in [sock for sock, deadline in self._half_open.values() if now >= deadline]:
            self._refuse(sock)
        if not self._listening:
            self._listen()

    def drop(self, session: ClientSession) -> None:
        """Close the sockets of a session that ends; its processes see that at once."""
        for sock in list(session.processes):
            self._drop(session, sock)

    def _drop(self, session: ClientSession, sock: socket.socket) -> None:
        process = session.processes.pop(sock)
        if self._live.pop(sock.fileno(), None) is None:
            return
        if process is not None:
            del self._live[process]
            os.close(process)  # the only copy, so it leaves the epoll, too
        self._hang_up(sock)

    def close(self) -> None:
        """Close every socket, which the clients take for the server's death. The caller removes the socket file."""
        for fd, (_, sock) in self._live.items():
            if fd != sock.fileno():
                os.close(fd)
        for _, sock in self._live.values():
            sock.close()
        for sock, _ in self._half_open.values():
            sock.close()
        self._live.clear()
        self._half_open.clear()
        self._listener.close()
        self._epoll.close()

    def close_in_child(self) -> None:
        self.close()

    def _listen(self) -> None:
        self._epoll.register(self._listener.fileno(), select.EPOLLIN)
        self._listening = True

    def _accept(self) -> bool:
        try:
            sock, _ = self._listener.accept()
        except OSError as error:
            if error.errno in (errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOBUFS):
                # The listener would stay readable and keep the loop busy: pause until the next tick.
                logger.warning("cannot accept a client's liveness connection: %s", error)
                self._epoll.unregister(self._listener.fileno())
                self._listening = False
            return False
        _, uid = peer_of(sock)
        if uid not in self._admitted:
            logger.warning("refused a liveness connection of another user, uid %d", uid)
            self._refuse(sock)
            return True
        while len(self._half_open) >= min(MAX_HALF_OPEN, descriptor_limit() * HALF_OPEN_SHARE):
            self._refuse(next(iter(self._half_open.values()))[0])
        sock.setblocking(False)
        self._half_open[sock.fileno()] = (sock, time.monotonic() + HALF_OPEN_S)
        self._epoll.register(sock.fileno(), select.EPOLLIN)
        return True

    def _hear(self, sock: socket.socket) -> None:
        """Take the token, which comes in one piece, and admit the client."""
        try:
            session = self.find(sock.recv(TOKEN_BYTES + 1))
        except BlockingIOError:
            return
        except OSError:
            session = None
        if session is None or len(session.processes) >= MAX_PROCESSES or (session.processes and not session.local):
            self._refuse(sock)
            return
        process = None
        try:
            process = peer_process(sock)
            session.local = True  # before the client gets its answer
            session.processes[sock] = process
            self._answer(sock, session)
        except OSError as error:
            logger.warning("cannot answer on a client's liveness socket: %s", error)
            session.processes.pop(sock, None)
            session.local = bool(session.processes)
            if process is not None:
                os.close(process)
            self._refuse(sock)
            return
        del self._half_open[sock.fileno()]
        self._live[sock.fileno()] = session, sock
        if process is not None:
            self._live[process] = session, sock
            self._epoll.register(process, select.EPOLLIN)

    def _answer(self, sock: socket.socket, session: ClientSession) -> None:
        """Raise `OSError`, also where the process of the client has ended."""
        if self.arena_for is None:
            sock.send(WITHOUT_ARENA)
            return
        arena = self.arena_for(session.session_id)
        try:
            socket.send_fds(sock, [WITH_ARENA], [arena])
        finally:
            os.close(arena)

    def _refuse(self, sock: socket.socket) -> None:
        self.counters["liveness_refused"] += 1
        self._half_open.pop(sock.fileno(), None)
        self._hang_up(sock)

    def _hang_up(self, sock: socket.socket) -> None:
        # A copier may hold a copy (`ClientSession.liveness_fd`): epoll would still watch the closed socket, and take
        # its events for those of the connection that gets its number next.
        with contextlib.suppress(OSError):
            self._epoll.unregister(sock)
        sock.close()


class Introduction(Message, frozen=True):
    """The readable part of a HELLO that is refused."""

    client: str = "?"
    pid: int = 0
    min_version: int = 1
    max_version: int = 1
    client_version: str = ""


class Refusals:
    """The latest refusals, a bounded number: kept for `status` and logged, since a refused client looks like a cache
    without hits. One entry is of a client, what it asked for ("server": it refuses this server) and the error's code.
    Serving thread, except for `report`."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        # Refusals, with the time of the last one of each kind.
        self._kept: dict[tuple[str, int, str, str], tuple[Refused, float]] = {}
        self._logged, self._logged_any = LogLimit(1, TELL_AGAIN_S, clock), LogLimit(1, TELL_NEXT_S, clock)

    def hello(self, envelope: Envelope, error: KVFrameworkError) -> None:
        try:
            who = decode(envelope.payload, Introduction, where="HELLO")
        except ProtocolError:
            who = Introduction()
        versions = f"{who.min_version} to {who.max_version}"
        asked = Refused(client=who.client, pid=who.pid, client_version=who.client_version, versions=versions)
        self._add(asked, "HELLO", error.code, _reason(error))

    def request(self, session: ClientSession | None, name: str, error: KVFrameworkError) -> None:
        """Record a message of a session, or of an unknown peer, that could not be parsed or served."""
        self.of(session, name, error.code, _reason(error))

    def of(self, session: ClientSession | None, what: str, code: str, reason: str) -> None:
        """Record what a client was refused, or that it cannot use this "server"."""
        asked = Refused(client="?")
        if session is not None:
            pid, version, release = session.pid, str(session.version), session.client_version
            asked = Refused(client=session.name, pid=pid, client_version=release, versions=version)
        self._add(asked, what, code, reason)

    def report(self) -> list[dict[str, object]]:
        """For the status document, the latest first."""
        now, latest = self._clock(), reversed(list(self._kept.values()))
        return [{**msgspec.structs.asdict(refused), "ago_s": round(now - last, 1)} for refused, last in latest]

    def _add(self, asked: Refused, what: str, code: str, reason: str) -> None:
        now = self._clock()
        client, what, code = printable(asked.client[:_MAX_NAME]), printable(what), printable(code[:_MAX_NAME])
        release, reason = printable(asked.client_version[:_MAX_NAME]), printable(reason[:_MAX_REASON])
        key = (client, asked.pid, what, code)
        before, _ = self._kept.pop(key, (Refused(), 0.0))
        if len(self._kept) >= MAX_KEPT:
            del self._kept[next(iter(self._kept))]
        said = {"client": client, "client_version": release, "what": what, "code": code, "reason": reason}
        self._kept[key] = msgspec.structs.replace(asked, **said, count=before.count + 1), now
        if self._logged_any.passes("") and self._logged.passes(key):
            who = f"{client!r} (process {asked.pid}{f', kvframework {release}' if release else ''})"
            done = {"HELLO": "was refused", "server": "refuses this server"}.get(what, f"was refused {what!r}")
            logger.warning("%s %s: [%s] %s", who, done, code, reason)


def _reason(error: KVFrameworkError) -> str:
    return f"{error.fact}; expected: {error.available}" if error.available else error.fact

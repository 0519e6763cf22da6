"""Client sessions: the connected clients, their routing ids, and the time each was last heard.

Pure: no sockets, the clock is given. Used by the server's serving thread only.
"""

from __future__ import annotations

import os
import secrets
import socket
from collections.abc import Callable
from dataclasses import dataclass, field

from kvframework.api.requests import ClientInfo
from kvframework.errors import HelloRequired, ProtocolError, ServerFull
from kvframework.wire.messages import Hello

TOKEN_BYTES = 16
MAX_SESSIONS = 4096
MAX_IDENTITIES = 64
# The timeout of silent clients without a liveness socket while the table is more than half full.
PRESSED_S = 2.0
_MAX_NAME = 128


@dataclass(eq=False)
class ClientSession(ClientInfo):
    """One connected client process. `local` is True while it holds a liveness socket; `token` is its secret name;
    `version` is the negotiated protocol version. `remote` means a connection over TCP."""

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
    liveness: socket.socket | None = field(default=None, repr=False)

    def liveness_fd(self) -> int | None:
        if self.liveness is None or not self.local or self.liveness.fileno() < 0:
            return None
        return os.dup(self.liveness.fileno())


class SessionTable:
    """All sessions that have not ended, found by routing id or by token. Session ids are never reused."""

    def __init__(
        self, clock: Callable[[], float], *, session_timeout_s: float = 30.0, max_sessions: int = MAX_SESSIONS
    ) -> None:
        self._clock = clock
        self._timeout = session_timeout_s
        self._max = max_sessions
        self._last_id = 0
        self._remote = 0
        self._by_identity: dict[bytes, ClientSession] = {}
        self._by_token: dict[bytes, ClientSession] = {}
        # Tokens of sessions that have ended, the latest `max_sessions`.
        self._ended: dict[bytes, None] = {}

    def __len__(self) -> int:
        return len(self._by_token)

    def sessions(self) -> list[ClientSession]:
        """Return a snapshot; may be called from any thread."""
        return list(self._by_token.values())

    def open(self, identity: bytes, hello: Hello, *, remote: bool = False) -> ClientSession:
        """Open a session for this routing id. Raises `ProtocolError` if the id is taken, `ServerFull` if the table is
        full; half of it is reserved for local clients."""
        if identity in self._by_identity:
            raise ProtocolError("this connection has already sent HELLO")
        taken, most = (self._remote, self._max // 2) if remote else (len(self._by_token), self._max)
        if taken >= most or len(self._by_token) >= self._max:
            raise ServerFull(
                f"{taken} client sessions are open{' over TCP' if remote else ''}",
                available=f"{most} at most",
                hint="close clients that are not used",
            )
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
            raise HelloRequired("there is no such session to join", hint="send HELLO without a session")
        if self._by_identity.get(identity, session) is not session:
            raise ProtocolError("this connection belongs to another session")
        if identity not in session.identities and len(session.identities) >= MAX_IDENTITIES:
            raise ProtocolError(f"the session has {MAX_IDENTITIES} connections")
        self._bind(identity, session)
        self.touch(session)
        return session

    def by_identity(self, identity: bytes) -> ClientSession | None:
        return self._by_identity.get(identity)

    def by_token(self, token: bytes) -> ClientSession | None:
        return self._by_token.get(token)

    def was_opened(self, token: bytes) -> bool:
        """Whether it is the token of a session of this table, as far as is remembered of those that have ended."""
        return token in self._by_token or token in self._ended

    def touch(self, session: ClientSession) -> None:
        """Record that the client was heard."""
        session.last_seen = self._clock()

    def expire(self, now: float) -> list[ClientSession]:
        """Return the sessions to end: without a liveness socket, and silent for the timeout, which is short while the
        table is more than half full. Changes nothing."""
        patience = min(self._timeout, PRESSED_S) if 2 * len(self) > self._max else self._timeout
        return [s for s in self._by_token.values() if not s.local and now - s.last_seen >= patience]

    def end(self, session: ClientSession) -> bool:
        """Forget the session and its routing ids; False if it had ended before."""
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

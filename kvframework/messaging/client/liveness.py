"""Whether a client's server lives: the server's silence and the schedule of PINGs, what they carry, and the liveness
socket, which brings the arena's descriptor, and whose end means the server's death. Engine process."""

from __future__ import annotations

import array
import logging
import os
import socket
import struct
import threading
from collections import Counter, deque
from collections.abc import Callable, Iterable

from kvframework.api.transport import LostKind
from kvframework.config.endpoint import trusted_server_uid
from kvframework.errors import EndpointError, ProtocolError, ServerGone
from kvframework.logs.limit import LogLimit
from kvframework.messaging.polling import WITH_ARENA, WITHOUT_ARENA, close_after_fork, peer_of
from kvframework.supervise.state import Backoff
from kvframework.wire.messages import LOST_AMOUNTS, MAX_FREED, MAX_LOST, MAX_LOST_CODE, MOST_LOST, Lost, Ping

logger = logging.getLogger(__name__)
logger.addFilter(LogLimit())

_SLOWEST_S = 2.0
SILENCE_S = 1.0  # silence shorter than this is not logged
_OTHERS = "other"  # the code of losses for which there is no entry of their own


class Watch:
    """Whether the server of a link answers, and when to PING it. Pure but for its log lines: the time is passed in.

    One PING is outstanding at a time; an unanswered one is repeated at growing intervals. The server is `suspect` from
    a request or PING that was not answered in time until a PING is answered: silence is not death. `changed()` is
    called when that has changed. Any thread may call; `next_at` is when to PING, or to look for silence, next."""

    def __init__(self, interval: float, timeout: float, now: float, changed: Callable[[], None] = lambda: None) -> None:
        self.suspect = False
        # When a message of the server arrived: the link sets it, at every message.
        self.heard_at = 0.0
        self.next_at = now + interval
        self._interval = interval
        self._timeout = timeout
        self.changed = changed
        self._repeat = Backoff(timeout, max(_SLOWEST_S, timeout))
        self._pinged_at: float | None = None  # the oldest unanswered PING
        self._suspect_since = self._unanswered_since = 0.0
        self._logged = False

    def silent_s(self, now: float) -> float:
        """Return the seconds for which the server has answered nothing despite a request; 0 if it is not suspect."""
        return max(now - max(self._unanswered_since, self.heard_at), 0.0) if self.suspect else 0.0

    def unanswered_s(self, now: float) -> float:
        """Return the seconds for which the oldest PING has been unanswered, 0 while that is not overdue."""
        since = self._pinged_at
        return now - since if since is not None and now >= since + self._timeout else 0.0

    def doubt(self, since: float, now: float) -> None:
        """Mark the server as suspect: a request of the time `since` was not answered, or could not be sent."""
        self.ask_now()
        if not self.suspect:
            self._suspect_since, self._unanswered_since = now, since
            self.suspect = True
            self.changed()

    def ask_now(self) -> None:
        if self._pinged_at is None:
            self.next_at = 0.0

    def pinged(self, now: float) -> None:
        if self._pinged_at is None:
            self._pinged_at = now
        self.next_at = now + self._repeat.delay(now)

    def answered(self, now: float) -> None:
        """Record that the server's loop has answered a PING."""
        since, self._pinged_at = self._pinged_at, None
        self.next_at = (now if since is None else since) + self._interval
        self._repeat.reset()
        if self.suspect:
            self.suspect = False
            if self._logged:
                self._logged = False
                logger.info("the server answers again after %.1f s", now - self._suspect_since)
            self.changed()

    def log(self, now: float) -> None:
        """Log a silence once it has lasted: a single late answer needs no action of an operator."""
        if self.suspect and not self._logged and now - self._suspect_since >= SILENCE_S:
            self._logged = True
            logger.warning("the server does not answer; lookups are misses until it does")


class Reports:
    """What the PINGs of a client's sessions carry: losses, and tickets to free. Safe in threads and signal handlers.
    Losses are failed calls by error code and kind. A PING has the totals of its session, unless an answered one had the
    same: a repeated one counts once. Tickets go along with a LOOKUP or a PING, and end with the session."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._lost: dict[str, Counter[str]] = {}
        self._answered: tuple[Lost, ...] = ()
        self._freed: deque[str] = deque()

    def begin(self) -> None:
        """Start a new session: its totals are what no earlier one has reported and heard to have arrived."""
        with self._lock:
            for each in self._answered:
                self._lost[each.code] -= Counter({name: getattr(each, name) for name in LOST_AMOUNTS})
            self._lost = {code: left for code, left in self._lost.items() if left}
            self._answered = ()
            self._freed.clear()

    def lost(self, kind: LostKind, code: str, nbytes: int) -> None:
        """Add one failed call, and the bytes that it was to move."""
        code = code[:MAX_LOST_CODE]
        with self._lock:
            if code not in self._lost and len(self._lost) >= MAX_LOST - 1:
                code = _OTHERS
            self._lost.setdefault(code, Counter()).update({kind: 1, "nbytes": nbytes})

    def ping(self) -> Ping:
        """Return a PING with all that the server of this session does not know yet."""
        with self._lock:
            lost = tuple(
                Lost(code, **{name: min(count, MOST_LOST) for name, count in counts.items()})
                for code, counts in self._lost.items()
            )
            return Ping(() if lost == self._answered else lost)

    def answered(self, ping: Ping) -> None:
        with self._lock:
            self._answered = ping.lost or self._answered

    def free(self, tickets: Iterable[str]) -> None:
        """Add tickets; more than once does no harm."""
        with self._lock:
            self._freed.extend(tickets)

    def take_freed(self) -> tuple[str, ...]:
        """Take the next tickets, `MAX_FREED` at most, oldest first. What cannot be sent comes back by `free`."""
        if not self._freed:
            return ()
        with self._lock:
            return tuple(self._freed.popleft() for _ in range(min(len(self._freed), MAX_FREED)))


class LivenessLink:
    """A connected liveness socket. Poll `fd` for reading: it becomes readable only at the server's end. A forked child
    closes its copy by itself, so the server sees the end of the process that connected."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        # Between the closing of a descriptor and a copy of it, its number may become another file's.
        self._lock = threading.Lock()
        close_after_fork(self)

    @classmethod
    def connect(cls, path: str, token: bytes, timeout: float) -> tuple[LivenessLink, int | None]:
        """Connect, present the token and receive the arena's descriptor (None if there is no arena). The caller owns
        both. Blocks at most about `timeout` seconds. Raises `ServerGone`, `ProtocolError` or `EndpointError`."""
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        link = cls(sock)  # before connecting, so that a fork in between keeps no copy
        try:
            sock.settimeout(timeout)
            sock.connect(path)
            _, uid = peer_of(sock)
            if uid != trusted_server_uid():
                raise EndpointError(f"the server runs as another user, uid {uid}", where=path)
            sock.sendall(token)
            arena_fd = _receive_arena(sock, path)
            sock.setblocking(False)
        except Exception as error:
            sock.close()
            if isinstance(error, OSError):
                raise ServerGone(f"the liveness socket cannot be opened: {error}", where=path) from None
            raise
        return link, arena_fd

    @property
    def fd(self) -> int:
        return self._sock.fileno()

    def duplicate(self) -> int:
        """Return another descriptor of the same socket, owned by the caller: the server sees the end when all are
        closed. Raises `ServerGone` once the socket is closed, and `OSError`."""
        with self._lock:
            if self._sock.fileno() < 0:
                raise ServerGone("the server has ended")
            return os.dup(self._sock.fileno())

    def close(self) -> None:
        """Close the socket, which the server takes for the client's death. Idempotent."""
        with self._lock:
            self._sock.close()

    def close_in_child(self) -> None:
        self._sock.close()


def _receive_arena(sock: socket.socket, path: str) -> int | None:
    # Not socket.recv_fds: before Python 3.12 it loses the flags, and with them close-on-exec.
    space = socket.CMSG_SPACE(struct.calcsize("i"))
    data, ancillary, _, _ = sock.recvmsg(1, space, socket.MSG_CMSG_CLOEXEC)
    fds = array.array("i")
    for level, kind, content in ancillary:
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
            fds.frombytes(content[: len(content) - len(content) % fds.itemsize])
    if not data:
        raise ServerGone("the server refused the liveness socket", where=path)
    if (data, len(fds)) == (WITH_ARENA, 1):
        return fds[0]
    for fd in fds:
        os.close(fd)
    if data == WITHOUT_ARENA:
        return None
    raise ProtocolError(
        "the liveness socket delivered no descriptor", where=path, hint="check this process's limit of open files"
    )

"""Whether a client's server lives: the liveness socket, the schedule of PINGs, the server's silence, and the reason why
a connection is down.

Runs in the engine process. The supervisor thread connects the socket and writes the reason; the connection's I/O thread
watches the socket. It brings the arena's descriptor, and its end means the server's death.
"""

from __future__ import annotations

import array
import logging
import os
import socket
import struct
import threading
import time
from collections.abc import Callable

from kvframework.config import trusted_server_uid
from kvframework.errors import EndpointError, KVFrameworkError, OutOfResources, ProtocolError, ServerGone
from kvframework.logs.limit import LogLimit
from kvframework.messaging.descriptors import WITH_ARENA, WITHOUT_ARENA, close_after_fork, peer_uid
from kvframework.supervise.state import Backoff

_SLOWEST_S = 2.0


class Heartbeat:
    """One PING is outstanding at a time; an unanswered one is repeated at growing intervals, so that none pile up."""

    def __init__(self, interval: float, timeout: float, now: float) -> None:
        self._interval = interval
        self._timeout = timeout
        self._next = now + interval
        self._repeat = Backoff(timeout, max(_SLOWEST_S, timeout))
        self._waiting_since: float | None = None

    def next_at(self) -> float:
        """Return the time at which `due` or `overdue` may next become true."""
        return self._next

    def due(self, now: float) -> bool:
        """Whether a PING is due."""
        return now >= self._next

    def overdue(self, now: float) -> bool:
        """Whether a PING has been unanswered for the timeout."""
        return self._waiting_since is not None and now >= self._waiting_since + self._timeout

    def silence(self, now: float) -> float:
        """Return the seconds for which the oldest PING has been unanswered."""
        return now - self._waiting_since if self._waiting_since is not None else 0.0

    def sent(self, now: float) -> None:
        """Record that a PING was sent, or could not be sent."""
        if self._waiting_since is None:
            self._waiting_since = now
        self._next = now + self._repeat.delay(now)

    def answered(self) -> None:
        """Record that some PING was answered."""
        if self._waiting_since is not None:
            self._next = self._waiting_since + self._interval
            self._waiting_since = None
            self._repeat.reset()

    def ask_now(self) -> None:
        """Make a PING due now, after another request was not answered, unless a PING is outstanding."""
        if self._waiting_since is None:
            self._next = 0.0


# The silence of a server: whether it has left a request unanswered, since when, and the log lines about it.
# Thread-safe, no I/O.

logger = logging.getLogger(__name__)
logger.addFilter(LogLimit())

SILENCE_S = 1.0  # silence shorter than this is not logged


class Silence:
    """`changed` is called when `suspect` has changed, in the thread that changes it. Silence is not death: a link ends
    for other reasons."""

    def __init__(self, changed: Callable[[], None]) -> None:
        self.suspect = False
        self._changed = changed
        self._clock = time.monotonic
        # Guards `suspect`. Reentrant: a signal's handler may ask.
        self._lock = threading.RLock()
        self._suspect_since = 0.0
        self._unanswered_since = 0.0
        self._logged = False
        # When a message of the server arrived: the link sets it, at every message.
        self.heard_at = 0.0

    def seconds(self) -> float:
        """Return the seconds for which the server has answered nothing despite a request; 0 if it is not suspect."""
        if not self.suspect:
            return 0.0
        return max(self._clock() - max(self._unanswered_since, self.heard_at), 0.0)

    def begin(self, since: float | None = None) -> None:
        """Mark the server as suspect. `since` is the time of the first unanswered request; None: now."""
        with self._lock:
            if self.suspect:
                return
            self._unanswered_since = self._clock() if since is None else since
            self.suspect = True
        self._suspect_since = self._clock()
        self._changed()

    def end(self) -> None:
        """Record that the server's loop has answered a PING."""
        with self._lock:
            if not self.suspect:
                return
            self.suspect = False
        if self._logged:
            self._logged = False
            logger.info("the server answers again after %.1f s", self._clock() - self._suspect_since)
        else:
            logger.debug("one answer was late, the server answers")
        self._changed()

    def log(self, now: float) -> None:
        """Log a silence once it has lasted: a single late answer needs no action of an operator."""
        if self.suspect and not self._logged and now - self._suspect_since >= SILENCE_S:
            self._logged = True
            logger.warning("the server does not answer: every lookup is a miss until it does")


class LivenessLink:
    """A connected liveness socket. Poll `fd` for reading: it becomes readable only at the server's end.

    A forked child closes its copy by itself, so the server sees the end of the process that connected.
    """

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
            if peer_uid(sock) != trusted_server_uid():
                raise EndpointError(f"the server runs as another user, uid {peer_uid(sock)}", where=path)
            sock.sendall(token)
            arena_fd = _receive_arena(sock, path)
            sock.setblocking(False)
        except OSError as error:
            sock.close()
            raise ServerGone(f"no liveness socket: {error}", where=path) from None
        except Exception:
            sock.close()
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
        "the liveness socket delivered no descriptor", where=path, hint="is the limit of open files reached?"
    )


TELL_AGAIN_S = 60.0


class WhyDown:
    """`error` is that of the last attempt, None after a successful one; `unanswered` is the error of the present
    attempt if its HELLO gets no answer."""

    def __init__(self, endpoint: str) -> None:
        self.error: Exception | None = None
        self.unanswered: ServerGone | None = None
        self._endpoint = endpoint
        self._tell_again_at = 0.0

    @property
    def most_telling(self) -> Exception | None:
        """The most specific reason: a refusal before silence, silence before a server that was not found."""
        if self.error is not None and not isinstance(self.error, ServerGone):
            return self.error
        return self.unanswered or self.error

    def note(self, error: Exception, *, quiet: bool) -> None:
        """Record the error of an attempt. Unless `quiet`, log it: loudly, unless there is just no server; again after a
        while, since a cache without hits is easily overlooked."""
        now = time.monotonic()
        if not quiet and (str(error) != str(self.error) or now >= self._tell_again_at):
            self._tell_again_at = now + TELL_AGAIN_S
            if isinstance(error, ServerGone):
                logger.info("no server at %s: %s", self._endpoint, error.fact)
            elif isinstance(error, OutOfResources):
                logger.warning("no connection to %s for now: %s", self._endpoint, error)
            elif isinstance(error, KVFrameworkError):
                logger.error("the server at %s cannot be used: %s", self._endpoint, error)
            else:
                logger.error("connecting to %s failed", self._endpoint, exc_info=error)
        self.error = error
        self.unanswered = None

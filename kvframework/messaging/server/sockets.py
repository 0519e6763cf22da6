"""The sockets of a server: the files of an `ipc://` endpoint; one ROUTER per endpoint, and identities that distinguish
all peers; the sockets of listeners, which other programs reach on the same terms; and the gate that keeps new clients
out while descriptors run low.

An identity is one byte for the endpoint, then ZMQ's routing id. ROUTERs: serving thread only, after `open`."""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import socket
import stat
import threading
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

import zmq

from kvframework.api.endpoint import parse_endpoint
from kvframework.api.listener import Sockets
from kvframework.api.plugin import Buffer, Message
from kvframework.config.endpoint import FULL_SUFFIX, LIVENESS_SUFFIX, check_directory, prepare_private_directory
from kvframework.config.schema import SESSIONS_SHARE
from kvframework.errors import EndpointError, ServerFull
from kvframework.messaging import frames_io
from kvframework.messaging.curve import ServerKeys, ZapHandler
from kvframework.messaging.polling import close_after_fork, descriptor_limit, descriptors_in_use
from kvframework.wire.frames import ERROR_TYPE, NO_ANSWER, ErrorPayload, error_payload, join

T = TypeVar("T")
# Lets new peers in, or keeps them out. Raises `OSError`.
Door = Callable[[bool], None]
logger = logging.getLogger(__name__)

LOCK_SUFFIX = ".lock"
_CONNECT_S = 1.0
FLUSH_MS = 200
_HEAD_FRAMES = 1 + frames_io.HEAD_FRAMES
# An earlier server, which ends, may still listen.
_BIND_S = 5.0
_BIND_STEP_S = 0.05


@contextlib.contextmanager
def socket_umask(shared: bool = False) -> Iterator[None]:
    """Files and sockets made within the block are for their owner only, or, if `shared`, for whom their directory and
    the server let in (of the whole process, so keep it short)."""
    before = os.umask(0o111 if shared else 0o177)
    try:
        yield
    finally:
        os.umask(before)


class EndpointFiles:
    """The files of one `ipc://` endpoint while this process holds it: its socket, its liveness socket, and the lock, an
    flock that no crash can leave behind. `release()` removes them. `shared`: other users reach the sockets, too."""

    def __init__(self, endpoint: str, *, shared: bool = False) -> None:
        self._endpoint = endpoint
        self._shared = shared
        self._path = parse_endpoint(endpoint).path
        self.liveness = self._path + LIVENESS_SUFFIX
        self._full = self._path + FULL_SUFFIX
        self._sockets = (self._path, self.liveness, self._full)
        self._lock_path = self._path + LOCK_SUFFIX
        self._lock = -1

    def check(self) -> None:
        """Refuse what `acquire` would refuse, and change nothing. A server that starts at this moment is not seen.
        Blocks for a second at most. Raises `EndpointError`."""
        check_directory(Path(self._path).parent, shared=self._shared)
        for _ in self._left_behind():
            pass
        if any(_listens(path) for path in (self._path, self._full)):
            holder = ""
            with contextlib.suppress(OSError), open(self._lock_path, encoding="ascii", errors="replace") as lock:
                holder = lock.read(32)
            raise self._held(holder)

    def acquire(self) -> None:
        """Make the directory if it is absent, take the lock and remove stale sockets. Raises `EndpointError`, also for
        a directory that others may write to; the error names another process that holds the endpoint."""
        prepare_private_directory(Path(self._path).parent, shared=self._shared)
        with contextlib.ExitStack() as undo:
            undo.callback(self._release_lock)
            try:
                self._lock = self._take_lock()
                for path in self._left_behind():
                    os.unlink(path)
            except OSError as error:
                raise EndpointError(f"{error.strerror}: {error.filename}", where=self._endpoint) from error
            undo.pop_all()
        close_after_fork(self)

    def show(self, shown: bool) -> None:
        """Make the socket visible to clients or hide it. Raises `OSError`."""
        os.rename(*((self._full, self._path) if shown else (self._path, self._full)))

    def release(self) -> None:
        """Remove the files, if this process held the endpoint, and release the lock. Idempotent."""
        if self._lock < 0:
            return
        for path in self._sockets:
            with contextlib.suppress(OSError):
                os.unlink(path)
        self._release_lock()

    def close_in_child(self) -> None:
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1

    def _take_lock(self) -> int:
        while True:
            with socket_umask():
                lock = os.open(self._lock_path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                holder = os.pread(lock, 32, 0).decode("ascii", "replace")
                os.close(lock)
                raise self._held(holder) from None
            with contextlib.suppress(FileNotFoundError):
                if os.path.samestat(os.fstat(lock), os.stat(self._lock_path)):
                    os.ftruncate(lock, 0)
                    os.pwrite(lock, f"{os.getpid()}\n".encode(), 0)
                    return lock
            os.close(lock)  # the holder removed the file after it was opened here

    def _release_lock(self) -> None:
        if self._lock >= 0:
            with contextlib.suppress(OSError):
                os.unlink(self._lock_path)
            self.close_in_child()

    def _held(self, holder: str) -> EndpointError:
        fact = f"another server holds this endpoint, process {holder.strip() or 'unknown'}"
        return EndpointError(fact, where=self._endpoint, hint="stop that server, or give this server another endpoint")

    def _left_behind(self) -> Iterator[str]:
        """The sockets that are there. Raises `EndpointError` for another file in their place."""
        for path in self._sockets:
            with contextlib.suppress(FileNotFoundError):
                if not stat.S_ISSOCK(os.lstat(path).st_mode):
                    fact = f"{path} exists and is not a socket"
                    raise EndpointError(fact, where=self._endpoint, hint="choose another path")
                yield path


def _listens(path: str) -> bool:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(_CONNECT_S)
        return probe.connect_ex(path) == 0


class Routers:
    """The ROUTERs of one server. Borrows the context: `close` first. Over ipc:// for this user and `admit_uids`."""

    def __init__(self, context: zmq.Context[Any], counters: dict[str, int], admit_uids: Collection[int] = ()) -> None:
        self.sockets: list[frames_io.Socket] = []
        self._context = context
        self._counters = counters
        self._admit_uids = admit_uids
        self._local: list[bool] = []

    def open(self, endpoint: str, keys: ServerKeys | None = None) -> frames_io.Socket:
        """Listen at one more endpoint; over tcp:// with `keys` for those that they admit. Raises `zmq.ZMQError`."""
        router: frames_io.Socket = self._context.socket(zmq.ROUTER)
        self.sockets.append(router)
        frames_io.bound(router)
        router.setsockopt(zmq.ROUTER_MANDATORY, 1)
        router.setsockopt(zmq.LINGER, FLUSH_MS)
        self._local.append(endpoint.startswith("ipc://"))
        _bind(router, endpoint, keys, self._admit_uids)
        return router

    def is_local(self, identity: bytes) -> bool:
        return self._local[identity[0]]

    def receive(self, router: frames_io.Socket) -> list[Buffer] | None:
        """Return the next message of one of `sockets`, the identity first; None if there is none."""
        frames = frames_io.receive(router, _HEAD_FRAMES)
        if frames:
            frames[0] = bytes((self.sockets.index(router),)) + bytes(frames[0])
        return frames

    def send(
        self, identity: bytes, request_id: int, type_name: str, payload: Message, buffers: Sequence[Buffer] = ()
    ) -> bool:
        """Send a reply, unless the request wants none. False if the peer has left or does not read. Raises if the
        message cannot be encoded; nothing is sent then."""
        if request_id == NO_ANSWER:
            return True
        frames = frames_io.outgoing(join(request_id, type_name, payload, buffers))
        try:
            frames_io.send(self.sockets[identity[0]], [identity[1:], *frames])
        except zmq.Again:
            self._counters["dropped"] += 1
            return False
        except zmq.ZMQError as error:
            if error.errno != zmq.EHOSTUNREACH:
                logger.error("cannot send a reply: %s", error)
            self._counters["unroutable"] += 1
            return False
        self._counters["responses"] += 1
        return True

    def send_error(self, identity: bytes, request_id: int, error: BaseException, *, counted: bool = True) -> None:
        """Send `error` to the peer; never raises. Not `counted`: to a peer whose session has ended."""
        payload = error_payload(error)
        if counted:
            self._counters["errors"] += 1
            self._counters[f"errors.{payload.code}"] += 1
        try:
            self.send(identity, request_id, ERROR_TYPE, payload)
        except Exception:  # an error text that cannot be encoded, or is far too long
            logger.exception("an error reply could not be encoded")
            self.send(identity, request_id, ERROR_TYPE, ErrorPayload(payload.code, "see the server's log"))

    def close(self) -> None:
        for router in self.sockets:
            router.close(FLUSH_MS)


def _bind(socket: zmq.Socket[Any], endpoint: str, keys: ServerKeys | None, admit_uids: Collection[int]) -> None:
    local = endpoint.startswith("ipc://")
    if local:
        # The modes of socket and directory have the same effect, but may be changed from outside.
        for uid in {os.geteuid(), *admit_uids}:
            socket.setsockopt(zmq.IPC_FILTER_UID, uid)
    else:
        frames_io.over_tcp(socket, parse_endpoint(endpoint).host)
        if keys is not None:
            keys.apply(socket)
    with socket_umask(shared=local and bool(admit_uids)):
        socket.bind(endpoint)


class ListenerDoors:
    """The doors of the listeners' local sockets, which the server's gate shuts. Any thread."""

    def __init__(self) -> None:
        self._open = True
        self._lock = threading.Lock()
        self._doors: list[Door] = []

    def admit(self, peers: bool) -> None:
        """Let new peers in, or keep them out: each is a descriptor, and libzmq ends a process without any."""
        with self._lock:
            self._open = peers
            for door in self._doors:
                _move(door, peers)

    def add(self, door: Door) -> None:
        """Add a door, which is open; it is shut at once while no new peer is let in."""
        with self._lock:
            self._doors.append(door)
            if not self._open:
                _move(door, False)

    def remove(self, door: Door) -> None:
        with self._lock:
            self._doors.remove(door)


class ListenerSockets(Sockets):
    """See `Sockets`. Over tcp:// the clients that `keys` admit are let in, all with None."""

    def __init__(self, doors: ListenerDoors, keys: ServerKeys | None, admit_uids: Collection[int]) -> None:
        self._doors = doors
        self._keys = keys
        self._admit_uids = admit_uids
        self._counters = {"curve_refused": 0}
        with contextlib.ExitStack() as undo:
            # Released last: a socket that ends removes whatever lies at its path.
            self._files = undo.enter_context(contextlib.ExitStack())
            self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
            undo.callback(self._context.term)
            self._zap = None if keys is None else ZapHandler(self._context, keys.admitted, self._counters)
            if self._zap is not None:
                undo.callback(self._zap.close)
            self._undo = undo.pop_all()
        self.guard = None if self._zap is None else self._zap.socket

    @property
    def refused(self) -> int:  # type: ignore[override]
        return self._counters["curve_refused"]

    def socket(self, kind: int) -> zmq.Socket[bytes]:
        made = self._context.socket(kind)
        self._undo.callback(made.close)
        return made

    def bind(self, socket: zmq.Socket[bytes], endpoint: str, *, where: str) -> None:
        files = None
        if parse_endpoint(endpoint, where=where).kind == "ipc":
            files = EndpointFiles(endpoint, shared=bool(self._admit_uids))
            _when_free(files.acquire)
            self._files.callback(files.release)

        def bind() -> None:
            try:
                _bind(socket, endpoint, self._keys, self._admit_uids)
            except zmq.ZMQError as error:
                fact = f"the server cannot listen there: {error.strerror}"
                hint = "use a free address of this machine"
                raise EndpointError(fact, where=f"{where} = {endpoint}", hint=hint) from None

        _when_free(bind)
        if files is not None:
            self._undo.callback(self._doors.remove, files.show)
            self._doors.add(files.show)

    def serve_guard(self) -> None:
        if self._zap is not None:
            self._zap.serve()

    def close(self) -> None:
        self._undo.close()


def _when_free(take: Callable[[], T]) -> T:
    """Take what an earlier server, which ends, may still have. A mistake is said after as long."""
    until = time.monotonic() + _BIND_S
    while True:
        try:
            return take()
        except EndpointError:
            if time.monotonic() >= until:
                raise
            time.sleep(_BIND_STEP_S)


# The gate keeps new clients out while descriptors run low, so that connected ones, and libzmq, never lack one.
#
# libzmq ends the process if an `ipc://` listener gets no descriptor, and accepts as fast as connections come. So the
# gate's thread counts the descriptors in use, at shorter intervals the fewer are left, and shuts out one kind after the
# other: local readers of events, new sessions, local connections. Unbinding the sockets would also end their accepted
# connections. At a tcp:// listener without a descriptor libzmq just waits for one.

# Shares of the limit from which on a kind is not admitted. Tiers, copiers and accepted connections use the rest.
READERS_SHARE, LOCAL_SHARE = 0.4, 0.7
_SHARES = {"readers": READERS_SHARE, "sessions": SESSIONS_SHARE, "local": LOCAL_SHARE}
REOPEN_SHARE = 0.9  # of the threshold at which it was shut
# Connections do not come faster; the necessary room above a limit follows from it.
FASTEST_PER_S = 100_000
SOONEST_S, LATEST_S = 0.002, 0.5


class Gate:
    """Counts in its own thread between `start` and `close`. `show_local` shows or hides the local socket,
    `admit_readers` those of events; None: there are none. Other methods may be called from any thread."""

    def __init__(self, show_local: Door | None, counters: dict[str, int], admit_readers: Door | None = None) -> None:
        # Whether each kind of connection is admitted.
        self.admits = dict.fromkeys(_SHARES, True)
        doors = {"readers": admit_readers, "sessions": lambda _: None, "local": show_local}
        self._doors = {kind: door for kind, door in doors.items() if door is not None}
        self._counters = counters
        self._ended = threading.Event()
        self._failing = False
        self._thread = threading.Thread(target=self._run, name="kvf-gate", daemon=True)
        self.start = self._thread.start

    def close(self) -> None:
        """End the thread. Blocks until it has ended. Idempotent."""
        self._ended.set()
        if self._thread.ident is not None:
            self._thread.join()

    def check(self) -> None:
        """Raise `ServerFull` if no new session may be opened."""
        if not self.admits["sessions"]:
            raise ServerFull(
                f"more than {SESSIONS_SHARE:.0%} of the server's {descriptor_limit()} open files are in use",
                hint="close unused connections, or raise LimitNOFILE of the server",
            )

    def status(self) -> dict[str, object]:
        return {"in_use": descriptors_in_use(), "limit": descriptor_limit(), **self.admits}

    def _run(self) -> None:
        pause = 0.0
        while not self._ended.wait(pause):
            try:
                pause = self._look()
                self._failing = False
            except Exception:
                if not self._failing:  # one line, not one each time
                    logger.exception("accepting connections continues after an internal error")
                self._failing, pause = True, LATEST_S

    def _look(self) -> float:
        """Adjust what is admitted; return the seconds in which no flood can take what is left below the next limit."""
        limit, in_use = descriptor_limit(), descriptors_in_use()
        left = LATEST_S * FASTEST_PER_S
        for kind, door in self._doors.items():
            was_open, most = self.admits[kind], _SHARES[kind] * limit
            is_open = in_use < (most if was_open else REOPEN_SHARE * most)
            if is_open:
                left = min(left, most - in_use)
            if is_open == was_open:
                continue
            self.admits[kind] = is_open
            _move(door, is_open)
            if is_open and all(self.admits.values()):
                logger.info("new clients are accepted again: %d of %d open files are in use", in_use, limit)
            elif kind == "local":
                self._counters["local_shut"] += not is_open
            elif not is_open:
                what = "new clients are refused" if kind == "sessions" else "new event readers wait"
                logger.warning("%d of %d open files are in use: %s", in_use, limit, what)
        return max(left / FASTEST_PER_S, SOONEST_S)


def _move(door: Door, is_open: bool) -> None:
    try:
        door(is_open)
    except OSError as error:  # another process has removed a socket
        logger.error("a local socket cannot be %s: %s", "shown" if is_open else "hidden", error)

"""What a thread that polls needs, in server and client: deadlines, an eventfd by which others wake it, and descriptors.
This process may take so many more, a forked child closes some, and a Unix socket's has a peer."""

from __future__ import annotations

import contextlib
import errno
import heapq
import os
import resource
import socket
import struct
import threading
import weakref
from collections.abc import Hashable
from typing import Generic, Protocol, TypeVar

from kvframework.errors import OutOfResources

K = TypeVar("K", bound=Hashable)
_SLACK = 64
# Twice the descriptors of another connection: other threads of the engine may take some of those counted.
FOR_A_CONNECTION = 16
_OPEN = "/proc/self/fd"
_NO_LIMIT = 1 << 30
_RUN_OUT = (errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOBUFS)
_LIMITS = "raise the limit of open files (LimitNOFILE, ulimit -n) or threads (TasksMax, --pids-limit, ulimit -u)"
# Sent with the arena's descriptor, or without one.
WITH_ARENA = b"\x01"
WITHOUT_ARENA = b"\x00"


class Deadlines(Generic[K]):
    """Keys with deadlines: gives the next deadline and the due keys in O(log n). Pure, not thread-safe."""

    def __init__(self) -> None:
        self._when: dict[K, float] = {}
        self._heap: list[tuple[float, K]] = []

    def __len__(self) -> int:
        return len(self._when)

    def set(self, key: K, when: float) -> None:
        """Set or replace the deadline of `key`. Keys of equal deadline must be comparable."""
        self._when[key] = when
        heapq.heappush(self._heap, (when, key))

    def discard(self, key: K) -> None:
        self._when.pop(key, None)
        if len(self._heap) > _SLACK + 2 * len(self._when):
            self._heap = [(when, key) for key, when in self._when.items()]
            heapq.heapify(self._heap)

    def next(self) -> float | None:
        """Return the earliest deadline, None if there is none."""
        heap = self._heap
        while heap and self._when.get(heap[0][1]) != heap[0][0]:
            heapq.heappop(heap)
        return heap[0][0] if heap else None

    def due(self, now: float) -> list[K]:
        """Remove and return the keys whose deadline is `now` or earlier, earliest first."""
        keys = []
        while (when := self.next()) is not None and when <= now:
            key = heapq.heappop(self._heap)[1]
            del self._when[key]
            keys.append(key)
        return keys


class Wakeup:
    """An eventfd: `signal()` makes `fd` readable until `drain()`. A signal's handler may use it. The owner closes it:
    an object of a reference cycle, or of a traceback that is kept, would hold the descriptor until the garbage
    collector runs, which an engine may have switched off."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self.fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        close_after_fork(self)

    def signal(self) -> None:
        """Make `fd` readable. Never blocks. No effect after `close()`, so that none hits a descriptor's next owner."""
        with self._lock:
            if self.fd >= 0:
                os.eventfd_write(self.fd, 1)

    def drain(self) -> None:
        """Reset the signals so far. The caller drains before it checks what they announced."""
        with self._lock:
            if self.fd >= 0:
                with contextlib.suppress(BlockingIOError):
                    os.eventfd_read(self.fd)

    def close(self) -> None:
        """Close the descriptor. Idempotent. The caller ensures that no thread polls `fd`."""
        with self._lock:
            fd, self.fd = self.fd, -1
            if fd >= 0:
                os.close(fd)

    def close_in_child(self) -> None:
        self._lock = threading.RLock()  # another thread of the parent may have held it
        self.close()

    def __del__(self) -> None:
        if hasattr(self, "fd"):
            self.close()


# The descriptors and threads that this process may still take: libzmq ends the process when it gets none.


def descriptor_limit() -> int:
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return _NO_LIMIT if soft == resource.RLIM_INFINITY else soft


def descriptors_in_use() -> int:
    """Return the number of open descriptors, by opening nothing, before Linux 6.2 by a listing; 0 without /proc."""
    try:
        return os.stat(_OPEN).st_size or len(os.listdir(_OPEN)) - 1
    except FileNotFoundError:
        return 0
    except OSError:  # no descriptor is left for the directory either
        return descriptor_limit()


def as_out_of_resources(error: Exception) -> OutOfResources | None:
    """Return an error of the kernel, of ZMQ or of `threading` as `OutOfResources`, None if it has another cause."""
    no_thread = isinstance(error, RuntimeError) and "start new thread" in str(error)
    if no_thread or isinstance(error, MemoryError) or getattr(error, "errno", None) in _RUN_OUT:
        return OutOfResources(f"this process has run out of a resource: {error}", hint=_LIMITS)
    return None


def need(*, descriptors: int, threads: int = 0) -> None:
    """Raise `OutOfResources` if fewer descriptors are left, `RuntimeError` if fewer threads. Descriptors are only
    counted, so that no other thread lacks them meanwhile; threads are started: no count covers all limits."""
    limit = descriptor_limit()
    if limit - descriptors_in_use() < descriptors:
        raise OutOfResources(f"this process has fewer than {descriptors} of its {limit} open files left", hint=_LIMITS)
    end = threading.Event()
    started: list[threading.Thread] = []
    try:
        for _ in range(threads):
            thread = threading.Thread(target=end.wait, name="kvf-room", daemon=True)
            thread.start()
            started.append(thread)
    finally:
        end.set()
        for thread in started:
            thread.join()


# Descriptors in a forked child: it closes its inherited copies. A liveness socket shows that this process lives; a copy
# in a child would still show that after the parent's death.


class ClosedInChild(Protocol):
    def close_in_child(self) -> None:
        """Close descriptors and nothing else: no lock, no unlinking, no shutdown, nothing that the parent shares."""


_resources: weakref.WeakSet[ClosedInChild] = weakref.WeakSet()


def close_after_fork(resource: ClosedInChild) -> None:
    """Make every child forked from now on call `resource.close_in_child()`, as long as the resource lives."""
    _resources.add(resource)


def _after_fork_in_child() -> None:
    for each in list(_resources):
        with contextlib.suppress(OSError):  # it was closed already; the others must still be closed
            each.close_in_child()
    _resources.clear()


os.register_at_fork(after_in_child=_after_fork_in_child)


def peer_of(sock: socket.socket) -> tuple[int, int]:
    """Return process and user id of the process at the other end of a Unix socket."""
    pid, uid, _ = struct.unpack("3i", sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i")))
    return pid, uid

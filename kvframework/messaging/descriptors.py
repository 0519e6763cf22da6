"""The descriptors and threads of this process: how many it may still take, which end in a forked child, and who
holds the other end of a liveness socket. For server and client."""

from __future__ import annotations

import errno
import os
import resource
import socket
import struct
import threading
import weakref
from typing import Protocol

from kvframework.errors import OutOfResources

# The descriptors and threads that this process may still take from the kernel. For server and client.
#
# libzmq ends the process when it gets none, so they are counted beforehand.

# Twice the descriptors of another connection: other threads of the engine may take some of those counted.
FOR_A_CONNECTION = 16

_OPEN = "/proc/self/fd"
_NO_LIMIT = 1 << 30
_RUN_OUT = (errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOBUFS)


def descriptor_limit() -> int:
    """Return the current soft limit."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return _NO_LIMIT if soft == resource.RLIM_INFINITY else soft


def descriptors_in_use() -> int:
    """Return the number of open descriptors, by one system call that opens nothing; before Linux 6.2 by a listing of
    the directory. 0 where /proc is not mounted."""
    try:
        return os.stat(_OPEN).st_size or len(os.listdir(_OPEN)) - 1
    except FileNotFoundError:
        return 0
    except OSError:  # no descriptor is left for the directory either
        return descriptor_limit()


def as_out_of_resources(error: Exception) -> OutOfResources | None:
    """Return an error of the kernel, of ZMQ or of `threading` as `OutOfResources`, None if it has another cause."""
    if getattr(error, "errno", None) in _RUN_OUT or isinstance(error, MemoryError):
        return OutOfResources(f"this process has run out of a resource: {error}")
    if isinstance(error, RuntimeError) and "start new thread" in str(error):
        return OutOfResources(f"this process cannot start another thread: {error}")
    return None


def need(*, descriptors: int, threads: int = 0) -> None:
    """Raise `OutOfResources` if fewer than these are left. Descriptors are only counted, so that no other thread lacks
    them meanwhile; threads are started and end at once, since no count covers every limit on them."""
    limit = descriptor_limit()
    if limit - descriptors_in_use() < descriptors:
        raise OutOfResources(
            f"fewer than {descriptors} of this process's {limit} descriptors are free",
            hint="raise the limit: ulimit -n, LimitNOFILE under systemd",
        )
    if threads:
        _need_threads(threads)


def _need_threads(count: int) -> None:
    end = threading.Event()
    started: list[threading.Thread] = []
    try:
        for _ in range(count):
            thread = threading.Thread(target=end.wait, name="kvf-room", daemon=True)
            thread.start()
            started.append(thread)
    except RuntimeError as error:
        raise OutOfResources(
            f"this process cannot start another thread: {error}",
            hint="raise the limit: ulimit -u, TasksMax under systemd, --pids-limit of the container",
        ) from None
    finally:
        end.set()
        for thread in started:
            thread.join()


# Descriptors in a forked child: it closes its inherited copies, so that only the parent's life counts.
#
# A liveness socket shows that this process lives; a copy in a child would still show that after the parent's death.


class ClosedInChild(Protocol):
    def close_in_child(self) -> None:
        """Close descriptors and nothing else: no lock, no unlinking, no shutdown, nothing that the parent shares."""


_resources: weakref.WeakSet[ClosedInChild] = weakref.WeakSet()


def close_after_fork(resource: ClosedInChild) -> None:
    """Make every child forked from now on call `resource.close_in_child()`, as long as the resource lives."""
    _resources.add(resource)


def _after_fork_in_child() -> None:
    for each in list(_resources):
        try:
            each.close_in_child()
        except OSError:
            continue  # it was closed already; the others must still be closed
    _resources.clear()


os.register_at_fork(after_in_child=_after_fork_in_child)


# Sent with the arena's descriptor, or without one.
WITH_ARENA = b"\x01"
WITHOUT_ARENA = b"\x00"


def peer_credentials(sock: socket.socket) -> tuple[int, int, int]:
    """Return process, user and group id of the process at the other end of a Unix socket."""
    pid, uid, gid = struct.unpack("3i", sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i")))
    return pid, uid, gid


def peer_uid(sock: socket.socket) -> int:
    """Return the user id of the process at the other end of a Unix socket."""
    return peer_credentials(sock)[1]

"""The descriptors and threads that this process may still take from the kernel. For server and client.

libzmq ends the process when it gets none, so they are counted beforehand.
"""

from __future__ import annotations

import errno
import os
import resource
import threading

from kvframework.errors import OutOfResources

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

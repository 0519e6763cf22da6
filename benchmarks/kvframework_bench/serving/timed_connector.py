"""vLLM's KV connectors, whose processor time is counted: `--kv-transfer-config` names this module, and the connector by
its own name.

A connector gets the same calls and answers as without. Counted are the calls of the engine that the connector answers
itself, and what runs besides: Python threads that it or one of its threads has started, and others that are there
after a call and were not before, or that a socket of ZMQ has brought. See `connector_time` for the file that a process
writes.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import mmap
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from kvframework_bench.serving.connector_time import FILE_BYTES, FOLDER, MOST_THREADS

CONNECTORS = {
    "KvFrameworkConnector": "kvf_vllm.connector",
    "KvFrameworkOffloading": "kvf_vllm.offloading.connector",
    "LMCacheMPConnector": "vllm.distributed.kv_transfer.kv_connector.v1.lmcache_mp_connector",
}
_TASKS = "/proc/self/task"


def __getattr__(name: str) -> Any:
    if name not in CONNECTORS:
        raise AttributeError(name)
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1

    return timed(getattr(importlib.import_module(CONNECTORS[name]), name), KVConnectorBase_V1)


def timed(connector: type, base: type) -> type:
    """Return a class like `connector` whose public methods, those that `base` has not just like it, are counted."""
    counted: dict[str, Any] = {}
    for name, method in inspect.getmembers(connector, inspect.isfunction):
        called = name == "__init__" or not name.startswith("_")
        own = method is not getattr(base, name, None)
        if called and own and not isinstance(inspect.getattr_static(connector, name), staticmethod):
            counted[name] = _counted(method)
    return type(connector)(connector.__name__, (connector,), {"__module__": __name__, **counted})


class _Account:
    """What this process notes in its file. Calls come from any thread."""

    def __init__(self, file: Path) -> None:
        with file.open("w+b") as opened:
            opened.truncate(FILE_BYTES)
            self._noted = memoryview(mmap.mmap(opened.fileno(), FILE_BYTES)).cast("Q")
        self._lock = threading.Lock()
        self._own: set[int] = set()
        self._tasks: set[int] = set()
        self._count = 0

    def before_call(self) -> None:
        """Note the threads that are there."""
        if os.stat(_TASKS).st_nlink != self._count:
            self._look()

    def after_call(self, nanoseconds: int, scheduling: int) -> None:
        """Count the processor time of a call, and the threads that it has started besides Python's own. `scheduling`
        is the time on the clock of a call in the scheduler, 0 for a worker's."""
        with self._lock:
            self._noted[0] += nanoseconds
            if scheduling:
                self._noted[1] += nanoseconds
                self._noted[2] += scheduling
        if os.stat(_TASKS).st_nlink != self._count:
            self.add_threads(self._look() - python_threads())

    def add_threads(self, threads: set[int]) -> None:
        with self._lock:
            for thread in threads - self._own:
                number = self._noted[3]
                if number < MOST_THREADS:
                    self._noted[4 + number] = thread
                    self._noted[3] = number + 1
            self._own |= threads

    def _look(self) -> set[int]:
        before, self._tasks = self._tasks, all_threads()
        self._count = len(self._tasks) + 2
        return self._tasks - before


def all_threads() -> set[int]:
    return set(map(int, os.listdir(_TASKS)))


def python_threads() -> set[int]:
    return {thread.native_id for thread in threading.enumerate() if thread.native_id is not None}


class _Here(threading.local):
    """`within` a call into a connector, or in a separate thread: what is called or started there is counted
    already."""

    within = False


_here = _Here()
_account: _Account | None = None
_start = threading.Thread.start


def _counted(method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def call(*args: Any, **kwargs: Any) -> Any:
        if _here.within:
            return method(*args, **kwargs)
        account = _opened()
        account.before_call()
        _here.within = True
        clock, began = time.monotonic_ns(), time.thread_time_ns()
        try:
            return method(*args, **kwargs)
        finally:
            spent = time.thread_time_ns() - began
            _here.within = False
            role = getattr(args[0], "_role", None)
            account.after_call(spent, time.monotonic_ns() - clock if getattr(role, "name", "") == "SCHEDULER" else 0)

    return call


def _opened() -> _Account:
    """The account of this process, made with its first connector."""
    global _account
    if _account is None:
        _account = _Account(Path(os.environ[FOLDER]) / str(os.getpid()))
        _count_sockets(_account)
        threading.Thread.start = _start_counted  # type: ignore[method-assign, assignment]
    return _account


def _start_counted(thread: threading.Thread) -> None:
    if _here.within:
        run = thread.run

        def run_counted() -> None:
            _here.within = True
            _opened().add_threads({threading.get_native_id()})
            run()

        thread.run = run_counted  # type: ignore[method-assign]
    _start(thread)


def _count_sockets(account: _Account) -> None:
    """Count the threads that come with the first socket of a context, wherever the connector makes it."""
    import zmq

    make = zmq.Context.socket

    def socket(context: Any, *args: Any, **kwargs: Any) -> Any:
        if not _here.within:
            return make(context, *args, **kwargs)
        before = all_threads()
        made = make(context, *args, **kwargs)
        account.add_threads(all_threads() - before - python_threads())
        return made

    zmq.Context.socket = socket  # type: ignore[method-assign, assignment]

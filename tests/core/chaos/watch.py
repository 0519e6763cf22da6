"""Checks of an engine's waits: no future outlives its deadline, and no call exceeds its limit.

Runs in the engine process: in the threads that make and resolve requests, and in its own."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

from kvframework.api.futures import Future
from kvframework.client import KVClient
from kvframework.errors import DeadlineExceeded, KVFrameworkError
from tests.core.chaos.events import Complaint, Event, TimedOut

# Delay that a machine may add while every core is busy with other work.
ALLOWANCE_S = 2.0
_LOOK_EVERY_S = 0.25
STOPS = ("stop_engine", "stop_all_engines")


class Watch:
    """A wrapper of a client's connection, installed when the watch is made."""

    def __init__(self, client: KVClient, tell: Callable[[Event], None]) -> None:
        self.failures: Counter[str] = Counter()
        self._tell = tell
        self._pending: dict[Future[Any], tuple[str, float, float]] = {}
        self._lock = threading.Lock()
        self._over = threading.Event()
        connection = client._connection
        self._watch_futures(connection)
        self._watch_calls(client)
        threading.Thread(target=self._look, name="watch", daemon=True).start()

    def _watch_futures(self, connection: Any) -> None:
        original = connection.begin

        def watched(name: str, *args: Any, timeout: float, turn: float = 0.0, **options: Any) -> Future[Any]:
            began = time.monotonic()
            future: Future[Any] = original(name, *args, timeout=timeout, turn=turn, **options)
            with self._lock:
                self._pending[future] = (name, began, time.monotonic() + timeout + ALLOWANCE_S)
            future.add_done_callback(self._resolved)
            if turn:
                future.add_done_callback(partial(self._note_failure, name))
            return future

        connection.begin = watched

    def _watch_calls(self, client: KVClient) -> None:
        original = client.request

        def watched(name: str, *args: Any, timeout: float | None = None, **options: Any) -> Any:
            began = time.monotonic()
            allowed = client.deadlines.of(name) if timeout is None else timeout
            try:
                return original(name, *args, timeout=timeout, **options)
            except KVFrameworkError as error:
                self.failures[error.code] += 1
                if isinstance(error, DeadlineExceeded):
                    self._tell(TimedOut(name, time.monotonic()))
                raise
            finally:
                self._check(f"the call {name}", began, began + allowed + ALLOWANCE_S)

        client.request = watched  # type: ignore[method-assign]

    def _note_failure(self, name: str, future: Future[Any]) -> None:
        error = future.exception()
        if isinstance(error, KVFrameworkError):
            self.failures[error.code] += 1
        if isinstance(error, DeadlineExceeded):
            self._tell(TimedOut(name, time.monotonic()))

    def _resolved(self, future: Future[Any]) -> None:
        with self._lock:
            name, began, latest = self._pending.pop(future)
        self._check(f"the future of {name}", began, latest)

    def _check(self, what: str, began: float, latest: float) -> None:
        now = time.monotonic()
        if now > latest:
            text = f"{what} came {now - latest:.1f} s later than {ALLOWANCE_S} s after its deadline"
            self._tell(Complaint(text, began, now, excuses=STOPS))

    def _look(self) -> None:
        told = set()
        while not self._over.wait(_LOOK_EVERY_S):
            now = time.monotonic()
            with self._lock:
                overdue = [
                    (name, began) for name, began, latest in self._pending.values() if now > latest + ALLOWANCE_S
                ]
            for name, began in overdue:
                if began not in told:
                    told.add(began)
                    text = f"the future of {name} is pending {now - began:.1f} s after it was made"
                    self._tell(Complaint(text, began, now, excuses=STOPS))

    def check_nothing_is_pending(self) -> None:
        """Report pending futures; called once, when the client is closed."""
        self._over.set()
        with self._lock:
            pending = sorted(name for name, _, _ in self._pending.values())
        if pending:
            now = time.monotonic()
            self._tell(Complaint(f"futures of a closed client are pending: {', '.join(pending)}", now, now))

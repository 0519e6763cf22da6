"""The thread that asks the server for its status once a second, however many clients of HTTP there are."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import msgspec

from kvframework.client import StatusSource
from kvframework.errors import KVFrameworkError

log = logging.getLogger(__name__)

EVERY_S = 1.0
# Longer than a loaded machine delays an answer, shorter than what a probe of Kubernetes forgives.
ANSWER_S = 5.0

Document = Mapping[str, Any]


class Observed(NamedTuple):
    """The result of one poll. `document` is None if it was not answered, and `error` says why; `round_trip_s` is None
    if not even the serving loop answered. `at` is of the monotonic clock, `time` seconds of the wall clock. `polls` and
    `failures` count since the start of this process."""

    document: Document | None = None
    raw: bytes = b""
    error: str = "kvframework observe has not polled the server yet"
    round_trip_s: float | None = None
    at: float = 0.0
    time: float = 0.0
    polls: int = 0
    failures: int = 0


class Poller:
    """Polls from `start` to `stop`. `latest` is replaced as a whole and read from any thread; `heard` gets each result,
    in the polling thread. Owns `source`."""

    def __init__(self, source: StatusSource, heard: Callable[[Observed], None], *, every_s: float = EVERY_S) -> None:
        self.latest = Observed()
        self._source = source
        self._heard = heard
        self._every_s = every_s
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="kvf-observe-poll", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """End the thread and the poll under way. Waits `ANSWER_S` at most."""
        self._stopping.set()
        self._source.close()
        self._thread.join(ANSWER_S + 1)

    def poll(self) -> Observed:
        """Ask once. Blocks for the source's timeout at most."""
        error, raw, document = "", b"", None
        try:
            raw = self._source.ask()
            document = msgspec.json.decode(raw, type=dict[str, Any])
        except KVFrameworkError as failure:
            error = str(failure)
        except Exception as failure:  # noqa: BLE001  the thread has to go on: the next server may be another release
            error = f"{type(failure).__name__}: {failure}"
        last = self.latest
        return Observed(
            document,
            raw if document is not None else b"",
            error,
            self._source.round_trip_s,
            time.monotonic(),
            time.time(),
            last.polls + 1,
            last.failures + bool(error),
        )

    def _run(self) -> None:
        while not self._stopping.is_set():
            began = time.monotonic()
            self._take(self.poll())
            self._stopping.wait(max(began + self._every_s - time.monotonic(), 0.0))
        self._source.close()

    def _take(self, observed: Observed) -> None:
        before, self.latest = self.latest, observed
        if bool(before.error) != bool(observed.error) or before.polls == 0:
            if observed.error:
                log.warning("the server's status cannot be read: %s", observed.error)
            else:
                log.info("the server at %s answers", self._source.endpoint)
        try:
            self._heard(observed)
        except Exception:
            log.exception("a status could not enter the page's history; the server may be of another release")

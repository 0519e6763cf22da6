"""The effect of SIGHUP on a server process: a thread reads the configuration again and applies it."""

from __future__ import annotations

import logging
import os
import signal
import threading
from collections.abc import Callable
from queue import SimpleQueue
from types import TracebackType
from typing import TYPE_CHECKING

from kvframework.errors import KVFrameworkError
from kvframework.logs.form import STDERR

if TYPE_CHECKING:
    from kvframework.wire.messages import ConfigApplied

log = logging.getLogger(__name__)


class ReloadSignal:
    """A context manager, entered in the main thread. A SIGHUP during it is remembered until `serve`, and several that
    come together are one. The SIGHUP of a terminal that closes ends the server, like SIGTERM."""

    def __init__(self) -> None:
        # Its `put` may interrupt anything, so it fits a signal handler.
        self._asked: SimpleQueue[bool] = SimpleQueue()
        self._before = signal.getsignal(signal.SIGHUP) or signal.SIG_DFL
        self._has_terminal = os.isatty(STDERR)

    def __enter__(self) -> ReloadSignal:
        signal.signal(signal.SIGHUP, lambda _number, _frame: self._asked.put(True))
        return self

    def __exit__(self, _kind: type[BaseException] | None, _error: object, _trace: TracebackType | None) -> None:
        signal.signal(signal.SIGHUP, self._before)
        self._asked.put(False)

    def serve(self, reload: Callable[[], ConfigApplied]) -> None:
        """Call `reload` in a thread of its own for each SIGHUP from now on, and for an earlier one. An error, or keys
        that need a restart, are one line in the log, and nothing has changed then."""
        threading.Thread(target=self._run, args=(reload,), name="kvf-reload", daemon=True).start()

    def _run(self, reload: Callable[[], ConfigApplied]) -> None:
        while self._asked.get():
            while not self._asked.empty():
                if not self._asked.get():
                    return
            if self._has_terminal and not os.isatty(STDERR):
                log.info("SIGHUP: the terminal has closed")
                os.kill(os.getpid(), signal.SIGTERM)
                return
            try:
                _tell(reload())
            except KVFrameworkError as error:
                log.error("SIGHUP: the configuration is refused, nothing has changed: %s", error)
            except Exception:
                log.exception("SIGHUP: the configuration could not be read again, nothing has changed")


def _tell(applied: ConfigApplied) -> None:
    waiting = [each.key for each in applied.changes if not each.now]
    if waiting:
        log.error("SIGHUP: nothing has changed, since these keys need a restart: %s", ", ".join(waiting))
    elif not applied.changes:
        log.info("SIGHUP: the configuration has not changed")

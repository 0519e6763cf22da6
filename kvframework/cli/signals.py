"""The signals of a server process: SIGINT and SIGTERM end it, a thread applies the configuration again after SIGHUP."""

from __future__ import annotations

import logging
import math
import os
import signal
import socket
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from types import FrameType
from typing import TYPE_CHECKING, NoReturn

from kvframework.bounded_calls import call_within
from kvframework.errors import KVFrameworkError
from kvframework.logs.process_log import STDERR, chosen_log, end_logging

if TYPE_CHECKING:
    from kvframework.wire.messages import ConfigApplied


log = logging.getLogger(__name__)
# A server stops by itself earlier, see kvframework.server.STOP_S.
DEADLINE_S = 4.7
EXIT_LATE = 1
_LINGER_S = 0.2


class StopRequested(KeyboardInterrupt):
    """A signal that came before there was anything to stop. It passes the guards around plugins like a Ctrl-C."""


class ServerSignals:
    """A context manager, entered once, in the main thread. Until `serve` a SIGINT or SIGTERM raises `StopRequested`;
    from then on it calls `stop` with the time of the signal. An end at once, after a second signal (status 128 + its
    number) or `deadline_s` (status 1), calls `abandon` first. A SIGHUP is remembered until `reload_by`.

    Leaving it, or a `KeyboardInterrupt`, ends the process, with status 0; any other exception passes: signals mean
    again what they meant before, and the watching thread has ended."""

    def __init__(self, deadline_s: float = DEADLINE_S) -> None:
        self.requested = False
        self._deadline_s = deadline_s
        self._stop: Callable[[float], None] | None = None
        self._since = math.inf
        self._abandon: Callable[[], None] = lambda: None
        self._hung_up = threading.Event()
        # The SIGHUP of a terminal that closes ends the server, like SIGTERM.
        self._has_terminal = os.isatty(STDERR)
        self._woken, self._wakeup = socket.socketpair()
        self._watcher = threading.Thread(target=self._watch, name="kvf-signals", daemon=True)
        self._restored = ExitStack()

    def __enter__(self) -> ServerSignals:
        self._wakeup.setblocking(False)
        before = signal.set_wakeup_fd(self._wakeup.fileno(), warn_on_full_buffer=False)
        self._restored.callback(signal.set_wakeup_fd, before)
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            self._restored.callback(signal.signal, number, signal.signal(number, self._on_signal))
        self._watcher.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None or issubclass(kind, KeyboardInterrupt):
            end_process()
        self._restored.close()
        # The watcher reads the end of its stream. It may be in the middle of an end at once, so the wait is bounded.
        self._wakeup.close()
        self._watcher.join(_LINGER_S)

    def serve(self, stop: Callable[[float], None], abandon: Callable[[], None], within_s: float = DEADLINE_S) -> None:
        """Make signals call `stop` (in the main thread) and, for an end at once, `abandon` (in another thread). The
        argument of `stop` is the time of the signal on the monotonic clock: the main thread may have been busy since.
        """
        self._abandon, self._deadline_s = abandon, within_s
        self._stop = stop
        if self.requested:  # a plugin has swallowed `StopRequested`
            stop(self._since)

    def reload_by(self, reload: Callable[[], ConfigApplied]) -> None:
        """Call `reload` in a separate thread after each SIGHUP, and after an earlier one; several that come together
        are one. An error, or keys that need a restart, are one line in the log, and nothing has changed then."""
        threading.Thread(target=self._reload, args=(reload,), name="kvf-reload", daemon=True).start()

    def _on_signal(self, number: int, _frame: FrameType | None) -> None:
        if number == signal.SIGHUP or self.requested:
            return
        self.requested = True
        self._since = min(self._since, time.monotonic())
        if self._stop is None:
            raise StopRequested
        self._stop(self._since)

    def _watch(self) -> None:
        """Read the numbers of the signals, also while the main thread is busy."""
        deadline = math.inf
        with self._woken:
            while True:
                left = max(deadline - time.monotonic(), 0.001)
                self._woken.settimeout(None if left == math.inf else left)
                try:
                    received = self._woken.recv(1)
                except TimeoutError:
                    _log_lateness()
                    self._end_at_once(EXIT_LATE)
                if not received:
                    return
                (number,) = received
                if number == signal.SIGHUP:
                    self._hung_up.set()
                elif number in (signal.SIGINT, signal.SIGTERM):
                    if deadline < math.inf:
                        self._end_at_once(128 + number)
                    self._since = min(self._since, time.monotonic())
                    deadline = self._since + self._deadline_s

    def _end_at_once(self, status: int) -> NoReturn:
        self._abandon()
        os._exit(status)

    def _reload(self, reload: Callable[[], ConfigApplied]) -> None:
        while self._hung_up.wait():
            self._hung_up.clear()
            if self._has_terminal and not os.isatty(STDERR):
                log.info("SIGHUP: the terminal was closed, the server stops")
                os.kill(os.getpid(), signal.SIGTERM)
                return
            try:
                applied = reload()
            except KVFrameworkError as error:
                log.error("SIGHUP: nothing has changed, because the configuration is wrong: %s", error)
            except Exception:
                log.exception("SIGHUP: nothing has changed, because reading the configuration failed")
            else:
                waiting = [each.key for each in applied.changes if not each.now]
                if waiting:
                    log.error("SIGHUP: nothing has changed, because these keys need a restart: %s", ", ".join(waiting))
                elif not applied.changes:
                    log.info("SIGHUP: the configuration has not changed")


def end_process() -> NoReturn:
    """End the process, with status 0, without the interpreter's own end: all is closed, a plugin's thread that does
    not end must not keep it alive, and tearing down modules takes seconds on a busy machine."""
    deadline = time.monotonic() + _LINGER_S
    lingering = [thread for thread in threading.enumerate() if not thread.daemon]
    lingering.remove(threading.main_thread())
    for thread in lingering:
        thread.join(max(deadline - time.monotonic(), 0.0))
    names = [thread.name for thread in lingering if thread.is_alive()]
    if names:
        log.warning("the process ended without waiting for these threads: %s", ", ".join(names))
    end_logging()
    os._exit(0)


def _log_lateness() -> None:
    """Log without a new thread where possible: the kernel starts none while it unmaps memory."""

    def say() -> None:
        log.critical("the server did not stop in time")
        end_logging()

    if chosen_log() is not None:
        say()
    else:
        call_within(_LINGER_S, {"the log": say})

"""The process of `kvframework observe` that a server with `[observe]` keeps running: its start, its end, its
next start."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import threading
import time

import msgspec

from kvframework.child_process import HEALTHY_S, Backoff, how_ended
from kvframework.config import ObserveConfig
from kvframework.logs.form import LogForm, chosen_log

log = logging.getLogger(__name__)

# The paths of this process and no others: with -m the working directory would be the first.
_PROGRAM = "import sys; sys.path[:] = sys.argv[2:]; from kvf_observe.process import main; sys.exit(main(sys.argv[1]))"
STOP_S = 0.5


class ObserveSupervisor:
    """Keeps one process running from `start` to `stop`, with a backoff. Its failure never concerns the server. Its own
    thread starts the process, which the kernel ends with that thread."""

    def __init__(self, endpoint: str, config: ObserveConfig) -> None:
        self._config = config
        form = chosen_log() or LogForm("info", "human")
        start = {"parent": os.getpid(), "endpoint": endpoint, "config": config, "log": form}
        self._argument = msgspec.json.encode(start).decode()
        self._lock = threading.Lock()
        self._stopping = threading.Event()
        self._backoff = Backoff()
        self._process: subprocess.Popen[bytes] | None = None
        self._starts = 0
        self._started = 0.0
        self._last_error = ""
        self._thread = threading.Thread(target=self._run, name="kvf-observe", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """End the process. Blocks for `STOP_S` seconds at most, after which it is killed. Idempotent."""
        self._stopping.set()
        self._signal(signal.SIGTERM)
        if self._thread.ident is not None:
            self._thread.join(STOP_S)
            self._signal(signal.SIGKILL)

    def status(self) -> dict[str, object]:
        """Return the part of the status document; `problem` is "" once a process has run for `HEALTHY_S` since the last
        end. From any thread."""
        with self._lock:
            healthy = self._process is not None and time.monotonic() - self._started >= HEALTHY_S
            return {
                "listen": self._config.listen,
                "pid": None if self._process is None else self._process.pid,
                "starts": self._starts,
                "problem": "" if healthy else self._last_error,
            }

    def _run(self) -> None:
        while not self._stopping.wait(self._backoff.left(time.monotonic())):
            self._backoff.started(time.monotonic())
            why = self._one_process()
            if self._stopping.is_set():
                return
            self._backoff.ended(time.monotonic())
            with self._lock:
                self._last_error = why
            log.error("%s: there are no metrics until it runs again", why)

    def _one_process(self) -> str:
        """Run one process from its start to its end; return why it ended."""
        command = [sys.executable, "-c", _PROGRAM, self._argument, *sys.path]
        try:
            with self._lock:
                self._started = time.monotonic()
                self._process = subprocess.Popen(command, stdin=subprocess.DEVNULL)
                self._starts += 1
        except OSError as error:
            return f"`kvframework observe` cannot be started: {error.strerror or error}"
        log.info("`kvframework observe` is process %d, start %d", self._process.pid, self._starts)
        if self._stopping.is_set():
            self._process.terminate()
        status = self._process.wait()
        with self._lock:
            self._process = None
        return f"`kvframework observe` ended {how_ended(status)}"

    def _signal(self, number: signal.Signals) -> None:
        with self._lock:
            if self._process is not None:
                self._process.send_signal(number)

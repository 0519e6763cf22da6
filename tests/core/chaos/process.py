"""One engine process as the harness sees it: it starts, kills, stops and restarts the process, and reads its reports.

Engines are forked from a process that has imported torch, since most of them live only briefly."""

from __future__ import annotations

import multiprocessing
import os
import threading
from collections.abc import Callable
from multiprocessing import forkserver
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path

import msgspec

from tests.core.chaos.events import AnyEvent, Settings, decode

_END_S = 60.0
_ENGINE = "tests.core.chaos.engine"


def start_nursery(mark: str) -> None:
    """Start the process from which engines are forked. It lives as long as the harness's process, so it does not
    inherit the variable `mark`, which identifies the processes of one run. Returns at once."""
    value = os.environ.pop(mark)
    try:
        forkserver.set_forkserver_preload([_ENGINE])
        forkserver.ensure_running()
    finally:
        os.environ[mark] = value


class EngineProcess:
    """One engine process, used by one thread. `on_report` is called with the engine's reports in its own thread, which
    calls `died` if the process ends unasked. `has_reported` is set at the first report."""

    def __init__(
        self, settings: Settings, log: Path, on_report: Callable[[AnyEvent], None], died: Callable[[str], None]
    ) -> None:
        self.log = log
        self.has_reported = threading.Event()
        self._settings = settings
        self._on_report = on_report
        self._died = died
        self._context = multiprocessing.get_context("forkserver")
        self._process: BaseProcess | None = None
        self._line: Connection | None = None
        self._reader: threading.Thread | None = None
        self._ending = False

    def start(self) -> None:
        """Start the process; does not wait until the engine works."""
        self._ending = False
        ours, theirs = self._context.Pipe()
        arguments = (self._settings, str(self.log), theirs)
        self._process = self._context.Process(target=_become_engine, args=arguments, daemon=True)
        self._process.start()
        theirs.close()
        self._line = ours
        self._reader = threading.Thread(target=self._read, args=(self._process, ours), name="engine")
        self._reader.start()
        self._settings = msgspec.structs.replace(self._settings, incarnation=self._settings.incarnation + 1)

    def signal(self, number: int) -> None:
        """Send SIGSTOP or SIGCONT; no effect on a process that has ended."""
        if self._process is not None and self._process.is_alive() and self._process.pid is not None:
            os.kill(self._process.pid, number)

    def kill9(self) -> None:
        if self._process is not None:
            self._ending = True
            self._process.kill()
            self._reap()

    def ask_to_stop(self) -> None:
        if self._line is not None:
            self._ending = True
            self._line.send_bytes(b"stop")

    def join(self) -> str:
        """Wait for the requested end; return the problem with it, "" for none."""
        if self._process is None:
            return ""
        self._process.join(_END_S)
        if self._process.is_alive():
            self.kill9()
            return f"did not end within {_END_S} s"
        status = self._process.exitcode
        self._reap()
        return f"ended with status {status}: {self._last_lines()}" if status else ""

    def _reap(self) -> None:
        assert self._process is not None
        assert self._reader is not None
        assert self._line is not None
        self._process.join()
        self._reader.join()
        self._line.close()
        self._process = self._reader = self._line = None

    def _read(self, process: BaseProcess, line: Connection) -> None:
        while True:
            try:
                said = line.recv_bytes()
            except (EOFError, OSError):
                break
            self._on_report(decode(said))
            self.has_reported.set()
        if not self._ending:
            process.join(_END_S)
            self._died(f"ended with status {process.exitcode}: {self._last_lines()}")

    def _last_lines(self) -> str:
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-30:])


def _become_engine(settings: Settings, log: str, line: Connection) -> None:
    with open(log, "ab") as file:
        os.dup2(file.fileno(), 2)
    from tests.core.chaos.engine import live

    live(settings, line)

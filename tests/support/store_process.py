"""The process of a real store of values: a test starts, kills, stops and restarts it. `stop` leaves nothing behind."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TypeVar

from tests.support.processes import send

S = TypeVar("S", bound="StoreProcess")


class StoreProcess:
    """One server, whose log lies in `directory`. Use it as a context manager or call `start` and `stop`. After `kill9`,
    `restart` comes back at the same address."""

    name: str
    start_s: float
    poll_s = 0.01

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._process: subprocess.Popen[bytes] | None = None

    def command(self) -> Sequence[str]:
        raise NotImplementedError

    def environment(self) -> dict[str, str]:
        return dict(os.environ)

    def ready(self) -> bool:
        """Whether the server serves."""
        raise NotImplementedError

    @property
    def pid(self) -> int:
        assert self._process is not None, "the server does not run"
        return self._process.pid

    @property
    def running(self) -> bool:
        return self._process is not None

    def start(self) -> None:
        """Returns once the server is ready."""
        self.launch()
        self.await_answer()

    def launch(self) -> None:
        """Starts the process; `await_answer` waits for it."""
        assert self._process is None, "the server runs already"
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(self.command(), stdout=log, stderr=log, env=self.environment())

    def await_answer(self) -> None:
        assert self._process is not None, "the server does not run"
        deadline = time.monotonic() + self.start_s
        while not self.ready():
            ended = self._process.poll()
            if ended is not None or time.monotonic() > deadline:
                log_text = self._log.read_text()[-4000:]
                self.kill9()
                raise AssertionError(f"{self.name} does not come up (exit status {ended}):\n{log_text}")
            time.sleep(self.poll_s)

    def kill9(self) -> None:
        """End the process at once. Idempotent."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    stop = kill9

    def restart(self) -> None:
        self.kill9()
        self.start()

    def sigstop(self) -> None:
        """Freeze the process: connections stay open, and no request is answered."""
        send(self.pid, signal.SIGSTOP)

    def sigcont(self) -> None:
        os.kill(self.pid, signal.SIGCONT)

    def __enter__(self: S) -> S:
        self.start()
        return self

    def __exit__(self, *_exc: object) -> None:
        self.stop()

    @property
    def _log(self) -> Path:
        return self.directory / f"{self.name}.log"

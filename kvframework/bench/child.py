"""Owns the child processes of a bench and the private directory that they live in."""

from __future__ import annotations

import os
import signal
import subprocess
import tempfile
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType

from kvframework.bench.errors import BenchFailed

_STOP_S = 5.0
_LOG_LINES = 12
# What a bench measures does not depend on the caller's own configuration.
_FOREIGN = ("KVFRAMEWORK_CONFIG", "KVFRAMEWORK_ENDPOINT")


@contextmanager
def scratch() -> Iterator[Path]:
    """A directory of this user's alone, short enough for the path of a socket."""
    short = len(tempfile.gettempdir()) < 60
    with tempfile.TemporaryDirectory(prefix="kvf-bench-", dir=None if short else "/tmp") as directory:  # noqa: S108
        yield Path(directory)


class Child:
    """One process, started at once. As a context manager it is ended and reaped on the way out, whatever happened."""

    def __init__(self, name: str, command: Sequence[str], directory: Path) -> None:
        self.name = name
        self._log = directory / f"{name}.log"
        environment = {key: value for key, value in os.environ.items() if key not in _FOREIGN}
        with self._log.open("ab") as log, _held_back() as came:
            self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=log, stderr=log, env=environment)
        if came:
            self.stop()
            signal.raise_signal(came[0])

    def __enter__(self) -> Child:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    @property
    def pid(self) -> int:
        return self._process.pid

    def stop(self) -> None:
        """SIGTERM, and SIGKILL if that is not enough. Idempotent."""
        if self._process.stdin is not None:
            self._process.stdin.close()
        self._process.terminate()
        try:
            self._process.wait(_STOP_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def check_alive(self) -> None:
        """Raises `BenchFailed` with the end of the log if the process has ended."""
        if self._process.poll() is not None:
            raise self.failure(f"ended with status {self._process.returncode}")

    def failure(self, fact: str) -> BenchFailed:
        lines = self._log.read_text(errors="replace").splitlines()[-_LOG_LINES:]
        return BenchFailed(
            f"the {self.name} {fact}", hint="the end of its log:\n" + "\n".join(f"    {line}" for line in lines)
        )


@contextmanager
def _held_back() -> Iterator[list[int]]:
    """Collects SIGINT and SIGTERM instead of letting them end a start halfway, when there is nobody yet to stop the
    child. Signals come to the main thread only."""
    came: list[int] = []
    if threading.current_thread() is not threading.main_thread():
        yield came
        return
    numbers = (signal.SIGINT, signal.SIGTERM)
    before = [(number, signal.signal(number, lambda number, _frame: came.append(number))) for number in numbers]
    try:
        yield came
    finally:
        for number, handler in before:
            signal.signal(number, handler)

"""A child process of `kvframework demo` or `kvframework bench`: its start, log and end.

Children are context managers: on exit they are ended and reaped in any case. `uninterrupted` closes the
gap between the start of a child and its entry into a `with` statement or an exit stack.
"""

from __future__ import annotations

import signal
import subprocess
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import ClassVar, TypeVar

from kvframework.errors import KVFrameworkError

_LOG_LINES = 12

C = TypeVar("C", bound="Child")


@contextmanager
def uninterrupted() -> Iterator[None]:
    """Delay SIGINT and SIGTERM; if one came, raise `KeyboardInterrupt` at the end. Signals reach only the main thread:
    in another thread this has no effect."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    held: list[int] = []
    before = {
        number: signal.signal(number, lambda number, _frame: held.append(number))
        for number in (signal.SIGINT, signal.SIGTERM)
    }
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    if held:
        raise KeyboardInterrupt


class Child:
    """One process, started at once; its log is in `directory`. Its standard input ends when this process does."""

    failed: ClassVar[type[KVFrameworkError]]

    def __init__(
        self, name: str, command: Sequence[str], directory: Path, *, environment: Mapping[str, str], piped: bool = False
    ) -> None:
        """Start the process. `piped` keeps its standard output out of the log. Must be called under `uninterrupted`."""
        self.name = name
        self._log = directory / f"{name}.log"
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE if piped else log, stderr=log, env=environment
            )

    def __enter__(self: C) -> C:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.kill()

    def kill(self) -> None:
        """Kill the process by SIGKILL, as a crash would. Idempotent."""
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                pipe.close()

    def check_alive(self) -> None:
        """Raise an error of class `failed`, with the end of the log, if the process has ended."""
        if self._process.poll() is not None:
            raise self.failure(f"ended with status {self._process.returncode}")

    def failure(self, fact: str) -> KVFrameworkError:
        """Return an error of class `failed`, with the end of the log."""
        lines = self._log.read_text(errors="replace").splitlines()[-_LOG_LINES:]
        return self.failed(
            f"{self.name} {fact}", hint="the end of its log:\n" + "\n".join(f"    {line}" for line in lines)
        )

"""The child processes of a benchmark, the private directory they live in, and lines sent to them and back.

Everything here runs in the benchmark's process, for one thread.
"""

from __future__ import annotations

import ctypes
import os
import selectors
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import IO

from kvf_demo.processes import Child, uninterrupted
from kvframework_bench.errors import BenchFailed

_STOP_S = 5.0
# A bench is independent of the caller's own configuration. Without the last one a second start finds its modules
# compiled, as those of an installed package are: to compile them is half of a start.
_FOREIGN = ("KVFRAMEWORK_CONFIG", "KVFRAMEWORK_ENDPOINT", "PYTHONDONTWRITEBYTECODE")


@contextmanager
def scratch() -> Iterator[Path]:
    """Yield a directory of this user's alone, short enough for the path of a socket."""
    short = len(tempfile.gettempdir()) < 60
    with tempfile.TemporaryDirectory(prefix="kvf-bench-", dir=None if short else "/tmp") as directory:
        yield Path(directory)


@contextmanager
def running(
    name: str,
    command: Sequence[str],
    directory: Path,
    *,
    piped: bool = False,
    environment: Mapping[str, str] | None = None,
) -> Iterator[BenchChild]:
    """Yield a new child, which ends with the context. `piped`: its output is for this process, not for its log.
    `environment` are variables besides those of this process."""
    with ExitStack() as stack:
        with uninterrupted():
            child = stack.enter_context(BenchChild(name, command, directory, piped=piped, environment=environment))
        yield child


class BenchChild(Child):
    """A child process. As a context manager it is asked to end before it is killed. `running` starts one."""

    failed = BenchFailed

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        directory: Path,
        *,
        piped: bool = False,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        own = {key: value for key, value in os.environ.items() if key not in _FOREIGN}
        super().__init__(name, command, directory, environment=own | dict(environment or {}), piped=piped)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def stdin(self) -> IO[bytes]:
        assert self._process.stdin is not None
        return self._process.stdin

    @property
    def stdout(self) -> IO[bytes]:
        """The output of a piped child only."""
        assert self._process.stdout is not None
        return self._process.stdout

    @property
    def log(self) -> str:
        """The text that it has written so far."""
        return self._log.read_text(errors="replace")

    def stop(self) -> None:
        """Send SIGTERM, and SIGKILL if that is not enough. Idempotent."""
        self._process.terminate()
        try:
            self._process.wait(_STOP_S)
        except subprocess.TimeoutExpired:
            pass
        finally:
            self.kill()


_PR_SET_CHILD_SUBREAPER = 36


@contextmanager
def adopting() -> Iterator[None]:
    """Meanwhile grandchildren whose parent has ended become children of this process: so their processor time, once
    they are waited for, is not that of others. Not where one outlives its bench's part on purpose."""
    prctl = ctypes.CDLL(None).prctl
    prctl(_PR_SET_CHILD_SUBREAPER, 1)
    try:
        yield
    finally:
        prctl(_PR_SET_CHILD_SUBREAPER, 0)


_ANSWER_S = 120.0


def await_end(child: BenchChild, within_s: float = _ANSWER_S) -> None:
    """Return when the child has ended, or after so many seconds."""
    deadline = time.monotonic() + within_s
    with suppress(BenchFailed):
        while time.monotonic() < deadline:
            child.check_alive()
            time.sleep(0.001 if within_s <= _ANSWER_S else 0.05)


class LineChannel:
    """Lines to and from one piped child."""

    def __init__(self, child: BenchChild) -> None:
        self._child = child
        self._unread = b""

    def send(self, line: bytes) -> None:
        """Send `line`, which has no end of line. Raises `BenchFailed` if the child has ended."""
        try:
            os.write(self._child.stdin.fileno(), line + b"\n")
        except OSError as error:
            raise self._child.failure(f"does not accept input: {error}") from error

    def receive(self) -> bytes:
        """Wait for a line, two minutes at most. Raises `BenchFailed` without one."""
        deadline = time.monotonic() + _ANSWER_S
        fd = self._child.stdout.fileno()
        with selectors.DefaultSelector() as selector:
            selector.register(fd, selectors.EVENT_READ)
            while b"\n" not in self._unread:
                if not selector.select(max(deadline - time.monotonic(), 0.0)):
                    raise self._child.failure(f"has not answered within {_ANSWER_S:.0f} s")
                data = os.read(fd, 1 << 20)
                if not data:
                    raise self._child.failure("ended")
                self._unread += data
        line, _, self._unread = self._unread.partition(b"\n")
        return line

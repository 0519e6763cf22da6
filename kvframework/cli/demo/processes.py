"""The child processes of `kvframework demo`: a server, a Redis, and the engines. Every wait has a deadline."""

from __future__ import annotations

import json
import os
import socket
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec

from kvframework.cli.demo.child import Child
from kvframework.cli.demo.redis_server import redis_command
from kvframework.client import KVClient
from kvframework.errors import KVFrameworkError
from kvframework.wire import messages as m

START_TIMEOUT_S = 30.0
_POLL_S = 0.02


class DemoFailed(KVFrameworkError):
    """The demo could not be carried out; this says nothing about whether the tokens are equal.

    What to do: the text holds the end of the failed process's log."""

    code = "demo.failed"


class DemoChild(Child):
    """A child process whose log and temporary files are in the demo's directory."""

    failed = DemoFailed

    def __init__(self, name: str, command: Sequence[str], directory: Path, *, piped: bool = False) -> None:
        own = {"TMPDIR": str(directory), "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
        super().__init__(name, command, directory, environment=os.environ | own, piped=piped)


class ServerProcess(DemoChild):
    """A real `kvframework serve`."""

    def __init__(self, config: Path, endpoint: str, directory: Path) -> None:
        super().__init__(
            "server", [sys.executable, "-m", "kvframework.cli.main", "serve", "--config", str(config)], directory
        )
        self._endpoint = endpoint

    def await_ready(self) -> None:
        """Wait until the server answers. Raises `DemoFailed`."""
        deadline = time.monotonic() + START_TIMEOUT_S
        with KVClient(self._endpoint, name="demo") as client:
            while not client.wait_up(0.1):
                self.check_alive()
                if time.monotonic() > deadline:
                    raise self.failure(f"was not ready within {START_TIMEOUT_S:.0f} s")

    def await_written(self, timeout_s: float) -> int:
        """Wait until every stored object is in L2; return the number of objects there. Raises `DemoFailed`."""
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


class RedisProcess(DemoChild):
    """A real redis-server on a private socket; keeps nothing on disk."""

    def __init__(self, binary: Path, directory: Path) -> None:
        self._socket = directory / "redis.sock"
        self.url = f"unix://{self._socket}"
        super().__init__("redis", redis_command(binary, self._socket), directory)

    def await_ready(self) -> None:
        """Wait until it accepts connections. Raises `DemoFailed`."""
        deadline = time.monotonic() + START_TIMEOUT_S
        while not _accepts(self._socket):
            self.check_alive()
            if time.monotonic() > deadline:
                raise self.failure("does not accept connections")
            time.sleep(_POLL_S)


class EngineProcess(DemoChild):
    """A new engine process that runs `module`; it is killed at its deadline."""

    def __init__(self, name: str, module: str, arguments: Sequence[str], directory: Path, *, timeout_s: float) -> None:
        super().__init__(name.replace(" ", "-"), [sys.executable, "-m", module, *arguments], directory, piped=True)
        self._timeout_s = timeout_s
        self._late = False

    def events(self) -> Iterator[dict[str, Any]]:
        """Yield the engine's events as they happen, up to its end. Raises `DemoFailed` if it ends with an error."""
        assert self._process.stdout is not None
        watchdog = threading.Timer(self._timeout_s, self._end_late)
        # An interrupt may come during the start; the process must still be able to end.
        watchdog.daemon = True
        try:
            watchdog.start()
            for line in self._process.stdout:
                yield json.loads(line)
            status = self._process.wait()
            if self._late:
                raise DemoFailed(
                    f"{self.name} was not done after {self._timeout_s:.0f} s, all the time that the demo gives it",
                    hint="cut the prompt with --tokens, or choose a smaller model",
                )
            if status != 0:
                raise self.failure(f"ended with status {self._process.returncode}")
        finally:
            watchdog.cancel()

    def _end_late(self) -> None:
        self._late = True
        self._process.kill()


def _accepts(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX) as probe:
        return probe.connect_ex(str(path)) == 0

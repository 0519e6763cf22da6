"""A real server process for tests, on its own private socket."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from kvframework.client import KVClient
from kvframework.wire import messages as m
from tests.support.processes import send
from tests.support.waiting import wait_until
from tests.support.wire_client import WireClient


class ServerProcess:
    """`kvframework serve` in its own process. Settings are `--set` overrides; with a `capacity` of "" the server
    chooses; `program` holds the interpreter's arguments before `serve`; `output` is a descriptor for its standard
    output and error instead of `log_file`."""

    def __init__(
        self,
        *settings: str,
        capacity: str = "64MiB",
        program: Sequence[str] = ("-m", "kvframework.cli.main"),
        output: int | None = None,
    ) -> None:
        # Socket paths are short, so not below pytest's long tmp_path.
        self._directory = tempfile.TemporaryDirectory(prefix="kvf-")
        self.endpoint = f"ipc://{self._directory.name}/s.sock"
        self.log_file = Path(self._directory.name) / "server.log"
        self._program = program
        self._output = output
        sized = (f"l1.capacity={capacity}",) if capacity else ()
        self._settings = (f"server.endpoint={self.endpoint}", *sized, *settings)
        self.process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> ServerProcess:
        try:
            self.start()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_exc: object) -> None:
        self.stop()
        self._directory.cleanup()

    @property
    def pid(self) -> int:
        assert self.process is not None
        return self.process.pid

    @property
    def log(self) -> str:
        return self.log_file.read_text()

    def set(self, *settings: str) -> None:
        """Add settings for the next `start`."""
        self._settings = (*self._settings, *settings)

    def start(self) -> None:
        self.process = self._begun()
        wait_until(self._answers, 60, "the server")

    def take_over(self) -> int:
        """Start a server that takes over from the running one, and return the exit status of that."""
        assert self.process is not None
        before, self.process = self.process, self._begun("--takeover")
        try:
            status = before.wait(60)
        except subprocess.TimeoutExpired:
            before.kill()
            raise
        wait_until(self._answers, 60, "the next server")
        return status

    def _begun(self, *options: str) -> subprocess.Popen[bytes]:
        command = [sys.executable, *self._program, "serve", *options]
        for setting in self._settings:
            command += ["--set", setting]
        with self.log_file.open("ab") as log_file:
            log = log_file if self._output is None else self._output
            return subprocess.Popen(command, stdout=log, stderr=log, env={**os.environ, "PYTHONWARNINGS": ""})

    def emptied(self) -> ServerProcess:
        """Return this server, running, once it holds nothing and nobody: for tests that share it."""
        if self.process is None:
            self.start()
        with self.client() as client:
            wait_until(lambda: client.call("CLEAR", m.Clear()).in_use == 0 and _alone(client), 60, "an empty server")
        return self

    def stop(self) -> int:
        """Send SIGTERM, and return the exit status."""
        if self.process is None:
            return 0
        self.process.send_signal(signal.SIGCONT)
        self.process.terminate()
        status = self.process.wait(60)
        self.process = None
        return status

    def kill9(self) -> None:
        assert self.process is not None
        self.process.kill()
        self.process.wait(60)
        self.process = None

    def sigstop(self) -> None:
        send(self.pid, signal.SIGSTOP)

    def sigcont(self) -> None:
        os.kill(self.pid, signal.SIGCONT)

    def status(self) -> dict[str, Any]:
        with self.client() as client:
            return client.status()

    def client(self, **options: object) -> WireClient:
        return WireClient(self.endpoint, **options)  # type: ignore[arg-type]

    @contextlib.contextmanager
    def engine_client(self, **options: Any) -> Iterator[KVClient]:
        """An engine's client, connected; its deadlines are for a busy machine."""
        with KVClient(self.endpoint, **{"deadline_scale": 20.0, **options}) as connected:
            assert connected.wait_up(60)
            yield connected

    def _answers(self) -> bool:
        assert self.process is not None
        assert self.process.poll() is None, self.log
        if not Path(self.endpoint.removeprefix("ipc://")).exists():
            return False
        try:
            return self._is_ready(self.status())
        except TimeoutError:
            return False

    def _is_ready(self, status: dict[str, Any]) -> bool:
        return bool(status["l1"]["ready_bytes"] == status["l1"]["capacity_bytes"])


def _alone(client: WireClient) -> bool:
    status = client.status()
    return len(status["messaging"]["sessions"]) == 1 and not status["l1"]["write_leases"]


def fixture_of(make: Callable[..., Any], *arguments: Any, scope: str = "function", **options: Any) -> Any:
    """Make a fixture of what a context manager gives, named as the attribute that it is assigned to."""

    @pytest.fixture(scope=scope)
    def made() -> Iterator[Any]:
        with make(*arguments, **options) as value:
            yield value

    return made


def server_fixture(*settings: str, scope: str = "function", **options: Any) -> Any:
    """Make a fixture: a server process with these settings."""
    return fixture_of(ServerProcess, *settings, scope=scope, **options)


def client_fixture(server: str = "server", *, emptied: bool = False, engine: bool = False, **options: Any) -> Any:
    """Make a fixture: a client of the server that the fixture `server` gives, an engine's or a `WireClient`."""

    @pytest.fixture
    def client(request: pytest.FixtureRequest) -> Iterator[KVClient | WireClient]:
        process: ServerProcess = request.getfixturevalue(server)
        if emptied:
            process.emptied()
        with process.engine_client(**options) if engine else process.client(**options) as connected:
            yield connected

    return client

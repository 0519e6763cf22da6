"""Servers and engine processes of other releases, for the tests."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import threading
from pathlib import Path
from typing import Any

import msgspec

from kvframework.wire import messages as m
from tests.core.wire_versions.other_release import VARIABLE, Release
from tests.support.processes import ran
from tests.support.server_process import ServerProcess
from tests.support.waiting import wait_until

HERE = Path(__file__).parent


class OtherServer(ServerProcess):
    """A server of another release; `start` again after setting `release` replaces it by one of yet another."""

    def __init__(self, release: Release) -> None:
        super().__init__(program=(str(HERE / "server_program.py"),))
        self.release = release

    def start(self) -> None:
        before = os.environ.get(VARIABLE)
        os.environ[VARIABLE] = msgspec.json.encode(self.release).decode()
        try:
            super().start()
        finally:
            if before is None:
                del os.environ[VARIABLE]
            else:
                os.environ[VARIABLE] = before

    def status_command(self, *options: str) -> str:
        command = [sys.executable, "-m", "kvframework.cli.main", "status", "--endpoint", self.endpoint, *options]
        done = ran(*command, code=None)
        return done.stdout + done.stderr

    def status(self) -> dict[str, Any]:
        with self.client(hello=False) as client:
            client.send("HELLO", m.Hello("test", os.getpid(), *self.release.versions))
            client.receive()
            return client.status()

    def _is_ready(self, status: dict[str, Any]) -> bool:
        """Whatever it says: not everybody understands it."""
        return True


class OtherEngine:
    """An engine process of another release, and what it saw last."""

    def __init__(self, endpoint: str, release: Release) -> None:
        self.seen: dict[str, Any] = {}
        self._log = tempfile.TemporaryFile("w+")  # noqa: SIM115  closed at the end
        self._process = subprocess.Popen(
            [sys.executable, str(HERE / "engine_program.py"), endpoint],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            env={**os.environ, VARIABLE: msgspec.json.encode(release).decode(), "PYTHONWARNINGS": ""},
        )
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def __enter__(self) -> OtherEngine:
        return self

    def __exit__(self, *_exc: object) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(60)
        finally:
            self._process.kill()
            self._process.wait(60)
            self._reader.join(10)
            self._log.close()

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def log(self) -> str:
        return os.pread(self._log.fileno(), 1 << 20, 0).decode()

    def wait_hit(self) -> None:
        wait_until(lambda: self.seen.get("hit") == 512, 60, "a hit")

    def wait_log(self, text: str, times: int = 1) -> None:
        wait_until(lambda: self.log.count(text) >= times, 60, f"{text!r} in the engine's log")

    def _read(self) -> None:
        assert self._process.stdout is not None
        with self._process.stdout as lines:
            for line in lines:
                self.seen = msgspec.json.decode(line)

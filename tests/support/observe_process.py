"""`kvframework observe` in a process of its own, at a free port, and the way to ask it."""

from __future__ import annotations

import http.client
import os
import re
import ssl
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple, TypeVar
from urllib.parse import urlsplit

from tests.support.waiting import wait_until

# A loaded machine takes seconds to import, to connect, to poll.
SLOW_S = 60.0
_OBSERVE_SAYS = "metrics, health and the page"

P = TypeVar("P", bound="ListeningProcess")


class Got(NamedTuple):
    """An answer over HTTP; names of headers are in lower case."""

    status: int
    text: str
    headers: Mapping[str, str]


def get(url: str, path: str = "/", *, method: str = "GET", tls: ssl.SSLContext | None = None, **headers: str) -> Got:
    """Ask once, over a connection of its own. Raises `OSError`."""
    place = urlsplit(url)
    assert place.hostname is not None
    if place.scheme == "https":
        connection = http.client.HTTPSConnection(place.hostname, place.port, timeout=SLOW_S, context=tls)
    else:
        connection = http.client.HTTPConnection(place.hostname, place.port, timeout=SLOW_S)
    try:
        connection.request(method, path, headers=headers)
        answer = connection.getresponse()
        named = {name.lower(): value for name, value in answer.getheaders()}
        return Got(answer.status, answer.read().decode(), named)
    finally:
        connection.close()


def listening_url(log: str, says: str = _OBSERVE_SAYS) -> str | None:
    """The address that the last process named in its log."""
    said = re.findall(rf"{says}: (\S+)/", log)
    return said[-1] if said else None


class ListeningProcess:
    """A command of `kvframework` that answers over HTTP, at a free port. A context manager; `url` is where it answers,
    `log` what it wrote; `says` is what it writes before its address."""

    says: str

    def __init__(self, *arguments: str, program: Sequence[str] = ("-m", "kvframework.cli.main")) -> None:
        self._directory = tempfile.TemporaryDirectory(prefix="kvf-")
        self._log = Path(self._directory.name, "log")
        self._command = [sys.executable, *program, *arguments]
        self.url = ""

    def __enter__(self: P) -> P:
        with self._log.open("wb") as log:
            self.process = subprocess.Popen(self._command, stderr=log, env={**os.environ, "PYTHONWARNINGS": ""})
        try:
            wait_until(self._is_listening, SLOW_S, "the address")
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_exc: object) -> None:
        self.process.kill()
        self.process.wait(SLOW_S)
        self._directory.cleanup()

    @property
    def log(self) -> str:
        return self._log.read_text()

    def _is_listening(self) -> bool:
        assert self.process.poll() is None, self.log
        self.url = listening_url(self.log, self.says) or ""
        return bool(self.url)


class ObserveProcess(ListeningProcess):
    says = _OBSERVE_SAYS

    def __init__(self, endpoint: str, *arguments: str) -> None:
        super().__init__("observe", "--endpoint", endpoint, "--listen", "127.0.0.1:0", *arguments)

    def get(self, path: str = "/", **options: str) -> Got:
        return get(self.url, path, **options)

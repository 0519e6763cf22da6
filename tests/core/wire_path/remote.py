"""A server that listens on TCP, with CURVE keys; and what its clients bring."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from kvframework.client import CurveKeys, KVClient
from kvframework.messaging.curve import write_curve_pair
from kvframework.wire import messages as m
from tests.support.ports import free_port
from tests.support.server_process import ServerProcess
from tests.support.wire_client import WireClient


class Keys:
    """A server's pair, and one of each client, as `kvframework keys` lays them out."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.clients = directory / "clients"
        self.clients.mkdir(parents=True)
        write_curve_pair(directory / "server.secret", directory / "server.public")
        self.add("client")

    def add(self, name: str, *, admitted: bool = True) -> CurveKeys:
        public = self.clients if admitted else self.directory
        write_curve_pair(self.directory / f"{name}.secret", public / f"{name}.public")
        return self.of(name)

    def of(self, name: str) -> CurveKeys:
        return CurveKeys(self.directory / "server.public", self.directory / f"{name}.secret")

    @property
    def settings(self) -> tuple[str, ...]:
        return (f"server.curve.secret_key={self.directory / 'server.secret'}", f"server.curve.clients={self.clients}")


class RemoteServer:
    """A server process that is reached over ipc:// by its own user and over tcp:// by others."""

    def __init__(self, process: ServerProcess, tcp: str, keys: Keys | None) -> None:
        self.process = process
        self.tcp = tcp
        self.keys = keys

    def connect(self, name: str = "client", **options: object) -> KVClient:
        """A client over TCP. A busy test machine may be slower than an engine allows its cache to be."""
        options.setdefault("deadline_scale", 20.0)
        return KVClient(self.tcp, curve=self.keys.of(name) if self.keys else None, **options)  # type: ignore[arg-type]

    def local(self) -> WireClient:
        return self.process.client()


@contextmanager
def remote_server(*settings: str, curve: bool = True, capacity: str = "64MiB") -> Iterator[RemoteServer]:
    tcp = f"tcp://127.0.0.1:{free_port()}"
    with tempfile.TemporaryDirectory(prefix="kvf-keys-") as directory:
        keys = Keys(Path(directory) / "keys") if curve else None
        secure = keys.settings if keys else ("server.insecure=true",)
        with ServerProcess(f"server.tcp={tcp}", *secure, *settings, capacity=capacity) as process:
            yield RemoteServer(process, tcp, keys)


def clear(server: RemoteServer) -> None:
    with server.local() as client:
        client.call("CLEAR", m.Clear())


def held(client: WireClient) -> tuple[int, ...]:
    l1 = client.status()["l1"]
    return (l1["pins"], l1["write_leases"], l1["pin_leases"], l1["quarantined_bytes"])

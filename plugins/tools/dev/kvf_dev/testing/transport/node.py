"""The servers of the transport kit and their clients: one in a thread of the test's process, and those in processes."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import ClassVar

import msgspec

from kvf_dev.testing.kit import wait_until
from kvf_dev.testing.transport.cases import CHUNK
from kvf_dev.testing.transport.engine import PATIENCE_S, registry_for
from kvf_dev.testing.transport.rig import RigSpec, TransportRig
from kvframework.client import KVClient
from kvframework.config import load_config
from kvframework.devices import messages
from kvframework.server import Server


def settings_for(rig: TransportRig, endpoint: str) -> list[str]:
    """The server's configuration as `--set` overrides."""
    return [
        f"server.endpoint={endpoint}",
        f"server.chunk_size={CHUNK}",
        "l1.capacity=8MiB",
        f"transport.0.use={rig.transport}",
        *(f"transport.0.{name}={value}" for name, value in rig.server_options.items()),
    ]


@contextmanager
def small_slices() -> Iterator[None]:
    """Have copiers that start meanwhile pin the arena in several slices, as those of real arenas do."""
    before, messages.SLICE_BYTES = messages.SLICE_BYTES, 1 << 20
    try:
        yield
    finally:
        messages.SLICE_BYTES = before


@contextmanager
def serving(rig: TransportRig) -> Iterator[Server]:
    """A real server on real sockets, in a thread."""
    with small_slices(), tempfile.TemporaryDirectory(prefix="kvf-") as directory:
        config = load_config(None, tuple(settings_for(rig, f"ipc://{directory}/s.sock")))
        server = Server(config, registry_for(rig))
        server.bind()
        thread = threading.Thread(target=server.serve_forever, name="kit-server")
        thread.start()
        try:
            yield server
        finally:
            server.stop()
            thread.join(PATIENCE_S)
            assert not thread.is_alive(), "the server did not stop"


def client_of(rig: TransportRig, endpoint: str) -> KVClient:
    """A connected client; the caller closes it."""
    client = KVClient(endpoint, plugins=registry_for(rig), deadline_scale=20.0)
    assert client.wait_up(PATIENCE_S), "no connection to the server"
    return client


def held_by(status: dict[str, object]) -> tuple[int, int]:
    """Return (pins, write leases) of a server's status document."""
    l1 = status["l1"]
    assert isinstance(l1, dict)
    return l1["pins"], l1["write_leases"]


class _Program:
    """A process of the kit with a rig of its own."""

    module: ClassVar[str]
    says: ClassVar[str]

    def __init__(self, spec: RigSpec, *arguments: str) -> None:
        rig = json.dumps([spec.factory, dict(spec.arguments)])
        self.process = subprocess.Popen(
            [sys.executable, "-m", self.module, rig, *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "PYTHONWARNINGS": ""},
        )
        assert (line := self.next_line()) == self.says, f"a process of the kit says {line!r}"

    def kill(self) -> None:
        """Kill the process, and wait for its end and that of its children, which the kernel kills a moment later."""
        lists = Path(f"/proc/{self.process.pid}/task").glob("*/children")
        children = [int(child) for each in lists for child in each.read_text().split()]
        self.process.kill()
        self.close()
        wait_until(lambda: not any(map(_is_running, children)), "the end of the children of a killed process")

    def close(self) -> None:
        """End the process by the end of its input. Idempotent."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.close()
        try:
            self.process.wait(PATIENCE_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self.process.stdout.close()

    def next_line(self) -> str:
        """Return the next line that it prints."""
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, f"the process ended with status {self.process.wait()}"
        return line.strip()


def _is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False


class ServerProgram(_Program):
    """A server in a process of its own, at `endpoint`."""

    module, says = "kvf_dev.testing.transport.server_program", "serving"

    def __init__(self, spec: RigSpec, endpoint: str) -> None:
        super().__init__(spec, endpoint)
        self.endpoint = endpoint


class EngineProgram(_Program):
    """An engine in a process of its own, which obeys commands, see `engine_program`."""

    module, says = "kvf_dev.testing.transport.engine_program", "registered"

    def __init__(self, spec: RigSpec, endpoint: str, instance_id: int, case: str) -> None:
        super().__init__(spec, endpoint, str(instance_id), case)

    def send(self, *words: object) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(words) + "\n")
        self.process.stdin.flush()

    def ask(self, *words: object) -> object:
        self.send(*words)
        return json.loads(self.next_line())


def status_of(client: KVClient) -> dict[str, object]:
    """Return the server's status document."""
    from kvframework.wire import messages as m

    reply = client.request("REPORT_STATUS", m.Empty(), m.StatusReply, timeout=5.0)
    document: dict[str, object] = msgspec.json.decode(reply.document)
    return document


def rig_told(argument: str) -> TransportRig:
    """Return the rig that a program was given."""
    factory, arguments = json.loads(argument)
    return RigSpec(factory, arguments).make()


def endpoint_in(directory: Path) -> str:
    return f"ipc://{directory}/s.sock"

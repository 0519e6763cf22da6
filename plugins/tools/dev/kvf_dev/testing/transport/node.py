"""The server of the transport kit in a thread of the test's process, its clients, and the processes that a test drives:
servers and engines, each with a rig of its own.

As a program: `server RIG ENDPOINT` serves until its input ends; `engine RIG ENDPOINT INSTANCE CASE` takes one JSON list
a line and answers with one. `["store", seed]` and `["load", seed]` wait for the result, `["begin", "store" or "load",
seed]` does not. `["check", instance]` returns the differences after a load of objects that another instance of the same
case has stored.
"""

from __future__ import annotations

import contextlib
import importlib.util
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
import pytest

from kvf_dev.testing.kit import wait_until
from kvf_dev.testing.transport.cases import CASES, CHUNK, MemoryModel
from kvf_dev.testing.transport.engine import PATIENCE_S, KitEngine, registry_for
from kvf_dev.testing.transport.rig import RigSpec, TransportRig
from kvframework.client import KVClient
from kvframework.config.load import load_config
from kvframework.server import Server
from kvframework.wire.messages import Empty, StatusReply

_READY = "ready"


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
def serving(rig: TransportRig) -> Iterator[Server]:
    """A real server on real sockets, in a thread. Its copiers pin the arena in several slices, as those of real arenas
    do."""
    with pytest.MonkeyPatch.context() as patch, tempfile.TemporaryDirectory(prefix="kvf-") as directory:
        if importlib.util.find_spec("kvf_devices"):
            patch.setattr("kvf_devices.messages.SLICE_BYTES", 1 << 20)
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


def status_of(client: KVClient) -> dict[str, object]:
    """Return the server's status document."""
    reply = client.request("REPORT_STATUS", Empty(), StatusReply, timeout=5.0)
    document: dict[str, object] = msgspec.json.decode(reply.document)
    return document


class Program:
    """A process of this module, or of one like it, that is `what` at the server's `endpoint`."""

    module: ClassVar[str] = "kvf_dev.testing.transport.node"

    def __init__(self, what: str, spec: RigSpec, endpoint: str, *arguments: str) -> None:
        self.endpoint = endpoint
        rig = json.dumps([spec.factory, dict(spec.arguments)])
        self.process = subprocess.Popen(
            [sys.executable, "-m", self.module, what, rig, endpoint, *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "PYTHONWARNINGS": ""},
        )
        assert (line := self.next_line()) == _READY, f"a process of the kit says {line!r}"

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

    def send(self, *words: object) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(words) + "\n")
        self.process.stdin.flush()

    def ask(self, *words: object) -> object:
        self.send(*words)
        return json.loads(self.next_line())


def _is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False


def _serve(rig: TransportRig, endpoint: str) -> None:
    server = Server(load_config(None, tuple(settings_for(rig, endpoint))), registry_for(rig))
    server.bind()

    def stop_with_input() -> None:
        sys.stdin.read()
        server.stop()

    threading.Thread(target=stop_with_input, daemon=True).start()
    _say(_READY)
    server.serve_forever()


def _compute(rig: TransportRig, endpoint: str, instance: str, case: str) -> None:
    with client_of(rig, endpoint) as client:
        engine = KitEngine(rig, client, int(instance), CASES[case], seed=int(instance))
        _say(_READY)
        for line in sys.stdin:
            _say(json.dumps(_done(engine, *json.loads(line))))
        engine.close()


def _done(engine: KitEngine, what: str, *words: object) -> object:
    number = int(str(words[-1]))
    if what == "check":
        other = MemoryModel(engine.groups, engine.model.blocks, number)
        engine.expect_loaded(other, engine.source(seed=number), engine.target())
        return engine.differences()
    future = engine.submit(str(words[0]) if what == "begin" else what, engine.request(number))
    return what == "begin" or future.result(PATIENCE_S).ok


def _say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def rig_told(argument: str) -> TransportRig:
    """Return the rig that a program was given."""
    factory, options = json.loads(argument)
    return RigSpec(factory, options).make()


def endpoint_in(directory: Path) -> str:
    return f"ipc://{directory}/s.sock"


def main() -> None:
    what, told, *arguments = sys.argv[1:]
    rig = rig_told(told)
    if what == "server":
        _serve(rig, *arguments)
    else:
        _compute(rig, *arguments)
    rig.close()


if __name__ == "__main__":
    main()

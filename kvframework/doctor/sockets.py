"""The checks of the server's local socket: its path, its directory, and whether a server listens there now."""

from __future__ import annotations

import os
import socket
import stat
from collections.abc import Iterator
from pathlib import Path

from kvframework.api.findings import Finding
from kvframework.config import Config, check_directory, default_endpoint, parse_endpoint
from kvframework.errors import EndpointError
from kvframework.preflight import RunningServer

_CONNECT_S = 1.0


def endpoint_of(config: Config) -> str:
    return config.server.endpoint or default_endpoint()


def socket_findings(endpoint: str, running: RunningServer | None = None) -> Iterator[Finding]:
    """The state of a usable socket; `kvframework.preflight` refuses any other."""
    try:
        parsed = parse_endpoint(endpoint)
    except EndpointError:
        return
    if parsed.kind == "tcp":
        yield Finding("socket.path", "ok", f"{endpoint} is no local socket")
        return
    path = Path(parsed.path)
    yield Finding("socket.path", "ok", f"{path}, {len(os.fsencode(path))} bytes")
    try:
        check_directory(path.parent)
    except EndpointError:
        return
    there = path.parent.exists()
    mode = (
        f"is private: {stat.filemode(path.parent.stat().st_mode)}" if there else "does not exist; the server makes it"
    )
    yield Finding("socket.directory", "ok", f"{path.parent} {mode}")
    listens = f"{'a' if is_served(endpoint) else 'no'} server listens there now"
    yield Finding("socket.server", "ok", listens if running is None else str(running))


def is_served(endpoint: str) -> bool:
    """True if a server listens at a local endpoint. Blocks for a second at most."""
    try:
        parsed = parse_endpoint(endpoint)
    except EndpointError:
        return False
    if parsed.kind != "ipc":
        return False
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(_CONNECT_S)
        try:
            probe.connect(parsed.path)
        except OSError:
            return False
    return True

"""The checks of the server's local socket: its path, its directory, and whether a server listens there now."""

from __future__ import annotations

import os
import socket
import stat
from collections.abc import Iterator
from pathlib import Path

from kvframework.api.findings import Finding
from kvframework.config import Config, check_private_directory, default_endpoint, parse_endpoint
from kvframework.errors import EndpointError

_CONNECT_S = 1.0


def endpoint_of(config: Config) -> str:
    return config.server.endpoint or default_endpoint()


def socket_findings(endpoint: str) -> Iterator[Finding]:
    try:
        parsed = parse_endpoint(endpoint)
    except EndpointError as error:
        yield Finding("socket.path", "fail", f"{error.fact}; {error.available}", error.hint)
        return
    if parsed.kind == "tcp":
        yield Finding("socket.path", "ok", f"{endpoint} is no local socket")
        return
    path = Path(parsed.path)
    yield Finding("socket.path", "ok", f"{path}, {len(os.fsencode(path))} bytes")
    yield _directory(path.parent)
    if is_served(endpoint):
        yield Finding("socket.server", "ok", "a server listens there")
    elif path.exists() and not stat.S_ISSOCK(path.stat().st_mode):
        yield Finding("socket.server", "fail", f"{path} is no socket", "move it away, or set [server] endpoint")
    else:
        yield Finding("socket.server", "ok", "no server listens there now")


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


def _directory(path: Path) -> Finding:
    try:
        check_private_directory(path)
    except EndpointError as error:
        return Finding("socket.directory", "fail", f"{path}: {error.fact}", error.hint)
    except OSError:
        return _missing(path)
    if not os.access(path, os.W_OK | os.X_OK):
        return Finding("socket.directory", "fail", f"{path} is not writable for this user", f"chmod 700 {path}")
    return Finding("socket.directory", "ok", f"{path} is private: {stat.filemode(path.stat().st_mode)}")


def _missing(path: Path) -> Finding:
    """The finding for a missing directory: the server creates it, if it may."""
    above = next(each for each in path.parents if each.exists())
    if above.is_dir() and os.access(above, os.W_OK | os.X_OK):
        return Finding("socket.directory", "ok", f"{path} does not exist yet; the server creates it")
    return Finding(
        "socket.directory",
        "fail",
        f"{path} does not exist, and this user may not create it in {above}",
        "make it with mode 0700, or set [server] endpoint",
    )

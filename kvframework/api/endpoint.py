"""Endpoints: the addresses at which servers listen, as text."""

from __future__ import annotations

import os
import re
from typing import Literal, NamedTuple

from kvframework.errors import EndpointError

__all__ = ["Endpoint", "parse_endpoint", "parse_listen"]

# The kernel takes 107, those of a suffix included.
MAX_SOCKET_PATH_BYTES = 100
ADDRESS = re.compile(r"(?:\[(?P<six>[0-9A-Fa-f:.%]+)\]|(?P<host>[A-Za-z0-9_.*-]+)):(?P<port>[0-9]{1,5})")

_IPC = "ipc://"
_TCP = "tcp://"
_HINT = "write ipc:// and an absolute path"


class Endpoint(NamedTuple):
    """A parsed endpoint: `path` of an "ipc" one; `host` and `port` of a "tcp" one."""

    kind: Literal["ipc", "tcp"]
    path: str = ""
    host: str = ""
    port: int = 0


def parse_endpoint(text: str, *, where: str = "") -> Endpoint:
    """Parses `text`. Pure: looks at the text only. Raises `EndpointError`."""
    if text.startswith(_TCP):
        return _parse_tcp(text, where)
    path = text.removeprefix(_IPC)
    if path == text:
        raise EndpointError(f"{text!r} is no endpoint", where=where, available="ipc://, tcp://", hint=_HINT)
    # A relative path means another socket in every working directory; "@" would be a name without permissions.
    if not path.startswith("/") or path.endswith("/") or not path.isprintable():
        raise EndpointError(f"{path!r} is no absolute path of a socket", where=where, hint=_HINT)
    size = len(os.fsencode(path))
    if size > MAX_SOCKET_PATH_BYTES:
        raise EndpointError(
            f"the socket's path has {size} bytes: {path}",
            where=where,
            available=f"at most {MAX_SOCKET_PATH_BYTES}",
            hint="choose a shorter directory with [server] endpoint",
        )
    return Endpoint("ipc", path=path)


def parse_listen(text: str, *, where: str = "") -> tuple[str, int]:
    """The host and the port, 0 to 65535, of "HOST:PORT". Pure. Raises `EndpointError`."""
    match = ADDRESS.fullmatch(text)
    if match is None or int(match["port"]) > 65535:
        raise EndpointError(
            f"{text!r} is no host and port", where=where, available="HOST:PORT, [ADDRESS]:PORT", hint="127.0.0.1:9309"
        )
    host = match["six"] or match["host"]
    return "" if host == "*" else host, int(match["port"])


def _parse_tcp(text: str, where: str) -> Endpoint:
    match = ADDRESS.fullmatch(text.removeprefix(_TCP))
    if match is None or not 1 <= int(match["port"]) <= 65535:
        raise EndpointError(
            f"{text!r} is no host and port",
            where=where,
            available="tcp://HOST:PORT, tcp://[ADDRESS]:PORT",
            hint="a server names the address that it listens at",
        )
    return Endpoint("tcp", host=match["six"] or match["host"], port=int(match["port"]))

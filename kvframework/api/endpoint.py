"""Addresses as text: those of servers, of `kvframework observe` and of a collector of spans; and `[observe]`."""

from __future__ import annotations

import os
import re
import socket
from typing import Annotated, Literal, NamedTuple
from urllib.parse import urlsplit

import msgspec

from kvframework.errors import ConfigFieldError, EndpointError

__all__ = ["Endpoint", "ObserveConfig", "collector_url", "parse_endpoint", "parse_listen", "try_bind"]

# The kernel takes 107, those of a suffix included.
MAX_SOCKET_PATH_BYTES = 100
ADDRESS = re.compile(r"(?:\[(?P<six>[0-9A-Fa-f:.%]+)\]|(?P<host>[A-Za-z0-9_.*-]+)):(?P<port>[0-9]{1,5})")

# Where collectors take spans.
DEFAULT_PATH = "/v1/traces"

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
    """Return the endpoint that `text` names. Pure. Raises `EndpointError`."""
    if text.startswith(_TCP):
        hint = "write the host and the port at which the server listens"
        return Endpoint(
            "tcp", "", *_host_and_port(text.removeprefix(_TCP), 1, where, "tcp://HOST:PORT, tcp://[ADDRESS]:PORT", hint)
        )
    path = text.removeprefix(_IPC)
    if path == text:
        raise EndpointError(f"{text!r} is not an endpoint", where=where, available="ipc:// or tcp://", hint=_HINT)
    # A relative path means another socket in every working directory; "@" would be a name without permissions.
    if not path.startswith("/") or path.endswith("/") or not path.isprintable():
        raise EndpointError(f"{path!r} is not an absolute socket path", where=where, hint=_HINT)
    size = len(os.fsencode(path))
    if size > MAX_SOCKET_PATH_BYTES:
        raise EndpointError(
            f"the socket path {path} has {size} bytes",
            where=where,
            available=f"at most {MAX_SOCKET_PATH_BYTES} bytes",
            hint="set [server] endpoint to a shorter path",
        )
    return Endpoint("ipc", path=path)


def parse_listen(text: str, *, where: str = "") -> tuple[str, int]:
    """Return host and port (0 to 65535) of "HOST:PORT". Pure. Raises `EndpointError`."""
    host, port = _host_and_port(text, 0, where, "HOST:PORT, [ADDRESS]:PORT", "127.0.0.1:9309")
    return "" if host == "*" else host, port


def try_bind(host: str | None, port: int) -> None:
    """Bind for a moment, without listening, which disturbs no other. None: any address. Blocking. Raises `OSError`."""
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    family, kind, protocol, _, place = found[0]
    with socket.socket(family, kind, protocol) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        probe.bind(place)


def _host_and_port(text: str, least: int, where: str, available: str, hint: str) -> tuple[str, int]:
    match = ADDRESS.fullmatch(text)
    if match is None or not least <= int(match["port"]) <= 65535:
        raise EndpointError(f"{text!r} is not a host and a port", where=where, available=available, hint=hint)
    return match["six"] or match["host"], int(match["port"])


class ObserveConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`[observe]`: the process of `kvframework observe` that the server starts, and starts again after its end. Without
    the table there is none. `listen` is HOST:PORT; port 0 is any free one, which the log names."""

    listen: Annotated[
        str,
        msgspec.Meta(min_length=1, description="`HOST:PORT` of metrics, health and web page; port 0: any free port"),
    ] = "127.0.0.1:9309"
    tls_cert: Annotated[str, msgspec.Meta(description="file of the TLS certificate chain; empty: plain HTTP")] = ""
    tls_key: Annotated[str, msgspec.Meta(description="file of the private key of `tls_cert`")] = ""
    token_file: Annotated[
        str,
        msgspec.Meta(description="file with the token of HTTP clients, read for each request; empty: no token"),
    ] = ""
    traces: Annotated[
        str,
        msgspec.Meta(description="URL of the OTLP/HTTP trace collector for spans of sampled requests; empty: no spans"),
    ] = ""


def collector_url(text: str, *, where: str = "") -> str:
    """The URL to which spans are sent: `text`, with `DEFAULT_PATH` if it has no path. Raises `ConfigFieldError`, also
    for a URL with a user or password, which would stand in the log."""
    try:
        parts = urlsplit(text)
        plain = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0 and text.isprintable()
    except ValueError:
        plain = False
    if not plain or parts.fragment or " " in text:
        raise ConfigFieldError(
            "`traces` is not the URL of a trace collector", where=where, hint='write traces = "http://127.0.0.1:4318"'
        )
    if parts.username is not None or parts.password is not None or parts.query:
        fact = "the URL in `traces` has a user, a password or a query, which may be secrets"
        hint = "send secrets in a header: set OTEL_EXPORTER_OTLP_HEADERS"
        raise ConfigFieldError(fact, where=where, hint=hint)
    return text if parts.path not in ("", "/") else f"{parts.scheme}://{parts.netloc}{DEFAULT_PATH}"

"""Requests and answers, and who may ask: the token of a request, and the host that it names. Pure but for the file of
the token.

What a process that answers HTTP is given: where it listens, its certificate, its token; and what is wrong with
these.
"""

from __future__ import annotations

import base64
import binascii
import errno
import hmac
import ipaddress
import ssl
from collections.abc import Awaitable, Callable, Iterator, Mapping
from http import HTTPStatus
from pathlib import Path
from typing import NamedTuple, Protocol, TypeAlias

from kvframework.api.endpoint import parse_listen, try_bind
from kvframework.errors import ConfigFieldError, EndpointError, KVFrameworkError

PLAIN = "text/plain; charset=utf-8"
JSON = "application/json"
HEADERS = (
    (
        "content-security-policy",
        (
            "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; "
            "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
        ),
    ),
    ("x-content-type-options", "nosniff"),
    ("referrer-policy", "no-referrer"),
    ("cache-control", "no-store"),
)
Answer: TypeAlias = "Reply | WantsBody | Awaitable[Reply]"
CHALLENGE = ("www-authenticate", 'Basic realm="kvframework", Bearer')


class Request(NamedTuple):
    """The head of a request. Names of headers are in lower case."""

    method: str
    target: str
    headers: Mapping[str, str] = {}


class Reply(NamedTuple):
    """An answer. The body of one to HEAD is not sent."""

    status: int
    type: str
    body: bytes
    headers: tuple[tuple[str, str], ...] = ()


class WantsBody(NamedTuple):
    """What a request is answered with whose head is in order: it has a body of `most` bytes at most, for `answer`."""

    most: int
    answer: Callable[[bytearray], Reply | Awaitable[Reply]]


def refused(status: HTTPStatus, *headers: tuple[str, str]) -> Reply:
    """An answer that says its status and nothing else."""
    return Reply(status, PLAIN, f"{status.phrase}\n".encode(), headers)


class Rights:
    """`token` reads the token of now, "" for none; it raises `OSError`. With `loopback`, names of other hosts are
    refused: a page of another site that resolves to this machine is no reader."""

    def __init__(self, token: Callable[[], str], *, loopback: bool) -> None:
        self._token = token
        self._loopback = loopback

    def is_here(self, request: Request) -> bool:
        """Whether the request names a host that this listener answers for."""
        return not self._loopback or is_loopback(_host(request))

    def is_allowed(self, request: Request) -> bool:
        """Whether the request has the token; no request has one that cannot be read."""
        try:
            token = self._token()
        except OSError:
            return False
        return not token or hmac.compare_digest(_given(request).encode(), token.encode())


def _given(request: Request) -> str:
    """The token of a request: a bearer's, or the password of a browser."""
    scheme, _, value = request.headers.get("authorization", "").partition(" ")
    if scheme.lower() == "bearer":
        return value.strip()
    if scheme.lower() == "basic":
        try:
            return base64.b64decode(value.strip(), validate=True).decode("utf-8", "replace").partition(":")[2]
        except (binascii.Error, ValueError):
            return ""
    return ""


def _host(request: Request) -> str:
    host = request.headers.get("host", "")
    name, colon, port = host.rpartition(":")
    return (name if colon and port.isdigit() else host).lower().strip("[]")


LOOPBACK_NAMES = ("localhost",)


class Listening(Protocol):
    """`listen` is HOST:PORT, the others are files or ""."""

    @property
    def listen(self) -> str: ...
    @property
    def tls_cert(self) -> str: ...
    @property
    def tls_key(self) -> str: ...
    @property
    def token_file(self) -> str: ...


def refusals(config: Listening, where: str, *, running: bool = False) -> Iterator[KVFrameworkError]:
    """Yield every error with which a listener would refuse to start; with `running`, its port may be that of one that
    runs. Creates nothing. Blocking: reads files, binds the port for a moment."""
    for check in (_check_files, _check_token):
        try:
            check(config, where)
        except KVFrameworkError as error:
            yield error
    try:
        check_port(config, where)
    except EndpointError as error:
        if not (running and isinstance(error.__cause__, OSError) and error.__cause__.errno == errno.EADDRINUSE):
            yield error


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches a listener at `host`."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host in LOOPBACK_NAMES


def tls_context(config: Listening) -> ssl.SSLContext | None:
    """The TLS side of the listener, None for plain HTTP. Raises `OSError` and `ssl.SSLError`."""
    if not config.tls_cert:
        return None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.set_alpn_protocols(["http/1.1"])
    context.load_cert_chain(config.tls_cert, config.tls_key)
    return context


def read_token(config: Listening) -> str:
    """The token of now; "" if none is asked for. Raises `OSError`, also of a file that holds none."""
    if not config.token_file:
        return ""
    token = Path(config.token_file).read_text(errors="replace").strip()
    if not token:
        raise OSError(errno.ENODATA, "the file of the token is empty", config.token_file)
    return token


def check_port(config: Listening, where: str) -> None:
    """Raise `EndpointError` for a port that cannot be bound."""
    host, port = parse_listen(config.listen, where=where)
    try:
        try_bind(host or None, port)
    except OSError as error:
        fact, hint = (
            f"the HTTP listener cannot use the address: {error.strerror or error}",
            "use an address of this machine and a free port",
        )
        raise EndpointError(fact, where=where or config.listen, hint=hint) from error


def _check_files(config: Listening, where: str) -> None:
    try:
        tls_context(config)
    except (OSError, ssl.SSLError) as error:
        raise ConfigFieldError(
            f"the TLS certificate and its key cannot be used: {getattr(error, 'strerror', '') or error}",
            where=where,
            available=f"tls_cert = {config.tls_cert}, tls_key = {config.tls_key}",
            hint="give PEM files of one certificate and its key that this user may read",
        ) from None


def _check_token(config: Listening, where: str) -> None:
    try:
        read_token(config)
    except OSError as error:
        raise ConfigFieldError(
            f"the token file {config.token_file} cannot be read: {error.strerror or error}",
            where=f"{where} token_file",
            hint="write the token on one line into the file, and let this user read the file",
        ) from None

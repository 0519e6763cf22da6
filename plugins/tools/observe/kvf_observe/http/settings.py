"""What a process that answers HTTP is given: where it listens, its certificate, its token; and what is wrong with
these."""

from __future__ import annotations

import errno
import ipaddress
import ssl
from collections.abc import Iterator
from pathlib import Path
from typing import Protocol

from kvframework.api.endpoint import parse_listen, try_bind
from kvframework.errors import ConfigFieldError, EndpointError, KVFrameworkError

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

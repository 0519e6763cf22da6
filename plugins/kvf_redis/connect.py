"""Owns how a connection is set up: URL, credentials, TLS and login by redis-py; what comes out is a `Wire`.

No error text, repr or chained exception of this module holds a password or the URL.
"""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
from typing import Any
from urllib.parse import urlsplit

from redis.connection import Connection, SSLConnection, UnixDomainSocketConnection, parse_url
from redis.exceptions import AuthenticationError, BusyLoadingError, RedisError, ResponseError
from redis.exceptions import ConnectionError as RedisConnectionError

from kvf_redis.options import RedisOptions
from kvf_redis.wire import Wire
from kvframework.errors import ConfigFieldError, TierError

# Of redis-py's pools and retries, or decided here; a URL shared with other programs may hold them.
_NOT_OURS = frozenset(
    (
        "decode_responses",
        "health_check_interval",
        "max_connections",
        "retry_on_error",
        "retry_on_timeout",
        "socket_connect_timeout",
        "socket_timeout",
        "timeout",
    )
)

_LONGEST_WAIT_S = 3600.0
_TOO_LATE = ("no answer before the deadline", "")
_URL_HINT = "percent-encode a password in it, or name an environment variable in password_env"


class Server:
    """Where the server is and how to log in. Immutable; `connect` may be called by several threads."""

    def __init__(self, options: RedisOptions, *, where: str) -> None:
        """Does not connect. Raises `ConfigFieldError` for a URL or a variable that is of no use."""
        settings = _settings(options, where)
        self._class: type[Any] = settings.pop("connection_class", Connection)
        self._settings = {name: value for name, value in settings.items() if name not in _NOT_OURS}
        self._settings["protocol"] = 2  # no pushed messages between replies
        self._where = where
        self._check_settings()

    def __repr__(self) -> str:
        return f"Server({self.location!r})"

    @property
    def location(self) -> str:
        """For error texts: host and port, or the socket's path."""
        if self._class is UnixDomainSocketConnection:
            return str(self._settings.get("path"))
        return f"{self._settings.get('host', 'localhost')}:{self._settings.get('port', 6379)}"

    def connect(self, deadline: float) -> Wire:
        """Connects and logs in; blocks until `deadline` at most, but for the resolver, which knows no deadline.

        Raises `TierError`.
        """
        remaining = min(deadline - time.monotonic(), _LONGEST_WAIT_S)
        if remaining <= 0:
            raise TierError("the deadline has passed", where=f"{self._where}: {self.location}")
        connection = self._class(socket_timeout=remaining, socket_connect_timeout=remaining, **self._settings)
        # redis-py grants the timeout to each step of the login; this grants it once.
        watchdog = threading.Timer(remaining, _cut, [connection])
        watchdog.daemon = True
        watchdog.start()
        try:
            connection.connect()
            if connection.can_read(timeout=0):
                failure = ("bytes came that nobody asked for", "")
            else:
                return Wire(connection._sock, connection.disconnect, vectored=self._class is not SSLConnection)
        except Exception as error:  # noqa: BLE001  redis-py's parser raises anything when the peer sends garbage
            failure = _explain(error) if time.monotonic() < deadline else _TOO_LATE
        finally:
            watchdog.cancel()
        connection.disconnect()
        fact, hint = failure
        raise TierError(f"cannot connect: {fact}", where=f"{self._where}: redis at {self.location}", hint=hint)

    def _check_settings(self) -> None:
        try:
            self._class(**self._settings)
        except (TypeError, ValueError, RedisError):
            pass
        else:
            return
        raise ConfigFieldError(
            "url has a parameter that redis-py does not accept", where=f"{self._where}.url", hint=_URL_HINT
        )


def _settings(options: RedisOptions, where: str) -> dict[str, Any]:
    settings: dict[str, Any] | None = None
    # urlsplit and redis-py quote parts of the URL in their errors, so these must not even become a context.
    with contextlib.suppress(ValueError):
        if not _is_ambiguous(options.url):
            settings = dict(parse_url(options.url))  # type: ignore[no-untyped-call]
    if settings is None:
        raise ConfigFieldError(
            "url is none that redis-py understands",
            where=f"{where}.url",
            available="redis://host:6379/0, rediss://host:6379/0, unix:///path/redis.sock?db=0",
            hint=_URL_HINT,
        )
    if options.username:
        settings["username"] = options.username
    if options.password_env:
        password = os.environ.get(options.password_env)
        if not password:
            raise ConfigFieldError(
                f"the environment variable {options.password_env} is not set or empty", where=f"{where}.password_env"
            )
        settings["password"] = password
    return settings


def _is_ambiguous(url: str) -> bool:
    """An "@" behind the host means that a password with "/", "?" or "#" in it was not percent-encoded."""
    parts = urlsplit(url)
    behind = parts.query + parts.fragment + ("" if parts.scheme == "unix" else parts.path)
    return "@" in behind


def _cut(connection: Any) -> None:
    sock = connection._sock
    if sock is not None:
        with contextlib.suppress(OSError):
            sock.shutdown(socket.SHUT_RDWR)


def _explain(error: BaseException) -> tuple[str, str]:
    """Fact and hint. The text of a server's error may repeat the password, so only its code is told."""
    if isinstance(error, AuthenticationError):
        return "the server refuses the user name or password", "check username, password_env and url"
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, TimeoutError):
            return _TOO_LATE
        if isinstance(cause, OSError) and cause.strerror:
            return cause.strerror, ""
        cause = cause.__cause__ or cause.__context__
    if isinstance(error, ResponseError):
        return "the server refuses the login or the database", "check username, password_env and db in url"
    if isinstance(error, BusyLoadingError):
        return "the server is loading its data", "it works once that is done"
    if isinstance(error, RedisConnectionError):
        return "the server closed or refused the connection", ""
    return f"no login as Redis knows it ({type(error).__name__})", "is url the address of a Redis server?"

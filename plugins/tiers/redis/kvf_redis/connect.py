"""Setup of connections: redis-py does TLS, login and topology requests; the result is a `Wire`.

No error text, repr or chained exception of this module holds a password or the URL.
"""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from redis.connection import SSLConnection
from redis.exceptions import AuthenticationError, BusyLoadingError, NoPermissionError, ResponseError
from redis.exceptions import ConnectionError as RedisConnectionError

from kvf_redis.resp import Place, Wire
from kvframework.errors import TierError

T = TypeVar("T")

_LONGEST_WAIT_S = 3600.0
_PAGE = "https://github.com/kvframework/kvframework/tree/main/plugins/tiers/redis/README.md#secured"
NO_RIGHT = f"give the Redis user the commands of the ACL line at {_PAGE}"
_TOO_LATE = ("the server did not answer before the deadline", "")


class NoAnswer(TierError):
    """A server sent nothing at all until the deadline."""


class Connector:
    """Login to any server of one kind. Immutable; its calls may come from several threads.

    Each call blocks until its deadline at most, except for the resolver, which takes no deadline. Calls raise
    `TierError`; a silent server raises `NoAnswer`.
    """

    def __init__(
        self,
        connection_class: type[Any],
        settings: Mapping[str, Any],
        password: Callable[[], str | bytes | None],
        *,
        where: str,
    ) -> None:
        """`settings` are keyword arguments of redis-py's `connection_class`, without place, password and timeouts."""
        self._class = connection_class
        self._settings = settings
        self._password = password
        self._where = where

    def __repr__(self) -> str:
        return f"Connector({self._class.__name__})"

    def connect(self, place: Place | None, deadline: float) -> Wire:
        """A new connection, logged in. `place` is None for a Unix socket, whose path is among the settings."""

        def wire(connection: Any) -> Wire | None:
            if connection.can_read(timeout=0):
                return None
            return Wire(connection._sock, connection.disconnect, vectored=self._class is not SSLConnection)

        connected = self._logged_in("cannot connect", place, deadline, wire, keep=True)
        if connected is None:
            raise TierError(
                "cannot connect: the server sent bytes that were not requested",
                where=self._place_text(place),
                hint="check that url is the address of a Redis server",
            )
        return connected

    def ask(self, place: Place | None, *words: str, read: Callable[[Any], T], deadline: float) -> T:
        """Send a command over a separate connection; return `read` of the reply."""

        def reply(connection: Any) -> T:
            connection.send_command(*words)
            return read(connection.read_response())

        return self._logged_in(f"the query {' '.join(words)} failed", place, deadline, reply, keep=False)

    def _logged_in(
        self, failure: str, place: Place | None, deadline: float, use: Callable[[Any], T], *, keep: bool
    ) -> T:
        """Log in and call `use` with the connection, which stays open if `keep` is set and `use` returned something.
        `failure` begins an error's text."""
        remaining = min(deadline - time.monotonic(), _LONGEST_WAIT_S)
        if remaining <= 0:
            raise TierError("the call's deadline has passed", where=self._place_text(place))
        settings = {**self._settings, "password": self._password()}
        if place is not None:
            settings.update(place._asdict())
        connection = self._class(socket_timeout=remaining, socket_connect_timeout=remaining, **settings)
        # redis-py grants the timeout to each step; this grants it once.
        watchdog = threading.Timer(remaining, _cut, [connection])
        watchdog.daemon = True
        watchdog.start()
        result = None
        try:
            connection.connect()
            result = use(connection)
        except Exception as error:  # noqa: BLE001  redis-py's parser raises anything when the peer sends garbage
            fact, hint = _explain(error) if time.monotonic() < deadline else _TOO_LATE
        else:
            return result
        finally:
            watchdog.cancel()
            if result is None or not keep:
                connection.disconnect()
        kind = NoAnswer if (fact, hint) == _TOO_LATE else TierError
        raise kind(f"{failure}: {fact}", where=self._place_text(place), hint=hint)

    def _place_text(self, place: Place | None) -> str:
        return f"{self._where}: redis at {place or self._settings.get('path')}"


def _cut(connection: Any) -> None:
    sock = connection._sock
    if sock is not None:
        with contextlib.suppress(OSError):
            sock.shutdown(socket.SHUT_RDWR)


def _explain(error: BaseException) -> tuple[str, str]:
    """Fact and hint. The text of a server's error may repeat the password, so only its kind is reported."""
    if isinstance(error, AuthenticationError):
        return "the server refuses the user name or password", "check username, password_env, password_file and url"
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, TimeoutError):
            return _TOO_LATE
        if isinstance(cause, OSError) and cause.strerror:
            return cause.strerror, ""
        cause = cause.__cause__ or cause.__context__
    if isinstance(error, NoPermissionError):
        return "the Redis user may not run the command", NO_RIGHT
    if isinstance(error, BusyLoadingError):
        return "the server is loading its data", "the tier works once the data is loaded"
    if isinstance(error, ResponseError):
        return (
            "the server refuses the login, the database or the command",
            "check username, the password, db in url, and topology",
        )
    if isinstance(error, RedisConnectionError):
        return "the server closed or refused the connection", ""
    return (
        f"the server's answer is not Redis's protocol ({type(error).__name__})",
        "check that url is the address of a Redis server",
    )


def rebuilt(error: TierError) -> TierError:
    """The same error, without traceback and context."""
    return type(error)(error.fact, where=error.where, hint=error.hint)


class Sentinels:
    """Asks the sentinel first that answered last. Thread-safe; holds no connection."""

    def __init__(
        self, sentinels: Connector, places: tuple[Place, ...], servers: Connector, *, master_name: str, where: str
    ) -> None:
        self._sentinels = sentinels
        self._places = places
        self._servers = servers
        self._master_name = master_name
        self._where = where

    def connect(self, deadline: float) -> Wire:
        """A connection to the master; blocks until `deadline` at most. Raises `TierError`."""
        return self._servers.connect(self.master(deadline), deadline)

    def master(self, deadline: float) -> Place:
        """The address of the master according to the sentinels. A silent sentinel costs its share of the time. Raises
        `TierError`."""
        failure = None
        places = self._places
        for index, place in enumerate(places):
            now = time.monotonic()
            share = now + (deadline - now) / (len(places) - index + 1)  # the last share is for the master
            try:
                found = self._sentinels.ask(
                    place, "SENTINEL", "GET-MASTER-ADDR-BY-NAME", self._master_name, read=_address, deadline=share
                )
            except TierError as error:
                failure = rebuilt(error)
                continue
            if found is not None:
                self._places = (place, *(each for each in places if each != place))
                return found
            failure = TierError(
                f"the sentinel does not know the master {self._master_name!r}",
                where=f"{self._where}: sentinel at {place}",
                hint="set master_name to the name in `sentinel monitor NAME ...`",
            )
        assert failure is not None, "no sentinel is configured"
        raise failure


def _address(reply: Any) -> Place | None:
    if reply is None:
        return None
    host, port = reply
    return Place(host.decode(), int(port))

"""The options, checked once and turned into addresses and connectors. Connects to nothing.

No error text, repr or chained exception of this module holds a password or the URL.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from redis.connection import Connection, SSLConnection, UnixDomainSocketConnection, parse_url
from redis.exceptions import RedisError

from kvf_redis import RedisOptions
from kvf_redis.connect import Connector
from kvf_redis.resp import Place
from kvframework.errors import ConfigFieldError, TierError

# URL options that are passed over: they belong to redis-py's pools and retries or are decided here, and a URL shared
# with other programs may hold them.
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
_TLS_NAMES = {"tls_ca": "ssl_ca_certs", "tls_cert": "ssl_certfile", "tls_key": "ssl_keyfile"}
_PORT, _SENTINEL_PORT = 6379, 26379
_URL_HINT = "write redis://HOST:PORT/DB; percent-encode a password in url, or set password_env"


@dataclass(frozen=True)
class Settings:
    """Checked options. `places` are the server, the nodes of the cluster or the sentinels to ask first; () for a Unix
    socket at `path`. `sentinels` is set for that topology only."""

    connector: Connector
    places: tuple[Place, ...]
    path: str = ""
    sentinels: Connector | None = None


def read_settings(options: RedisOptions, *, where: str) -> Settings:
    """Check the options. Raises `ConfigFieldError` for options that contradict each other or name something that does
    not exist."""
    problem = next(_contradictions(options), None)
    if problem is not None:
        field, fact, hint = problem
        raise ConfigFieldError(fact, where=f"{where}.{field}", hint=hint)
    url = _parsed_url(options, where)
    connection_class: type[Any] = url.pop("connection_class", Connection)
    settings = {name: value for name, value in url.items() if name not in _NOT_OURS}
    settings["protocol"] = 2  # no pushed messages between replies
    password = _password(options, settings.pop("password", None), where)
    if options.username:
        settings["username"] = options.username
    if connection_class is SSLConnection:
        _add_tls(options, settings, where)
    elif _given_tls(options):
        raise ConfigFieldError(
            "the TLS options need a url with TLS",
            where=f"{where}.{_given_tls(options)[0]}",
            hint="write rediss:// in url",
        )
    _check(connection_class, settings, where)
    connector = Connector(connection_class, settings, password, where=where)
    if connection_class is UnixDomainSocketConnection:
        if options.topology != "single":
            raise ConfigFieldError(
                f"topology {options.topology} needs addresses, not a Unix socket",
                where=f"{where}.url",
                hint="give redis://host:port or rediss://host:port",
            )
        return Settings(connector, (), path=str(settings.get("path")))
    port = settings.pop("port", _SENTINEL_PORT if options.topology == "sentinel" else _PORT)
    places = (Place(settings.pop("host", "localhost"), port), *_nodes(options, where))
    if options.topology == "cluster" and settings.get("db"):
        raise ConfigFieldError("a cluster has only database 0", where=f"{where}.url", hint="leave out the database")
    sentinels = None
    if options.topology == "sentinel":
        plain = {name: value for name, value in settings.items() if name not in ("db", "username")}
        secret = _from_environment(options.sentinel_password_env, f"{where}.sentinel_password_env")
        sentinels = Connector(connection_class, plain, secret, where=f"{where}: sentinel")
    return Settings(connector, tuple(dict.fromkeys(places)), sentinels=sentinels)


def _contradictions(options: RedisOptions) -> Iterator[tuple[str, str, str]]:
    """Field, fact and hint of each pair of options that exclude each other."""
    if options.topology == "single" and options.nodes:
        yield "nodes", "nodes is set, but topology is a single server", 'set topology = "cluster" or "sentinel"'
    if options.topology == "sentinel" and not options.master_name:
        yield (
            "master_name",
            "topology sentinel needs the name of the master",
            "set master_name as in `sentinel monitor NAME ...`",
        )
    if options.topology != "sentinel":
        for field in ("master_name", "sentinel_password_env"):
            if getattr(options, field):
                yield field, f"topology {options.topology} does not use sentinels", 'set topology = "sentinel"'
    if options.password_env and options.password_file:
        yield "password_file", "password_env and password_file are both set", "leave out one of the two"
    if bool(options.tls_cert) != bool(options.tls_key):
        missing = "tls_key" if options.tls_cert else "tls_cert"
        yield missing, "tls_cert and tls_key need each other", "set both tls_cert and tls_key"


def _parsed_url(options: RedisOptions, where: str) -> dict[str, Any]:
    # urlsplit and redis-py quote parts of the URL in their errors, so these must not even become a context.
    with contextlib.suppress(ValueError):
        if not _is_ambiguous(options.url):
            return dict(parse_url(options.url))  # type: ignore[no-untyped-call]
    raise ConfigFieldError(
        "redis-py does not understand url",
        where=f"{where}.url",
        available="redis://host:6379/0, rediss://host:6379/0, unix:///path/redis.sock?db=0",
        hint=_URL_HINT,
    )


def _is_ambiguous(url: str) -> bool:
    """True for an "@" behind the host: a password with "/", "?" or "#" in it was not percent-encoded."""
    parts = urlsplit(url)
    behind = parts.query + parts.fragment + ("" if parts.scheme == "unix" else parts.path)
    return "@" in behind


def _nodes(options: RedisOptions, where: str) -> Iterator[Place]:
    for index, text in enumerate(options.nodes):
        place = Place.parse(text)
        if place is None:
            # not shown: it may contain a password
            raise ConfigFieldError(
                f"node {index + 1} is not an address",
                where=f"{where}.nodes",
                available='"host:port", "[IPv6]:port"',
                hint="write scheme, user, password and database into url",
            )
        yield place


def _password(options: RedisOptions, in_url: str | None, where: str) -> Callable[[], str | bytes | None]:
    """A function that reads the password for each connection; it is tried once here, so that a mistake is reported at
    the start."""
    if options.password_file:
        read = _FromFile(options.password_file, f"{where}.password_file")
        problem = ""
        try:
            read()
        except TierError as error:
            problem = error.fact
        if problem:
            raise ConfigFieldError(problem, where=read.where, hint="let the server's user read the file")
        return read
    if options.password_env:
        return _from_environment(options.password_env, f"{where}.password_env")
    return lambda: in_url


def _from_environment(name: str, where: str) -> Callable[[], str | None]:
    if not name:
        return lambda: None
    password = os.environ.get(name)
    if not password:
        raise ConfigFieldError(f"the environment variable {name} is not set or empty", where=where)
    return lambda: password


class _FromFile:
    def __init__(self, path: str, where: str) -> None:
        self.path = path
        self.where = where

    def __call__(self) -> bytes:
        problem = "the file contains no password"
        try:
            with open(self.path, "rb") as file:
                password = file.read(1 << 16).rstrip(b"\r\n")
            if password:
                return password
        except OSError as error:
            problem = f"the file cannot be read: {error.strerror}"
        raise TierError(problem, where=self.where)


def _given_tls(options: RedisOptions) -> list[str]:
    return [field for field in _TLS_NAMES if getattr(options, field)]


def _add_tls(options: RedisOptions, settings: dict[str, Any], where: str) -> None:
    for field in _given_tls(options):
        path = getattr(options, field)
        if _TLS_NAMES[field] in settings:
            raise ConfigFieldError(
                f"url already sets {_TLS_NAMES[field]}", where=f"{where}.{field}", hint="leave out one of the two"
            )
        problem = ""
        try:
            with open(path, "rb"):
                pass
        except OSError as error:
            problem = error.strerror or type(error).__name__
        if problem:
            raise ConfigFieldError(f"{path} cannot be read: {problem}", where=f"{where}.{field}")
        settings[_TLS_NAMES[field]] = path
    # redis-py 5 compares host names only if asked to
    settings.setdefault("ssl_check_hostname", settings.get("ssl_cert_reqs") != "none")


def _check(connection_class: type[Any], settings: dict[str, Any], where: str) -> None:
    try:
        connection_class(**settings)
    except (TypeError, ValueError, RedisError):
        pass
    else:
        return
    raise ConfigFieldError("url has a parameter that redis-py does not accept", where=f"{where}.url", hint=_URL_HINT)

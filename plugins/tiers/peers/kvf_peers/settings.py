"""The options, checked once and turned into addresses, TLS contexts and the token's reader. Connects to nothing."""

from __future__ import annotations

import ipaddress
import logging
import os
import re
import ssl
import stat
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from kvf_peers import PeersOptions
from kvframework.api.process import LogLimit
from kvframework.errors import ConfigFieldError

log = logging.getLogger(__name__)

_LEAST_TOKEN_BYTES, _MOST_TOKEN_BYTES = 16, 4096
_ADDRESS = re.compile(r"(?:\[(?P<six>[0-9A-Fa-f:.%]+)\]|(?P<host>[A-Za-z0-9_.-]+)):(?P<port>[0-9]{1,5})")


class Address(NamedTuple):
    """Where a node listens."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    @property
    def is_loopback(self) -> bool:
        try:
            return ipaddress.ip_address(self.host.partition("%")[0]).is_loopback
        except ValueError:
            return self.host == "localhost"


@dataclass(frozen=True)
class Settings:
    """Checked options. `tls` is None without TLS."""

    options: PeersOptions
    where: str
    peers: tuple[Address, ...]
    listen: Address | None
    tls: Tls | None

    def token(self) -> bytes:
        """The token of now. Raises `ConfigFieldError`."""
        return _token(self.options.token_file, self.where)


def read_settings(options: PeersOptions, *, where: str) -> Settings:
    """Check the options. Raises `ConfigFieldError`."""
    peers = tuple(_address(each, f"{where} peers") for each in options.peers)
    listen = _address(options.listen, f"{where} listen") if options.listen else None
    if not peers and listen is None:
        raise ConfigFieldError("peers and listen are both empty", where=where, hint="set peers to the other nodes")
    tls = _tls(options, where)
    _check_network(options, where, (*peers, *((listen,) if listen else ())), has_tls=tls is not None)
    settings = Settings(options, where, peers, listen, tls)
    settings.token()
    return settings


def parse_address(text: str) -> Address:
    """Raise `ValueError`."""
    match = _ADDRESS.fullmatch(text)
    if match is None or not 1 <= int(match["port"]) <= 65535:
        raise ValueError(f"{text!r} is not HOST:PORT")
    return Address(match["six"] or match["host"], int(match["port"]))


def _address(text: str, where: str) -> Address:
    try:
        return parse_address(text)
    except ValueError as error:
        raise ConfigFieldError(str(error), where=where, hint='write "10.0.0.7:9311"') from None


def _check_network(options: PeersOptions, where: str, used: tuple[Address, ...], *, has_tls: bool) -> None:
    outside = next((each for each in used if not each.is_loopback), None)
    if outside and not has_tls and not options.trusted_network:
        raise ConfigFieldError(
            f"without TLS, KV would be sent to and from {outside} without encryption",
            where=where,
            hint="set tls_ca, tls_cert and tls_key; or trusted_network = true if the network has only nodes",
        )


class Tls:
    """The TLS contexts of both directions. Each connection reads the files; as long as they cannot be used it gets the
    contexts of the one before."""

    def __init__(self, options: PeersOptions, where: str) -> None:
        """Raise `ConfigFieldError`."""
        self._options = options
        self._where = where
        self._made = self._contexts()
        self._once = LogLimit.once()

    def contexts(self) -> tuple[ssl.SSLContext, ssl.SSLContext]:
        try:
            self._made = self._contexts()
        except ConfigFieldError as error:
            if self._once.passes(str(error)):
                log.error("%s; the former TLS files stay in use", error)
        return self._made

    def _contexts(self) -> tuple[ssl.SSLContext, ssl.SSLContext]:
        contexts = (ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT), ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER))
        for context in contexts:
            context.minimum_version = ssl.TLSVersion.TLSv1_3
            context.verify_mode = ssl.CERT_REQUIRED
            try:
                context.load_verify_locations(self._options.tls_ca)
                context.load_cert_chain(self._options.tls_cert, self._options.tls_key, password="")  # never asked for
            except (OSError, ssl.SSLError) as error:
                raise ConfigFieldError(
                    f"the TLS files cannot be used: {error.strerror or error}",
                    where=f"{self._where} tls_ca, tls_cert, tls_key",
                ) from None
        return contexts


def _tls(options: PeersOptions, where: str) -> Tls | None:
    files = {name: getattr(options, name) for name in ("tls_ca", "tls_cert", "tls_key")}
    lacking = [name for name, file in files.items() if not file]
    if len(lacking) == len(files):
        return None
    if lacking:
        raise ConfigFieldError(
            f"{lacking[0]} is missing: TLS needs tls_ca, tls_cert and tls_key",
            where=f"{where} {lacking[0]}",
            available=", ".join(files),
        )
    return Tls(options, where)


def _token(file: str, where: str) -> bytes:
    path = Path(os.path.expanduser(file))
    place = f"{where} token_file"
    new = f"make the file on one node, and copy it to all nodes: (umask 077; openssl rand -hex 32 > {path})"
    try:
        with path.open("rb") as opened:
            mode = os.fstat(opened.fileno()).st_mode
            token = opened.read(_MOST_TOKEN_BYTES + 1).strip()
    except OSError as error:
        hint = new if isinstance(error, FileNotFoundError) else "let the server's user read the file"
        raise ConfigFieldError(f"{path} cannot be read: {error.strerror}", where=place, hint=hint) from None
    if mode & stat.S_IRWXO:
        raise ConfigFieldError(f"other users may read or write {path}", where=place, hint=f"chmod o-rwx {path}")
    if not _LEAST_TOKEN_BYTES <= len(token) <= _MOST_TOKEN_BYTES:
        raise ConfigFieldError(
            f"the token has {len(token)} bytes",
            where=place,
            available=f"{_LEAST_TOKEN_BYTES} to {_MOST_TOKEN_BYTES}",
            hint=new,
        )
    return token

"""CURVE keys: their files, the clients that a server admits, and the options of sockets. For server, client and CLI.

A key file is one line: `curve-secret KEY` or `curve-public KEY`, the key in ZeroMQ's printable form of 40 characters.
Not `zmq.auth.certs`: its files hold both keys, and it neither makes nor checks who may read them."""

from __future__ import annotations

import logging
import os
import stat
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import zmq
from zmq.utils import z85

from kvframework.api.endpoint import parse_endpoint
from kvframework.errors import CurveKeyError

logger = logging.getLogger(__name__)

PUBLIC_SUFFIX = ".public"
ZAP_DOMAIN = b"kvframework"
_PUBLIC, _SECRET = "curve-public", "curve-secret"
_KEY_CHARACTERS = 40
_MAX_FILE_BYTES = 4096
LOOK_AGAIN_S = 0.5
_ZAP_ADDRESS = "inproc://zeromq.zap.01"
_ZAP_VERSION = b"1.0"
_ZAP_PER_ROUND = 64
SECRET_VARIABLE = "KVFRAMEWORK_CURVE_SECRET"  # noqa: S105 - a name
SERVER_VARIABLE = "KVFRAMEWORK_CURVE_SERVER"


class AdmittedClients:
    """The clients whose public keys lie in a directory, one `*.public` file each. An added or removed file takes effect
    at the next handshake. Raises `CurveKeyError` if the directory or a file is unusable at the start, or others may add
    files; later problems are logged, and the bad file admits no client. Not thread-safe."""

    def __init__(self, directory: Path, clock: Callable[[], float] = time.monotonic) -> None:
        self._directory = directory
        self._clock = clock
        try:
            _check_not_writable(directory)
            self._names = self._read(directory.stat().st_mtime_ns, strict=True)
        except OSError as error:
            fact = f"the directory of client keys cannot be read: {error.strerror}"
            raise CurveKeyError(fact, where=str(directory), hint="make keys with: kvframework keys new DIR") from None

    def name_of(self, key: bytes) -> str | None:
        """Return the file's name for a raw public key, None for an unknown key. Rescans when the directory's mtime
        changes, and after `LOOK_AGAIN_S`."""
        try:
            changed_at = self._directory.stat().st_mtime_ns
            if changed_at != self._seen or self._clock() >= self._look_again_at:
                self._names = self._read(changed_at)
        except OSError as error:
            logger.error("the directory of client keys %s can no longer be read: %s", self._directory, error.strerror)
            return None
        return self._names.get(key)

    def _read(self, changed_at: int, *, strict: bool = False) -> dict[bytes, str]:
        self._seen, self._look_again_at = changed_at, self._clock() + LOOK_AGAIN_S
        names = {}
        for name in sorted(os.listdir(self._directory)):
            path = self._directory / name
            if path.suffix != PUBLIC_SUFFIX:
                continue
            try:
                names[z85.decode(read_public(path))] = path.stem
            except CurveKeyError as error:
                if strict:
                    raise
                logger.error("a client key is ignored: %s", error)
        return names


class ZapHandler:
    """What libzmq asks at every CURVE handshake: admits the clients whose keys are listed. Must be made before the
    socket that it guards, and closed after it. Not `zmq.auth`, which needs a thread or a loop, and reads keys once."""

    def __init__(self, context: zmq.Context[Any], admitted: AdmittedClients, counters: dict[str, int]) -> None:
        self._admitted = admitted
        self._counters = counters
        self.socket: zmq.Socket[bytes] = context.socket(zmq.REP)
        self.socket.setsockopt(zmq.LINGER, 0)
        self.socket.bind(_ZAP_ADDRESS)

    def serve(self) -> None:
        """Answer the waiting requests, a bounded number. Never blocks."""
        for _ in range(_ZAP_PER_ROUND):
            try:
                frames = self.socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            self.socket.send_multipart(self._decide(frames))

    def close(self) -> None:
        self.socket.close(0)

    def _decide(self, frames: list[bytes]) -> list[bytes]:
        request_id = frames[1] if len(frames) > 1 else b""
        name = None
        if len(frames) == 7 and frames[0] == _ZAP_VERSION and frames[5] == b"CURVE":
            name = self._admitted.name_of(frames[6])
        if name is None:
            self._counters["curve_refused"] += 1
            where = frames[3].decode("ascii", "replace") if len(frames) > 3 else "?"
            logger.warning("refused a client at %s, whose public key is not admitted", where)
            return [_ZAP_VERSION, request_id, b"400", b"not admitted", b"", b""]
        return [_ZAP_VERSION, request_id, b"200", b"", name.encode()[:255], b""]


@dataclass(frozen=True)
class ServerKeys:
    """A server's identity and the clients that it admits. `load` raises `CurveKeyError`."""

    secret: bytes = field(repr=False)
    admitted: AdmittedClients

    @classmethod
    def load(cls, secret_key: Path, clients: Path) -> ServerKeys:
        return cls(read_secret(secret_key), AdmittedClients(clients))

    def apply(self, router: zmq.Socket[Any]) -> None:
        """Set the options before binding; the ZAP handler must exist already."""
        router.setsockopt(zmq.ZAP_DOMAIN, ZAP_DOMAIN)
        router.setsockopt(zmq.CURVE_SERVER, 1)
        router.setsockopt(zmq.CURVE_SECRETKEY, self.secret)


@dataclass(frozen=True)
class CurveKeys:
    """The files of a client over tcp://: the server's public key and this client's secret one."""

    server_public: Path
    client_secret: Path

    def load(self) -> LoadedKeys:
        """Read the files. Blocking. Raises `CurveKeyError`."""
        secret = read_secret(Path(self.client_secret))
        return LoadedKeys(read_public(Path(self.server_public)), secret)


@dataclass(frozen=True)
class LoadedKeys:
    """The keys of a client's socket."""

    server: bytes
    secret: bytes = field(repr=False)

    def apply(self, dealer: zmq.Socket[Any]) -> None:
        """Set the options before connecting."""
        dealer.setsockopt(zmq.CURVE_SERVERKEY, self.server)
        dealer.setsockopt(zmq.CURVE_SECRETKEY, self.secret)
        dealer.setsockopt(zmq.CURVE_PUBLICKEY, zmq.curve_public(self.secret))


def keys_for(endpoint: str, given: CurveKeys | None, environ: Mapping[str, str] = os.environ) -> LoadedKeys | None:
    """Return the keys for a connection to `endpoint`: those given, else those that the environment names; None for a
    server of this node. Blocking. Raises `EndpointError` and `CurveKeyError`."""
    if parse_endpoint(endpoint, where="endpoint").kind == "ipc":
        return None
    if given is not None:
        return given.load()
    server, secret = environ.get(SERVER_VARIABLE, ""), environ.get(SECRET_VARIABLE, "")
    if not server and not secret:
        logger.warning("the connection to %s has no CURVE keys, so anyone on the network can read it", endpoint)
        return None
    if not server or not secret:
        hint = f"set {SERVER_VARIABLE} to the server's public key file and {SECRET_VARIABLE} to your secret key file"
        raise CurveKeyError(f"{SECRET_VARIABLE if server else SERVER_VARIABLE} is not set", where=endpoint, hint=hint)
    return CurveKeys(Path(server), Path(secret)).load()


def read_public(path: Path) -> bytes:
    """Read a public key in printable form. Raises `CurveKeyError`."""
    return _read(path, _PUBLIC)


def read_secret(path: Path) -> bytes:
    """Read a secret key in printable form. Raises `CurveKeyError`, also if users other than the owner have access."""
    return _read(path, _SECRET)


def write_curve_pair(secret_path: Path, public_path: Path) -> None:
    """Make a new pair: the secret file is for its owner only. Raises `CurveKeyError`; never replaces a file."""
    public, secret = zmq.curve_keypair()
    _write(secret_path, f"{_SECRET} {secret.decode()}\n", 0o600)
    _write(public_path, f"{_PUBLIC} {public.decode()}\n", 0o644)


def _check_not_writable(directory: Path) -> None:
    """Check the directory: a user who may add a file there admits any client. Raises `CurveKeyError` and `OSError`."""
    mode = directory.stat().st_mode
    read_only = os.statvfs(directory).f_flag & os.ST_RDONLY  # such as a secret that is mounted into a container
    if mode & 0o022 and not read_only:
        raise CurveKeyError(
            f"other users may add keys: {stat.filemode(mode)}", where=str(directory), hint=f"chmod 700 {directory}"
        )


def _read(path: Path, kind: str) -> bytes:
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        with open(fd, "rb") as file:
            status = os.fstat(fd)
            if not stat.S_ISREG(status.st_mode):
                raise CurveKeyError("the path is not a file", where=str(path))
            if kind == _SECRET and status.st_mode & 0o077:
                fact = f"other users may use the secret key: {stat.filemode(status.st_mode)}"
                hint = f"chmod 600 {path}, and make a new key pair if other users may have read the file"
                raise CurveKeyError(fact, where=str(path), hint=hint)
            words = file.read(_MAX_FILE_BYTES).split()
    except OSError as error:
        raise CurveKeyError(
            f"cannot be read: {error.strerror}", where=str(path), hint="make keys with: kvframework keys new DIR"
        ) from None
    if len(words) != 2 or words[0] not in (_PUBLIC.encode(), _SECRET.encode()) or not _is_key(words[1]):
        raise CurveKeyError("the file has no CURVE key", where=str(path), available=f"{kind} and 40 characters")
    if words[0] != kind.encode():
        raise CurveKeyError(f"this is a {words[0].decode()} file", where=str(path), available=f"a {kind} file")
    return words[1]


def _is_key(text: bytes) -> bool:
    if len(text) != _KEY_CHARACTERS:
        return False
    try:
        return bool(zmq.curve_public(text))  # decodes it, whichever kind it is
    except (ValueError, zmq.ZMQError):
        return False


def _write(path: Path, text: str, mode: int) -> None:
    try:
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode)
    except FileExistsError:
        raise CurveKeyError("the file exists", where=str(path), hint="move the file, or choose another path") from None
    except OSError as error:
        raise CurveKeyError(f"the key file cannot be made: {error.strerror}", where=str(path)) from None
    with open(fd, "w") as file:
        file.write(text)

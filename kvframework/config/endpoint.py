"""Endpoints: the addresses of a server, and the checks that the directory of its sockets is private."""

from __future__ import annotations

import contextlib
import os
import stat
import tempfile
from collections.abc import Mapping
from pathlib import Path

from kvframework.api.endpoint import parse_endpoint
from kvframework.errors import EndpointError
from kvframework.keeper.sd_notify import KEEPER_VARIABLE

# Beside the server's socket: the liveness socket, and the new path of the socket itself while the server takes no
# client (connected clients stay, and new ones get the reason).
LIVENESS_SUFFIX = ".live"
FULL_SUFFIX = ".full"

# Names the user whose server a client trusts, if that is another one than its own.
SERVER_UID_VARIABLE = "KVFRAMEWORK_SERVER_UID"
MAX_UID = (1 << 32) - 2  # the last one means "no change" to the kernel


def keeper_path(endpoint: str, environ: Mapping[str, str] = os.environ) -> str:
    """The beginning of the paths of an endpoint's `kvframework hold`; "": the default one. Raises `EndpointError`."""
    parsed = parse_endpoint(endpoint or default_endpoint())
    if directory := environ.get(KEEPER_VARIABLE, ""):
        return str(Path(directory, "server"))
    return parsed.path if parsed.kind == "ipc" else str(default_directory() / f"tcp-{parsed.port}")


def default_directory(environ: Mapping[str, str] = os.environ) -> Path:
    """The directory of the default endpoint, the same for all processes of a user and environment; not created here."""
    runtime = environ.get("XDG_RUNTIME_DIR", "")
    if os.path.isabs(runtime):
        with contextlib.suppress(OSError):
            status = os.stat(runtime)
            if stat.S_ISDIR(status.st_mode) and status.st_uid == os.getuid():
                return Path(runtime, "kvframework")
    try:
        temporary = tempfile.gettempdir()
    except FileNotFoundError:  # a read-only root, as of a container: a server that needs the directory says so
        temporary = "/tmp"  # noqa: S108
    return Path(temporary, f"kvframework-{os.getuid()}")


def default_endpoint(environ: Mapping[str, str] = os.environ) -> str:
    return f"ipc://{default_directory(environ)}/server.sock"


def prepare_private_directory(path: Path, *, shared: bool = False) -> None:
    """Create the directory of a server's sockets (0700; 0711 if `shared` with others), or check an existing one.

    Refused: a symbolic link, another user's directory, one that group or others may write to; of the default directory
    also one that they may enter, and any sharing; a shared one that they may not. Raises `EndpointError`. Blocking."""
    _check_shared(path, shared)
    try:
        made = not path.exists()
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        check_private_directory(path)
        if shared and made:
            path.chmod(0o711)
    except OSError as error:
        raise EndpointError(
            f"the directory cannot be made: {error.strerror or error}", where=str(path), hint="set [server] endpoint"
        ) from None


def check_directory(path: Path, *, shared: bool = False) -> None:
    """Refuse what `prepare_private_directory` would refuse, and create nothing. Raises `EndpointError`. Blocking."""
    _check_shared(path, shared)
    try:
        check_private_directory(path)
        place, missing = path, False
    except OSError:
        place, missing = next((each for each in path.parents if each.exists()), Path("/")), True
    if not place.is_dir() or not os.access(place, os.W_OK | os.X_OK):
        fact = f"this user may not create the directory in {place}" if missing else "this user may not write there"
        raise EndpointError(fact, where=str(path), hint="create the directory with mode 0700, or set [server] endpoint")


def check_private_directory(path: Path, *, owner: int | None = None) -> None:
    """Check the directory, in server and client: any user who may write there can replace the server. Refuses the
    directories that `prepare_private_directory` refuses; `owner` is the user that may have it, None: this process's.
    Raises `EndpointError`, and `OSError` if there is none. Blocking."""
    owner = os.getuid() if owner is None else owner
    status = path.lstat()
    if stat.S_ISLNK(status.st_mode):
        raise EndpointError("the directory is a symbolic link", where=str(path), hint="name the real directory")
    if status.st_uid != owner:
        raise EndpointError(
            f"the directory belongs to uid {status.st_uid}, not to {owner}",
            where=str(path),
            hint=f"for a server: set [server] endpoint to a directory of uid {owner}; for a client, if the server has"
            f" uid {status.st_uid}: set {SERVER_UID_VARIABLE}={status.st_uid}",
        )
    forbidden = 0o077 if path == default_directory() else 0o022
    if status.st_mode & forbidden:
        may = "use" if forbidden == 0o077 else "write to"
        raise EndpointError(
            f"other users may {may} the directory: {stat.filemode(status.st_mode)}",
            where=str(path),
            hint=f"chmod 700 {path}",
        )


def trusted_server_uid(environ: Mapping[str, str] = os.environ) -> int:
    """The user whose server a client of this process trusts: this user, or the one that `KVFRAMEWORK_SERVER_UID`
    names. Raises `EndpointError` for text that is not a user id."""
    named = environ.get(SERVER_UID_VARIABLE, "")
    if not named:
        return os.getuid()
    if not (named.isascii() and named.isdigit() and int(named) <= MAX_UID):
        raise EndpointError(
            f"{named[:60]!r} is not a user id",
            where=SERVER_UID_VARIABLE,
            available=f"0 to {MAX_UID}",
            hint="see `id -u`",
        )
    return int(named)


def _check_shared(path: Path, shared: bool) -> None:
    if not shared:
        return
    if path == default_directory():
        fact = "the default directory is private, but [server] admit_uids names other users"
        hint = "set [server] endpoint to a socket in another directory, such as ipc:///run/kvframework/server.sock"
        raise EndpointError(fact, where=str(path), hint=hint)
    if path.exists() and not path.stat().st_mode & 0o011:
        raise EndpointError(
            "the users of [server] admit_uids may not enter the directory", where=str(path), hint=f"chmod 711 {path}"
        )

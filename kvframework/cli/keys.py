"""`kvframework keys`: the CURVE keys by which a server and its clients on other hosts authenticate each other."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from kvframework.api.command import QuickGroup, examples
from kvframework.errors import ConfigFieldError

SECRET_SUFFIX = ".secret"  # noqa: S105 - a file name
SERVER, CLIENTS = "server", "clients"

_app = typer.Typer(cls=QuickGroup, help="CURVE keys, for servers at tcp:// endpoints.", no_args_is_help=True)
_Directory = Annotated[Path, typer.Argument(metavar="DIR", help="The directory of the keys.")]
_EPILOG = examples(
    "kvframework keys new /etc/kvframework/keys",
    "kvframework keys add /etc/kvframework/keys gpu-7",
)


def register(app: typer.Typer) -> None:
    app.add_typer(_app, name="keys")


@_app.command("new", epilog=_EPILOG)
def new(
    directory: _Directory,
    client: Annotated[str, typer.Option(help="The first client's name.")] = "client",
) -> None:
    """Make a server's key pair and a first client's.

    Existing files are never replaced. Secret files (*.secret) are for their owner only: the server's stays with the
    server, a client's goes to the client's host, together with server.public.
    """
    from kvframework.api.console import stdout
    from kvframework.messaging.curve import PUBLIC_SUFFIX, write_pair

    _make(directory / CLIENTS)
    write_pair(directory / f"{SERVER}{SECRET_SUFFIX}", directory / f"{SERVER}{PUBLIC_SUFFIX}")
    _add(directory, client)
    root = directory.absolute()
    for line in (
        "The server's TOML:",
        "  [server]",
        '  tcp = "tcp://ADDRESS:PORT"',
        "  [server.curve]",
        f'  secret_key = "{root / SERVER}{SECRET_SUFFIX}"',
        f'  clients = "{root / CLIENTS}"',
        "A client's environment:",
        "  KVFRAMEWORK_ENDPOINT=tcp://ADDRESS:PORT",
        f"  KVFRAMEWORK_CURVE_SERVER={root / SERVER}{PUBLIC_SUFFIX}",
        f"  KVFRAMEWORK_CURVE_SECRET={root / client}{SECRET_SUFFIX}",
    ):
        stdout.print(line, markup=False)


@_app.command("add", epilog=_EPILOG)
def add(
    directory: _Directory,
    client: Annotated[str, typer.Argument(help="The client's name.")],
) -> None:
    """Make one more client's key pair. A running server admits it at once.

    After its *.public file is removed the client is not admitted again; an existing connection stays until the
    server is restarted.
    """
    from kvframework.api.console import stdout
    from kvframework.messaging.curve import CurveKeyError

    if not (directory / CLIENTS).is_dir():
        raise CurveKeyError("no keys here", where=str(directory), hint=f"kvframework keys new {directory}")
    _add(directory, client)
    stdout.print(f"{directory / client}{SECRET_SUFFIX}", markup=False)


def _add(directory: Path, client: str) -> None:
    from kvframework.messaging.curve import PUBLIC_SUFFIX, write_pair

    if not client.replace("-", "").replace("_", "").replace(".", "").isalnum() or client == SERVER:
        raise ConfigFieldError(f"{client!r} is no name for a client", available="letters, digits, '-', '_' and '.'")
    write_pair(directory / f"{client}{SECRET_SUFFIX}", directory / CLIENTS / f"{client}{PUBLIC_SUFFIX}")


def _make(directory: Path) -> None:
    from kvframework.messaging.curve import CurveKeyError

    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise CurveKeyError(f"cannot be made: {error.strerror}", where=str(directory)) from None

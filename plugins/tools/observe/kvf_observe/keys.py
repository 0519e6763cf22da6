"""`kvframework keys`: the CURVE keys by which a server and its clients on other hosts authenticate each other.
`kvframework tenants`: the digests of tenants' salts."""

from __future__ import annotations

import getpass
import sys
from pathlib import Path
from typing import Annotated

import typer

from kvframework.api.command import QuickGroup, examples
from kvframework.api.console import print_rows, stdout
from kvframework.api.installing import install_command
from kvframework.api.keys import tenant_digest
from kvframework.client import write_curve_pair
from kvframework.errors import ConfigFieldError, CurveKeyError

PUBLIC_SUFFIX, SECRET_SUFFIX = ".public", ".secret"
SERVER, CLIENTS = "server", "clients"

keys_app = typer.Typer(cls=QuickGroup, help="Make CURVE keys, which protect tcp:// connections.", no_args_is_help=True)
tenants_app = typer.Typer(cls=QuickGroup, no_args_is_help=True)
_Directory = Annotated[Path, typer.Argument(metavar="DIR", help="Directory of the key files.")]
_EPILOG = examples("kvframework keys new /etc/kvframework/keys", "kvframework keys add /etc/kvframework/keys gpu-7")
_MAX_SALT = 1024


@keys_app.command("new", epilog=_EPILOG)
def new(
    directory: _Directory, client: Annotated[str, typer.Option(help="The first client's name.")] = "client"
) -> None:
    """Make the key pairs of a server and of a first client.

    Existing files are never replaced. Secret files (*.secret) are for their owner only: the server's stays with the
    server, a client's goes to the client's host, together with server.public.
    """
    try:
        (directory / CLIENTS).mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise CurveKeyError(f"cannot be made: {error.strerror}", where=str(directory / CLIENTS)) from None
    write_curve_pair(directory / f"{SERVER}{SECRET_SUFFIX}", directory / f"{SERVER}{PUBLIC_SUFFIX}")
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


@keys_app.command("add", epilog=_EPILOG)
def add(directory: _Directory, client: Annotated[str, typer.Argument(help="The client's name.")]) -> None:
    """Make one more client's key pair. A running server admits the new client at once.

    After its *.public file is removed the client is not admitted again; an existing connection stays until the
    server is restarted.
    """
    if not (directory / CLIENTS).is_dir():
        raise CurveKeyError("the directory has no keys", where=str(directory), hint=f"kvframework keys new {directory}")
    _add(directory, client)
    stdout.print(f"{directory / client}{SECRET_SUFFIX}", markup=False)


def _add(directory: Path, client: str) -> None:
    if not client.replace("-", "").replace("_", "").replace(".", "").isalnum() or client == SERVER:
        raise ConfigFieldError(f"{client!r} is not a client name", available="letters, digits, '-', '_' and '.'")
    write_curve_pair(directory / f"{client}{SECRET_SUFFIX}", directory / CLIENTS / f"{client}{PUBLIC_SUFFIX}")


@tenants_app.callback()
def _tenants() -> None:
    """Tenants by name, with shares of L1."""


@tenants_app.command(
    "digest",
    epilog=examples(
        "kvframework tenants digest              prompts for the salt", "kvframework tenants digest < salt.txt"
    ),
)
def digest() -> None:
    """Print the digest of a salt, for `salts` of `[tenants.NAME]`.

    The salt is what a tenant's engine sends as its requests' cache_salt. It is a secret, so it is read from standard
    input, or asked for at a terminal, and never given as an argument. A line end behind it does not count.
    """
    stdout.print(tenant_digest(_salt()), markup=False, highlight=False)


@tenants_app.command("usage", epilog=examples("kvframework tenants usage --csv /var/lib/kvframework/*.usage"))
def usage(
    files: Annotated[list[Path], typer.Argument(metavar="FILE", help="Files of the listener `usage`, one a server.")],
    as_csv: Annotated[bool, typer.Option("--csv", help="Print comma-separated values.")] = False,
) -> None:
    """Print the GB-hours, hits and saved seconds of each tenant by day, summed over servers."""
    from importlib.util import find_spec

    if find_spec("kvf_quota") is None:
        hint = install_command(distribution="kvframework-quota")
        raise ConfigFieldError("kvframework-quota is not installed", where="kvframework tenants usage", hint=hint)
    from kvf_quota.usage import COLUMNS, rows_of

    rows = [list(map(str, row)) for row in rows_of(files)]
    if not as_csv:
        print_rows(COLUMNS, rows)
        return
    for row in (COLUMNS, *rows):
        sys.stdout.write(",".join(row) + "\n")


def _salt() -> str:
    """Return the salt. Raises `ConfigFieldError` for one that no request can have."""
    try:
        # One more byte than the longest salt and its line end can have.
        salt = getpass.getpass("salt: ") if sys.stdin.isatty() else sys.stdin.buffer.read(4 * _MAX_SALT + 3).decode()
    except UnicodeDecodeError:
        raise ConfigFieldError("the salt is not UTF-8 text", available="UTF-8") from None
    salt = salt.removesuffix("\n").removesuffix("\r")
    if not 0 < len(salt) <= _MAX_SALT:
        raise ConfigFieldError(
            f"the salt has {len(salt)} characters" if salt else "the salt is empty",
            available=f"1 to {_MAX_SALT} characters",
            hint="type the salt at the prompt, or send it to standard input",
        )
    return salt

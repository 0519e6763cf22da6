"""`kvframework tenants`: what the configuration of tenants needs."""

from __future__ import annotations

import typer

from kvframework.api.command import QuickGroup, examples

_MAX_SALT = 1024

_app = typer.Typer(cls=QuickGroup, help="Tenants by name, with shares of L1.", no_args_is_help=True)


def register(app: typer.Typer) -> None:
    app.add_typer(_app, name="tenants")


@_app.command(
    "digest",
    epilog=examples(
        "kvframework tenants digest              prompts for the salt",
        "kvframework tenants digest < salt.txt",
    ),
)
def digest() -> None:
    """Print the digest of a salt, for `salts` of `[tenants.NAME]`.

    The salt is what a tenant's engine sends as its requests' cache_salt. It is a secret, so it is read from standard
    input, or asked for at a terminal, and never given as an argument. A line end behind it does not count.
    """
    from kvframework.api.console import stdout
    from kvframework.config import tenant_digest

    stdout.print(tenant_digest(_salt()), markup=False, highlight=False)


def _salt() -> str:
    """Return the salt. Raises `ConfigFieldError` for one that no request can have."""
    import getpass
    import sys

    from kvframework.errors import ConfigFieldError

    try:
        # One more byte than the longest salt and its line end can have.
        salt = getpass.getpass("salt: ") if sys.stdin.isatty() else sys.stdin.buffer.read(4 * _MAX_SALT + 3).decode()
    except UnicodeDecodeError:
        raise ConfigFieldError("the salt is no text", available="UTF-8") from None
    salt = salt.removesuffix("\n").removesuffix("\r")
    if not 0 < len(salt) <= _MAX_SALT:
        raise ConfigFieldError(
            f"the salt has {len(salt)} characters" if salt else "the salt is empty",
            available=f"1 to {_MAX_SALT} characters",
            hint="type it at the prompt, or give it by standard input",
        )
    return salt

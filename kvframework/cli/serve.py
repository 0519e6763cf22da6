"""`kvframework serve`: one server in the foreground, until SIGINT or SIGTERM."""

from __future__ import annotations

from typing import Annotated

import typer

from kvframework.api.command import examples
from kvframework.cli.serve_options import Format, Level, ServeOptions
from kvframework.cli.usage import ConfigFile, Overrides

_EPILOG = examples(
    "kvframework serve",
    "kvframework serve --config kvf.toml --log-format json",
    "kvframework serve --set l1.capacity=8GiB",
    "kvframework serve --set l2.0.use=redis --set l2.0.url=redis://cache:6379",
)


def register(app: typer.Typer) -> None:
    app.command("serve", epilog=_EPILOG)(serve)


def serve(
    config: ConfigFile = None,
    overrides: Overrides = None,
    log_level: Annotated[Level | None, typer.Option(help="Instead of [log] level.")] = None,
    log_format: Annotated[Format | None, typer.Option(help="Instead of [log] format.")] = None,
    takeover: Annotated[
        bool, typer.Option("--takeover", help="Take the place and L1 of the server that runs at the endpoint.")
    ] = False,
) -> None:
    """Run the server of this node in the foreground.

    SIGINT (Ctrl-C) or SIGTERM ends it within 5 seconds and with exit status 0: requests in flight finish or fail, and
    objects on their way to L2 have the rest of that time. A second signal ends it at once. SIGHUP makes it read its
    configuration again, see `kvframework config apply`; SIGUSR1 writes the stacks of its threads to standard error.

    With `--takeover` it checks all that can be checked, has the running server drain and hand over what it holds in L1,
    and goes on in its place; engines connect again by themselves.
    """
    from kvframework.cli.serving import run_server

    run_server(ServeOptions(config, overrides or (), log_level, log_format, takeover))

"""`kvframework status`: queries a running server and shows its status."""

from __future__ import annotations

from typing import Annotated

import typer

from kvframework.api.command import Endpoint, EndpointConfig, examples

EXIT_DEGRADED = 1

_EPILOG = examples(
    "kvframework status",
    "kvframework status --json | jq .l1",
    "kvframework status --check --timeout 1     for a health probe",
)


def register(app: typer.Typer) -> None:
    app.command("status", epilog=_EPILOG)(status)


def status(
    endpoint: Endpoint = None,
    config: EndpointConfig = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the whole document as JSON.")] = False,
    check: Annotated[
        bool, typer.Option("--check", help="Print one line per problem, and exit with 1 if there is one.")
    ] = False,
    timeout: Annotated[float, typer.Option(min=0.01, max=3600, help="Seconds to wait for the server.")] = 3.0,
) -> None:
    """Show the state of a running server.

    With --check: exit status 0 if all works as configured, 1 if the server works with a problem (a tier is down, a
    device lost its copier, a client is refused), 2 if it does not answer within the timeout. The request goes through
    the serving loop, as those of engines do.
    """
    if check and as_json:
        raise typer.BadParameter("it goes with no --json", param_hint="--check")
    from kvframework.client.status_source import StatusSource, quiet_connection, server_endpoint

    quiet_connection()
    source = StatusSource(server_endpoint(endpoint, config), timeout)
    try:
        document = source.ask()
    finally:
        source.close()
    _show(document, source.round_trip_s, check=check, as_json=as_json)


def _show(document: bytes, round_trip_s: float | None, *, check: bool, as_json: bool) -> None:
    from kvframework.api.console import print_view, stdout
    from kvframework.cli.status_view import problem_lines, view_status

    if check:
        lines = problem_lines(document)
        for line in lines or ["ok"]:
            stdout.print(line, markup=False)
        if lines:
            raise typer.Exit(EXIT_DEGRADED)
    elif as_json:
        stdout.print_json(document.decode())
    else:
        print_view(view_status(document, round_trip_s))

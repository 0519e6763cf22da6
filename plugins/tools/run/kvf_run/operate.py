"""`kvframework stop`, `restart` and `logs`: for the server that `kvframework run` has started."""

from __future__ import annotations

import subprocess
import sys
from typing import Annotated

import typer

from kvf_run.log_file import followed, last_lines, log_path
from kvf_run.node_server import end_keeper, keeper_of, started_keeper
from kvframework.api.command import Endpoint, EndpointConfig, examples
from kvframework.api.console import print_text
from kvframework.client import server_endpoint
from kvframework.errors import EndpointError

stop_app, restart_app, logs_app = typer.Typer(), typer.Typer(), typer.Typer()


@stop_app.command("stop", epilog=examples("kvframework stop     L1 is freed; tiers keep their objects"))
def stop(endpoint: Endpoint = None, config: EndpointConfig = None) -> None:
    """End the server that `kvframework run` has started, and free its L1. Engines continue without the cache."""
    chosen = server_endpoint(endpoint, config)
    keeper = _keeper(chosen)
    if not end_keeper(keeper, chosen):
        raise EndpointError(f"process {keeper} does not end", where=chosen, hint=f"kill -9 {keeper}")
    print_text(f"stopped the server at {chosen}")


@restart_app.command("restart", epilog=examples("kvframework restart     after an upgrade; L1 is kept"))
def restart(endpoint: Endpoint = None, config: EndpointConfig = None) -> None:
    """Replace the server of `kvframework run` by the installed release. L1 keeps its objects."""
    chosen = server_endpoint(endpoint, config)
    _keeper(chosen)
    command = [sys.executable, "-m", "kvframework", "hold", "--reload", "--endpoint", chosen]
    raise typer.Exit(subprocess.run(command, check=False).returncode)


@logs_app.command("logs", epilog=examples("kvframework logs -n 20", "kvframework logs --follow"))
def logs(
    lines: Annotated[int, typer.Option("-n", "--lines", min=0, help="Number of last lines to show.")] = 100,
    follow: Annotated[bool, typer.Option("-f", "--follow", help="Show new lines as they come, until Ctrl-C.")] = False,
    endpoint: Endpoint = None,
    config: EndpointConfig = None,
) -> None:
    """Show the log of the server that `kvframework run` has started: two files of at most 8 MiB beside its socket."""
    path = log_path(server_endpoint(endpoint, config))
    try:
        for line in last_lines(path, lines):
            typer.echo(line)
        if follow:
            for text in followed(path):
                typer.echo(text, nl=False)
    except FileNotFoundError:
        raise EndpointError(
            "the server has no log", where=str(path), hint="only a server of `kvframework run` writes a log file"
        ) from None


def _keeper(endpoint: str) -> int:
    """Return the process that keeps a server which `run` has started. Raises `EndpointError` for any other."""
    found = started_keeper(endpoint)
    if found is not None:
        return found
    keeper = keeper_of(endpoint)
    if keeper is not None:
        raise EndpointError(
            f"`kvframework run` did not start this server; process {keeper['pid']} runs it",
            where=endpoint,
            hint=f"stop the server in its own terminal, or run: kill {keeper['pid']}",
        )
    raise EndpointError(
        "no server of `kvframework run` runs at the endpoint",
        where=endpoint,
        hint="start a server: kvframework run -- vllm serve MODEL; stop a server of `kvframework serve` with Ctrl-C",
    )

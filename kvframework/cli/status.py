"""`kvframework status`: queries a running server and shows its status, once or repeatedly."""

from __future__ import annotations

import logging
import os
import signal
import time
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console, RenderableType
from rich.live import Live

from kvframework.cli.console import examples, print_error, print_view, stdout
from kvframework.cli.status_view import problem_lines, unreachable, view_status
from kvframework.client.connection import ENDPOINT_VARIABLE, KVClient
from kvframework.config import default_endpoint, load_config
from kvframework.errors import KVFrameworkError
from kvframework.wire import messages as m

EXIT_DEGRADED = 1

_EPILOG = examples(
    "kvframework status",
    "kvframework status --watch --interval 0.5",
    "kvframework status --json | jq .l1",
    "kvframework status --watch --json          one document a line",
    "kvframework status --check --timeout 1     for a health probe",
)


def register(app: typer.Typer) -> None:
    app.command("status", epilog=_EPILOG)(status)


def status(
    endpoint: Annotated[
        str | None,
        typer.Option(help="Without it $KVFRAMEWORK_ENDPOINT, then that of the configuration."),
    ] = None,
    config: Annotated[Path | None, typer.Option("--config", help="Take the endpoint from this TOML file.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the whole document as JSON.")] = False,
    check: Annotated[
        bool, typer.Option("--check", help="Print one line per problem, and exit with 1 if there is one.")
    ] = False,
    timeout: Annotated[float, typer.Option(min=0.01, max=3600, help="Seconds to wait for the server.")] = 3.0,
    watch: Annotated[
        bool, typer.Option("--watch", "-w", help="Refresh the view until Ctrl-C, also through restarts of the server.")
    ] = False,
    interval: Annotated[
        float, typer.Option(min=0.1, max=3600, help="Seconds between two refreshes with --watch.")
    ] = 1.0,
) -> None:
    """Show the state of a running server.

    With --check: exit status 0 if all works as configured, 1 if the server works with a problem (a tier is down, a
    device lost its copier, a client is refused), 2 if it does not answer within the timeout. The request goes through
    the serving loop, as those of engines do.
    """
    if check and (as_json or watch):
        raise typer.BadParameter("it goes with neither --json nor --watch", param_hint="--check")
    # The connection's log lines would break the picture, or repeat the error.
    logging.getLogger("kvframework").addHandler(logging.NullHandler())
    target = endpoint or os.environ.get(ENDPOINT_VARIABLE) or load_config(config).server.endpoint or default_endpoint()
    source = _Source(target, timeout)
    if watch:
        _watch(source, interval, as_json=as_json)
        return
    try:
        document = source.ask()
    finally:
        source.close()
    if check:
        _check(document)
    elif as_json:
        stdout.print_json(document.decode())
    else:
        print_view(view_status(document, source.round_trip_s))


def _check(document: bytes) -> None:
    lines = problem_lines(document)
    for line in lines or ["ok"]:
        stdout.print(line, markup=False)
    if lines:
        raise typer.Exit(EXIT_DEGRADED)


class _Source:
    """Where documents come from. A client is kept while it works: after an error the next server may be another one,
    with another chunk size or hasher, and the next `ask` connects again."""

    def __init__(self, endpoint: str, timeout: float) -> None:
        self.endpoint = endpoint
        self._timeout = timeout
        self._client: KVClient | None = None
        self.round_trip_s: float | None = None

    def ask(self) -> bytes:
        """The status document; `round_trip_s` is measured before. Blocks for the timeout at most. Raises what
        `KVClient` does."""
        deadline = time.monotonic() + self._timeout
        if self._client is None:
            self._client = KVClient(self.endpoint, name="status", connect_timeout_s=self._timeout)
        try:
            _ = self._client.hello
            self.round_trip_s = self._client.ping(max(deadline - time.monotonic(), 0.01))
            left = max(deadline - time.monotonic(), 0.01)
            return self._client.request("REPORT_STATUS", m.Empty(), m.StatusReply, timeout=left).document
        except KVFrameworkError:
            self.close()
            raise

    def close(self) -> None:
        client, self._client = self._client, None
        if client is not None:
            client.close()


def _watch(source: _Source, interval: float, *, as_json: bool) -> None:
    # SIGTERM raises KeyboardInterrupt, so that a terminated watch restores the terminal.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        if as_json:
            _print_forever(source, interval)
        else:
            _show_forever(source, interval)
    except KeyboardInterrupt:
        return
    finally:
        source.close()


def _show_forever(source: _Source, interval: float) -> None:
    # A separate console: `Live` finds the first line again only if lines are wrapped.
    console = Console(highlight=False)
    with Live(console=console, auto_refresh=False, vertical_overflow="crop") as live:
        while True:
            view = _look(source)
            # Live keeps what it shows for the end if there is no terminal.
            if console.is_terminal:
                live.update(view, refresh=True)
            else:
                print_view(view)
            time.sleep(interval)


def _look(source: _Source) -> RenderableType:
    try:
        return view_status(source.ask(), source.round_trip_s)
    except KVFrameworkError as error:
        return unreachable(source.endpoint, error)


def _print_forever(source: _Source, interval: float) -> None:
    while True:
        try:
            stdout.print(source.ask().decode(), markup=False)
        except KVFrameworkError as error:
            print_error(error)
        time.sleep(interval)

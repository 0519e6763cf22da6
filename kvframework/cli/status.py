"""Owns `kvframework status`: asks a running server and shows what it says, once or again and again."""

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

from kvframework.cli.console import examples, print_error, stdout
from kvframework.cli.status_view import unreachable, view_status
from kvframework.client.connection import ENDPOINT_VARIABLE, KVClient
from kvframework.config import default_endpoint, load_config
from kvframework.errors import KVFrameworkError
from kvframework.wire import messages as m

_EPILOG = examples(
    "kvframework status",
    "kvframework status --watch --interval 0.5",
    "kvframework status --json | jq .l1",
    "kvframework status --watch --json          one document a line",
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
    timeout: Annotated[float, typer.Option(min=0.01, max=3600, help="Seconds to wait for the server.")] = 3.0,
    watch: Annotated[
        bool, typer.Option("--watch", "-w", help="Show it again and again, through restarts, until Ctrl-C.")
    ] = False,
    interval: Annotated[float, typer.Option(min=0.1, max=3600, help="Seconds between two looks with --watch.")] = 1.0,
) -> None:
    """Show what a running server holds and does."""
    target = endpoint or os.environ.get(ENDPOINT_VARIABLE) or load_config(config).server.endpoint or default_endpoint()
    source = _Source(target, timeout)
    if watch:
        _watch(source, interval, as_json=as_json)
        return
    try:
        document = source.ask()
    finally:
        source.close()
    if as_json:
        stdout.print_json(document.decode())
    else:
        stdout.print(view_status(document))


class _Source:
    """Where documents come from. A client is kept while it works: after an error the next server may be another one,
    with another chunk size or hasher, and the next `ask` begins anew."""

    def __init__(self, endpoint: str, timeout: float) -> None:
        self.endpoint = endpoint
        self._timeout = timeout
        self._client: KVClient | None = None

    def ask(self) -> bytes:
        """The status document. Blocks for at most twice the timeout; raises what `KVClient` does."""
        if self._client is None:
            self._client = KVClient(self.endpoint, name="status", connect_timeout_s=self._timeout)
        try:
            _ = self._client.hello
            return self._client.request("REPORT_STATUS", m.Empty(), m.StatusReply, timeout=self._timeout).document
        except KVFrameworkError:
            self.close()
            raise

    def close(self) -> None:
        client, self._client = self._client, None
        if client is not None:
            client.close()


def _watch(source: _Source, interval: float, *, as_json: bool) -> None:
    # What the connection logs would stand in the middle of the picture, which tells it anyway.
    logging.getLogger("kvframework").addHandler(logging.NullHandler())
    # A terminated watch leaves the terminal as it was, too.
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
    # Of its own, since here lines have to be wrapped for `Live` to find the first one again.
    console = Console(highlight=False)
    with Live(console=console, auto_refresh=False, vertical_overflow="crop") as live:
        while True:
            view = _look(source)
            # Live keeps what it shows for the end if nobody looks.
            if console.is_terminal:
                live.update(view, refresh=True)
            else:
                stdout.print(view)
            time.sleep(interval)


def _look(source: _Source) -> RenderableType:
    try:
        return view_status(source.ask())
    except KVFrameworkError as error:
        return unreachable(source.endpoint, error)


def _print_forever(source: _Source, interval: float) -> None:
    while True:
        try:
            stdout.print(source.ask().decode(), markup=False)
        except KVFrameworkError as error:
            print_error(error)
        time.sleep(interval)

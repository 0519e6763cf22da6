"""`kvframework status --watch`: the view of a server, refreshed until Ctrl-C, also through restarts of the server."""

from __future__ import annotations

import signal
import time

from rich.console import RenderableType
from rich.live import Live

from kvframework.cli.console import PlainConsole, print_error, print_view, stdout
from kvframework.cli.status_source import StatusSource
from kvframework.cli.status_view import unreachable, view_status
from kvframework.errors import KVFrameworkError


def watch_status(source: StatusSource, interval: float, *, as_json: bool) -> None:
    """Show the status until Ctrl-C or SIGTERM. Ends the source."""
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


def _show_forever(source: StatusSource, interval: float) -> None:
    # A separate console: `Live` finds the first line again only if lines are wrapped.
    console = PlainConsole(highlight=False)
    with Live(console=console, auto_refresh=False, vertical_overflow="crop") as live:
        while True:
            view = _look(source)
            # Live keeps what it shows for the end if there is no terminal.
            if console.is_terminal:
                live.update(view, refresh=True)
            else:
                print_view(view)
            time.sleep(interval)


def _look(source: StatusSource) -> RenderableType:
    try:
        return view_status(source.ask(), source.round_trip_s)
    except KVFrameworkError as error:
        return unreachable(source.endpoint, error)


def _print_forever(source: StatusSource, interval: float) -> None:
    while True:
        try:
            stdout.print(source.ask().decode(), markup=False)
        except KVFrameworkError as error:
            print_error(error)
        time.sleep(interval)

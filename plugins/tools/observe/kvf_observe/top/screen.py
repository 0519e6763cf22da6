"""The pictures of a server, one after the other: on the terminal's other screen, or as plain text for a pipe or a
file."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from contextlib import suppress
from itertools import islice, takewhile

from rich.live import Live

from kvf_observe.poller import Poller
from kvf_observe.top.picture import Shown, picture
from kvf_observe.top.views import Minute, Window
from kvframework.api.console import PlainConsole, print_view, stdout
from kvframework.client import StatusSource


def has_screen() -> bool:
    """Whether there is a screen that can be drawn on."""
    return stdout.is_terminal and not stdout.is_dumb_terminal


def watch(source: StatusSource, interval: float, view: str) -> None:
    """Show the server until Ctrl-C, SIGTERM, or the end of the terminal. Owns `source`."""
    _end_by_sigterm()
    signal.signal(signal.SIGTSTP, signal.SIG_IGN)  # a shell would draw over the other screen
    console = PlainConsole(highlight=False)
    try:
        with suppress(KeyboardInterrupt, OSError), Live(console=console, screen=True, auto_refresh=False) as live:
            live.update(picture(view, Shown(source.endpoint, None, time.time())), refresh=True)
            for shown in takewhile(lambda _: console.is_terminal, _polled(source, interval)):  # it may have hung up
                live.update(picture(view, shown), refresh=True)
    finally:
        source.close()


def print_frames(source: StatusSource, interval: float, view: str, number: int) -> bool:
    """Print `number` pictures, `interval` seconds apart; return whether the server answered for the last. Before the
    first one passes an interval if no rate is known without. Ends early by Ctrl-C or SIGTERM. Owns `source`."""
    _end_by_sigterm()
    polled = _polled(source, interval)
    try:
        shown = next(polled)
        if shown.window is not None and not shown.window.seconds:
            shown = next(polled)
        print_view(picture(view, shown))
        for shown in islice(polled, number - 1):
            stdout.print()
            print_view(picture(view, shown))
        return shown.silent_since is None
    except KeyboardInterrupt:
        return True
    finally:
        source.close()


def _polled(source: StatusSource, interval: float) -> Iterator[Shown]:
    """Yield what there is to show after each poll: the last document is shown on while none follows it."""
    poller, minute = Poller(source, lambda _: None), Minute()
    window: Window | None = None
    answered = time.time()
    while True:
        observed = poller.poll()
        if observed.document is None:
            yield Shown(source.endpoint, window, observed.time, answered, observed.error)
        else:
            answered = observed.time
            window = minute.add(observed.document, observed.at)
            yield Shown(source.endpoint, window, observed.time)
        time.sleep(interval)


def _end_by_sigterm() -> None:
    signal.signal(signal.SIGTERM, signal.default_int_handler)

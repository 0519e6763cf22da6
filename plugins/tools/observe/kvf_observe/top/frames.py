"""Pictures as plain text, for a pipe, a file, or a look at once."""

from __future__ import annotations

import signal
import time

from kvf_observe.poller import Poller
from kvf_observe.top.moments import Moments
from kvf_observe.top.picture import Shown, frame
from kvf_observe.top.state import State
from kvframework.cli.console import print_view, stdout
from kvframework.client.status_source import StatusSource

# Wider than any table: what nobody's screen cuts off.
_PIPE_WIDTH = 1000


def print_frames(source: StatusSource, interval: float, view: str, number: int) -> bool:
    """Print `number` pictures, `interval` seconds apart; return whether the server answered for the last. Before the
    first one passes an interval if no rate is known without. Ends early by Ctrl-C or SIGTERM. Owns `source`."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    moments, poller = Moments(source.endpoint, time.time()), Poller(source, lambda _: None)
    state = State(view=view)
    try:
        shown = moments.take(poller.poll())
        if shown.window is not None and not shown.window.seconds:
            time.sleep(interval)
            shown = moments.take(poller.poll())
        _print(state, shown)
        for _ in range(number - 1):
            time.sleep(interval)
            shown = moments.take(poller.poll())
            stdout.print()
            _print(state, shown)
        return shown.silent_since is None
    except KeyboardInterrupt:
        return True
    finally:
        source.close()


def _print(state: State, shown: Shown) -> None:
    width = stdout.width if stdout.is_terminal else _PIPE_WIDTH
    for line in frame(state, shown, width):
        line.rstrip()
        print_view(line)

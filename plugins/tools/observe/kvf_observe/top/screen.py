"""The live screen: one thread waits for keys, signals and answers, and draws; another one asks the server. And pictures
as plain text, for a pipe, a file, or a look at once."""

from __future__ import annotations

import contextlib
import os
import re
import select
import signal
import time
from collections import deque

from kvf_observe.poller import Observed, Poller
from kvf_observe.top.picture import Moments, Shown, frame, picture
from kvf_observe.top.terminal import HungUp, Terminal
from kvf_observe.top.views import NAMES
from kvframework.api.console import print_view, stdout
from kvframework.client import StatusSource

# What a terminal sends for a key without a letter: CSI or SS3, numbers and a last byte.
_OTHER_KEY = re.compile(rb"\x1b[\[O][0-?]*[@-~]")
QUIT = "q"


def typed(view: str, received: bytes) -> str:
    """Return the view after the keys, `QUIT` after a q. Keys without a meaning change nothing."""
    for key in _OTHER_KEY.sub(b"", received).decode("ascii", "ignore"):
        if key == QUIT:
            return QUIT
        if key.isdecimal() and 1 <= int(key) <= len(NAMES):
            view = NAMES[int(key) - 1]
        elif key == "\t":
            view = NAMES[(NAMES.index(view) + 1) % len(NAMES)]
    return view


_KEYBOARD = 0


def watch(source: StatusSource, interval: float, view: str) -> None:
    """Show the server until `q`, Ctrl-C, SIGTERM, or the end of the terminal. Owns `source`."""
    screen = _Screen(source, interval, view)
    try:
        screen.run()
    except (KeyboardInterrupt, HungUp):
        pass
    finally:
        screen.close()


class _Screen:
    def __init__(self, source: StatusSource, interval: float, view: str) -> None:
        self._moments = Moments(source.endpoint, time.time())
        self._view = view
        self._terminal = Terminal()
        self._polled: deque[Observed] = deque()
        self._poller = Poller(source, self._hear, every_s=interval)
        # Signals and polls wake the waiting thread. It stays open: a late poll may write.
        self._woken, self._wake = os.pipe()
        os.set_blocking(self._wake, False)

    def run(self) -> None:
        self._take_signals()
        self._terminal.enter()
        self._poller.start()
        while self._view != QUIT:
            self._draw()
            self._wait()

    def close(self) -> None:
        self._terminal.leave()
        signal.set_wakeup_fd(-1)
        with contextlib.suppress(KeyboardInterrupt):
            self._poller.stop()

    def _take_signals(self) -> None:
        signal.set_wakeup_fd(self._wake, warn_on_full_buffer=False)
        signal.signal(signal.SIGWINCH, _note)
        signal.signal(signal.SIGTSTP, signal.SIG_IGN)
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):
            if signal.getsignal(number) != signal.SIG_IGN:
                # They also end a write that the terminal does not take.
                signal.signal(number, signal.default_int_handler)

    def _hear(self, observed: Observed) -> None:
        """In the polling thread."""
        self._polled.append(observed)
        with contextlib.suppress(BlockingIOError):
            os.write(self._wake, b"\0")

    def _draw(self) -> None:
        width, height = self._terminal.size()
        self._terminal.draw(picture(self._view, self._moments.latest, width, height))

    def _wait(self) -> None:
        readable, _, _ = select.select([_KEYBOARD, self._woken], [], [])
        if self._woken in readable:
            os.read(self._woken, 4096)
        while self._polled:
            self._moments.take(self._polled.popleft())
        if _KEYBOARD in readable:
            self._view = typed(self._view, self._terminal.read())


def _note(_number: int, _frame: object) -> None:
    """The wake-up descriptor has it."""


# Wider than any table: what nobody's screen cuts off.
_PIPE_WIDTH = 1000


def print_frames(source: StatusSource, interval: float, view: str, number: int) -> bool:
    """Print `number` pictures, `interval` seconds apart; return whether the server answered for the last. Before the
    first one passes an interval if no rate is known without. Ends early by Ctrl-C or SIGTERM. Owns `source`."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    moments, poller = Moments(source.endpoint, time.time()), Poller(source, lambda _: None)
    try:
        shown = moments.take(poller.poll())
        if shown.window is not None and not shown.window.seconds:
            time.sleep(interval)
            shown = moments.take(poller.poll())
        _print(view, shown)
        for _ in range(number - 1):
            time.sleep(interval)
            shown = moments.take(poller.poll())
            stdout.print()
            _print(view, shown)
        return shown.silent_since is None
    except KeyboardInterrupt:
        return True
    finally:
        source.close()


def _print(view: str, shown: Shown) -> None:
    width = stdout.width if stdout.is_terminal else _PIPE_WIDTH
    for line in frame(view, shown, width):
        line.rstrip()
        print_view(line)

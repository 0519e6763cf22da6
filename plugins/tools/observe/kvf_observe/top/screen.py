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
from kvf_observe.top.views import State, pressed
from kvframework.api.console import print_view, stdout
from kvframework.client import StatusSource

# What a terminal sends for a key: CSI or SS3, numbers and a last byte, or a letter.
_KEY = re.compile(rb"\x1b[\[O][0-?]*([@-~])|([\t -~])")
_NAMES = {"C": "right", "D": "left", "Z": "backtab"}
_KEYBOARD = 0
# Wider than any table: what nobody's screen cuts off.
_PIPE_WIDTH = 1000


def keys_of(received: bytes) -> list[str]:
    """The keys that were typed: letters as they are, others by name."""
    found = [(last.decode(), letter.decode()) for last, letter in _KEY.findall(received)]
    return [_NAMES.get(last, "") if last else letter.replace("\t", "tab") for last, letter in found]


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
        self._state = State(view=view)
        self._terminal = Terminal()
        self._polled: deque[Observed] = deque()
        self._poller = Poller(source, self._hear, every_s=interval)
        # Signals, by their numbers, and polls, by a 0, wake the waiting thread. It stays open: a late poll may write.
        self._woken, self._wake = os.pipe()
        os.set_blocking(self._wake, False)

    def run(self) -> None:
        self._take_signals()
        self._terminal.enter()
        self._poller.start()
        while not self._state.ended:
            self._draw()
            self._wait()

    def close(self) -> None:
        self._terminal.leave()
        signal.set_wakeup_fd(-1)
        with contextlib.suppress(KeyboardInterrupt):
            self._poller.stop()

    def _take_signals(self) -> None:
        signal.set_wakeup_fd(self._wake, warn_on_full_buffer=False)
        for number in (signal.SIGWINCH, signal.SIGCONT):
            signal.signal(number, _note)
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
        self._terminal.draw(picture(self._state, self._moments.latest, width, height))

    def _wait(self) -> None:
        readable, _, _ = select.select([_KEYBOARD, self._woken], [], [])
        if self._woken in readable and signal.SIGCONT in os.read(self._woken, 4096):
            self._terminal.enter()  # a shell may have changed it
        while self._polled:
            self._moments.take(self._polled.popleft())
        if _KEYBOARD in readable:
            for key in keys_of(self._terminal.read()):
                self._state = pressed(self._state, key)


def _note(_number: int, _frame: object) -> None:
    """The wake-up descriptor has its number."""


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

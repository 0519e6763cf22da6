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
from kvf_observe.top.picture import Moments, Shown, clamped, frame, picture
from kvf_observe.top.state import State, pressed
from kvf_observe.top.terminal import HungUp, Terminal
from kvframework.api.console import print_view, stdout
from kvframework.client import StatusSource

_ESCAPE = 0x1B
# What a terminal sends for a key without a letter: CSI or SS3, numbers, and a last byte.
_SEQUENCE = re.compile(rb"\x1b(?:\[[0-?]*[ -/]*([@-~])|O([@-~]))")
_OPEN = re.compile(rb"\x1b(?:\[[0-?]*[ -/]*|O)?")
_NAMES = {b"A": "up", b"B": "down", b"C": "right", b"D": "left", b"Z": "backtab"}
_NUMBERED = {b"\x1b[5~": "pageup", b"\x1b[6~": "pagedown"}
_LONGEST = 32


class Keys:
    """A decoder. A sequence may come in pieces; one that means nothing here is no key."""

    def __init__(self) -> None:
        self._left = b""

    def feed(self, received: bytes) -> list[str]:
        """The keys that are complete: letters as they are, others by name."""
        data, self._left = self._left + received, b""
        keys = []
        at = 0
        while at < len(data):
            if data[at] != _ESCAPE:
                keys += _letter(data[at])
                at += 1
            elif found := _SEQUENCE.match(data, at):
                keys += _sequence(found)
                at = found.end()
            elif _OPEN.fullmatch(data, at) and len(data) - at < _LONGEST:
                self._left = data[at:]
                return keys
            else:
                at += 1  # an Esc alone
        return keys


def _letter(code: int) -> list[str]:
    if code == 0x09:
        return ["tab"]
    return [chr(code)] if 0x20 <= code < 0x7F else []


def _sequence(found: re.Match[bytes]) -> list[str]:
    name = _NUMBERED.get(found[0]) or _NAMES.get(found[1] or found[2])
    return [name] if name else []


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
        self._shown: Shown = self._moments.latest
        self._state = State(view=view)
        self._keys = Keys()
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
        for number in (signal.SIGWINCH, signal.SIGCONT, signal.SIGTSTP):
            signal.signal(number, _note)
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
        self._state = clamped(self._state, self._shown, width, height)
        self._terminal.draw(picture(self._state, self._shown, width, height))

    def _wait(self) -> None:
        readable, _, _ = select.select([_KEYBOARD, self._woken], [], [])
        if self._woken in readable:
            numbers = os.read(self._woken, 4096)
            if signal.SIGTSTP in numbers:
                self._stop()
            elif signal.SIGCONT in numbers:
                self._terminal.enter()
        while self._polled:
            shown = self._moments.take(self._polled.popleft())
            if not self._state.paused:
                self._shown = shown
        if _KEYBOARD in readable:
            self._type()

    def _type(self) -> None:
        held = self._state.paused
        for key in self._keys.feed(self._terminal.read()):
            self._state = pressed(self._state, key)
        if held and not self._state.paused:
            self._shown = self._moments.latest

    def _stop(self) -> None:
        """Stop as a Ctrl-Z does, with the terminal as the shell wants it; go on after `fg`."""
        self._terminal.leave()
        signal.signal(signal.SIGTSTP, signal.SIG_DFL)
        signal.raise_signal(signal.SIGTSTP)
        signal.signal(signal.SIGTSTP, _note)
        self._terminal.enter()


def _note(_number: int, _frame: object) -> None:
    """The wake-up descriptor has its number."""


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

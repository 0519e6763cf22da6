"""The terminal of `kvframework top`: keys without an Enter, another screen, and all of it put back."""

from __future__ import annotations

import contextlib
import errno
import os
import termios
import tty
from collections.abc import Iterator

from rich.console import Group
from rich.live import Live
from rich.text import Text

from kvframework.api.console import PlainConsole

_KEYBOARD, _SCREEN = 0, 1


def has_terminal() -> bool:
    """Whether there is a keyboard, and a screen that can be drawn on."""
    dumb = os.environ.get("TERM", "") in ("", "dumb", "unknown")
    return os.isatty(_KEYBOARD) and os.isatty(_SCREEN) and not dumb


class HungUp(Exception):
    """The terminal does not exist any more."""


class Terminal:
    """The state of the terminal is that of before between `leave` and `enter`. Methods raise `HungUp`, but `leave`."""

    def __init__(self) -> None:
        self._before = termios.tcgetattr(_KEYBOARD)
        self._console = PlainConsole(highlight=False, force_terminal=True)
        self._live: Live | None = None

    def enter(self) -> None:
        """Take the terminal, also one that a shell has changed meanwhile."""
        with _hang_up_noticed():
            _without_an_enter()
            if self._live is None:
                self._live = Live(
                    Text(),
                    console=self._console,
                    screen=True,
                    auto_refresh=False,
                    redirect_stdout=False,
                    redirect_stderr=False,
                )
                self._live.start()

    def leave(self) -> None:
        """Give it back, if it still exists, and is not another job's."""
        live, self._live = self._live, None
        try:
            with _hang_up_noticed():
                if os.tcgetpgrp(_KEYBOARD) != os.getpgrp():
                    return
                termios.tcsetattr(_KEYBOARD, termios.TCSANOW, self._before)
                termios.tcflush(_KEYBOARD, termios.TCIFLUSH)
                if live is not None:
                    live.stop()
        except HungUp:
            # What is left to be written has no reader.
            os.dup2(os.open(os.devnull, os.O_WRONLY), _SCREEN)

    def size(self) -> tuple[int, int]:
        """Columns and lines of now. COLUMNS and LINES of the environment know no resize."""
        try:
            width, height = os.get_terminal_size(_SCREEN)
        except OSError:
            width, height = 0, 0
        self._console.size = width or 80, height or 24
        return self._console.width, self._console.height

    def draw(self, lines: list[Text]) -> None:
        """Show lines from the top. Blocks while the terminal takes nothing."""
        with _hang_up_noticed():
            if self._live is not None:
                self._live.update(Group(*lines), refresh=True)

    def read(self) -> bytes:
        """What was typed. Blocks until something was."""
        with _hang_up_noticed():
            typed = os.read(_KEYBOARD, 1024)
        if not typed:
            raise HungUp
        return typed


def _without_an_enter() -> None:
    """Have keys come one by one, unseen. A process in the background is stopped by this until it gets to the front."""
    while True:
        try:
            tty.setcbreak(_KEYBOARD, termios.TCSANOW)
            return
        except termios.error as error:
            if error.args[0] != errno.EINTR:  # by the signal that goes on with it
                raise


@contextlib.contextmanager
def _hang_up_noticed() -> Iterator[None]:
    try:
        yield
    except (OSError, termios.error) as error:
        raise HungUp from error

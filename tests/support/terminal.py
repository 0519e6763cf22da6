"""A pseudo-terminal with a program in it: what it shows, what is typed, its size, its end."""

from __future__ import annotations

import codecs
import contextlib
import fcntl
import os
import pty
import re
import select
import signal
import struct
import subprocess
import sys
import termios
import threading
from collections.abc import Mapping, Sequence
from typing import Any

from tests.support.waiting import wait_until

_SLOW_S = 120.0
# Makes its standard input the terminal of a session of its own, with signals ignored, and becomes the program. What the
# tests themselves were started with does not count: shells ignore signals for what they run in the background.
_LEAD = """
import fcntl, os, signal, sys, termios
fcntl.ioctl(0, termios.TIOCSCTTY, 0)
for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):
    signal.signal(number, signal.SIG_DFL)
for number in sys.argv[1].split():
    signal.signal(int(number), signal.SIG_IGN)
os.execvp(sys.argv[2], sys.argv[2:])
"""
_HOME = "\x1b[H"
_CONTROL = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|[=>])")


class Terminal:
    """A context manager; the program leads a session whose terminal this is. `shown` is all that it wrote."""

    def __init__(
        self,
        command: Sequence[str],
        environment: Mapping[str, str],
        *,
        columns: int = 80,
        lines: int = 24,
        ignored: Sequence[signal.Signals] = (),
    ) -> None:
        self._ends = pty.openpty()
        self.shown = ""
        self._before = termios.tcgetattr(self._ends[1])
        self.resize(columns, lines)

        slave = self._ends[1]
        numbers = " ".join(str(int(number)) for number in ignored)
        self.process = subprocess.Popen(
            [sys.executable, "-c", _LEAD, numbers, *command],
            env=environment,
            stdin=slave,
            stdout=slave,
            stderr=slave,
            start_new_session=True,
        )
        self._open = True
        self._thread = threading.Thread(target=self._read)
        self._thread.start()

    def __enter__(self) -> Terminal:
        return self

    def __exit__(self, *_exc: object) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.kill()
        self.process.wait()
        self.hang_up()

    def hang_up(self) -> None:
        """Close the terminal, as the end of a connection does."""
        if self._open:
            self._open = False
            self._thread.join(_SLOW_S)
            for end in self._ends:
                os.close(end)

    def resize(self, columns: int, lines: int) -> None:
        """Tell the terminal's size, and so the program."""
        fcntl.ioctl(self._ends[0], termios.TIOCSWINSZ, struct.pack("HHHH", lines, columns, 0, 0))

    def type(self, keys: str) -> None:
        os.write(self._ends[0], keys.encode())

    def ended(self) -> int:
        """The exit status, once it has ended."""
        return self.process.wait(_SLOW_S)

    def modes(self) -> list[Any]:
        """The terminal's modes now."""
        return termios.tcgetattr(self._ends[1])

    def is_as_before(self) -> bool:
        """Whether the program has put the modes back."""
        return self.modes() == self._before

    def picture(self) -> list[str]:
        """The lines of the last picture that began at the top and is complete: another one follows."""
        pictures = self.shown.split(_HOME)
        return _CONTROL.sub("", pictures[-2] if len(pictures) > 2 else "").split("\r\n")

    def shows(self, pattern: str) -> list[str]:
        """Wait until a picture matches, and return its lines."""
        found: list[str] = []

        def matches() -> bool:
            found[:] = self.picture()
            return re.search(pattern, "\n".join(found)) is not None

        wait_until(matches, _SLOW_S, f"a picture of {pattern!r}")
        return found

    def wrote(self, text: str, since: int = 0) -> None:
        """Wait until the program, or the terminal's echo, has written a text."""
        wait_until(lambda: text in self.shown[since:], _SLOW_S, f"the text {text!r}")

    def _read(self) -> None:
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        while self._open:
            if select.select([self._ends[0]], [], [], 0.05)[0]:
                self.shown += decoder.decode(os.read(self._ends[0], 65536))

"""Printed text of a process that logs, as lines of its log. A print to a full pipe would block the whole process."""

from __future__ import annotations

import io
import logging
import threading

MAX_LINE = 8 << 10


class PrintedLines(io.TextIOBase):
    """Replaces `sys.stdout` or `sys.stderr`. Each line becomes a record of the logger `name`, and goes straight to
    `handler`: another library's handler that prints makes no loop. Thread-safe, never blocks."""

    encoding = "utf-8"

    def __init__(self, handler: logging.Handler, name: str, level: int, fd: int) -> None:
        super().__init__()
        self._handler = handler
        self._logger = logging.getLogger(name)
        self._level = level
        self._fd = fd
        self._lock = threading.RLock()
        self._begun = ""

    def fileno(self) -> int:
        """The descriptor of the replaced stream, for child processes."""
        return self._fd

    def writable(self) -> bool:
        return True

    def write(self, text: str) -> int:
        with self._lock:
            *whole, self._begun = (self._begun + text).split("\n")
            if len(self._begun) > MAX_LINE:
                whole.append(self._begun)
                self._begun = ""
        for line in whole:
            self._log(line)
        return len(text)

    def flush(self) -> None:
        """Does nothing: an incomplete line waits for its end, or for `end_line`."""

    def end_line(self) -> None:
        """Logs an incomplete line."""
        with self._lock:
            line, self._begun = self._begun, ""
        self._log(line)

    def _log(self, line: str) -> None:
        if line.strip() and self._logger.isEnabledFor(self._level):
            self._handler.handle(self._logger.makeRecord(self._logger.name, self._level, "", 0, line, (), None))

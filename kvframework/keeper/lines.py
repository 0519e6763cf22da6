"""The log of `kvframework hold`: a line for each event, on standard error."""

from __future__ import annotations

import contextlib
import json
import os
import select
import stat
from datetime import datetime, timezone

_STDERR = 2
_LOGGER = "kvframework.hold"
_MAX_TEXT = 2000  # a pipe takes a line of less than PIPE_BUF bytes as a whole


class Lines:
    """Writes lines in the form of the server's log, "human" or "json". A reader that does not read loses them: it never
    holds this process up."""

    def __init__(self, form: str) -> None:
        self._json = form == "json"
        self._fd = _STDERR
        self.dropped = 0
        with contextlib.suppress(OSError):
            if stat.S_ISFIFO(os.fstat(_STDERR).st_mode):
                # An open file of its own: not blocking here leaves it as it is for all others.
                self._fd = os.open(f"/proc/self/fd/{_STDERR}", os.O_WRONLY | os.O_APPEND | os.O_NONBLOCK | os.O_CLOEXEC)

    def info(self, text: str) -> None:
        self._write("info", text)

    def warning(self, text: str) -> None:
        self._write("warning", text)

    def error(self, text: str) -> None:
        self._write("error", text)

    def _write(self, level: str, text: str) -> None:
        now, text = datetime.now(timezone.utc), text[:_MAX_TEXT]
        if self._json:
            time = now.isoformat(timespec="milliseconds")
            line = json.dumps({"time": time, "level": level, "logger": _LOGGER, "message": text})
        else:
            local = now.astimezone()
            line = f"{local:%Y-%m-%d %H:%M:%S},{local.microsecond // 1000:03d} {level.upper()} {_LOGGER}: {text}"
        try:
            poll = select.poll()
            poll.register(self._fd, select.POLLOUT)
            if not any(event & select.POLLOUT for _, event in poll.poll(0)):
                raise BlockingIOError
            os.write(self._fd, f"{line}\n".encode("utf-8", "backslashreplace"))
        except OSError:
            self.dropped += 1

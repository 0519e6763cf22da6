"""The form of a server's log: lines for people, or one JSON object a line. Set up once in `serve`, and in the same way
in each process that moves KV for it. Printed text becomes lines of it: a print to a full pipe would block.

Lines wait in a bounded queue, and a thread writes them: a reader that does not read costs lines, never time."""

from __future__ import annotations

import contextlib
import copy
import faulthandler
import io
import json
import logging
import os
import select
import signal
import stat
import sys
import threading
from collections import deque
from datetime import datetime, timezone
from queue import SimpleQueue
from typing import NamedTuple

from kvframework.bounded_calls import call_within
from kvframework.logs.limit import LogLimit
from kvframework.text import one_line, visible

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
        with self._lock:
            line, self._begun = self._begun, ""
        self._log(line)

    def _log(self, line: str) -> None:
        if line.strip() and self._logger.isEnabledFor(self._level):
            self._handler.handle(self._logger.makeRecord(self._logger.name, self._level, "", 0, line, (), None))


HUMAN = "%(asctime)s %(levelname)s %(name)s: %(message)s"
log = logging.getLogger(__name__)


class LogForm(NamedTuple):
    """`level` is a level's name, `form` "human" or "json"."""

    level: str
    form: str


STDOUT, STDERR = 1, 2
_chosen: LogForm | None = None
_handler: QueuedHandler | None = None


class HumanFormatter(logging.Formatter):
    """One line for each event, whatever clients and plugins wrote into it; only a traceback has more."""

    def __init__(self) -> None:
        super().__init__(HUMAN)

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802  the library's name
        return one_line(super().formatMessage(record))


class JsonFormatter(logging.Formatter):
    """One object a line: time (ISO 8601, UTC), level, logger, message, and exception if there is one."""

    def format(self, record: logging.LogRecord) -> str:
        entry = {
            "time": datetime.fromtimestamp(record.created, timezone.utc).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        if record.exc_info and not record.exc_text:
            record.exc_text = self.formatException(record.exc_info)
        exception = "\n".join(filter(None, (record.exc_text, record.stack_info)))
        if exception:
            entry["exception"] = exception
        # ASCII only, so that no line separator of any alphabet can split the line.
        return json.dumps(entry)


def configure_logging(level: str, form: str) -> None:
    """Send all logs, warnings, errors of threads and printed text to standard error in this form, without ever waiting
    for its reader. Once in a process, before it serves."""
    global _handler
    # Python has no stream where the descriptor was closed: another file may have its number by now.
    _handler = QueuedHandler(STDERR if sys.stderr is not None else os.open(os.devnull, os.O_WRONLY | os.O_CLOEXEC))
    _handler.addFilter(LogLimit())
    logging.basicConfig(handlers=[_handler], force=True)
    change_logging(level, form)
    logging.captureWarnings(True)
    threading.excepthook = _log_thread_error
    if sys.stdout is not None:
        call_within(FLUSH_S, {"standard output": sys.stdout.flush})  # text printed earlier
    sys.stdout = PrintedLines(_handler, "stdout", logging.INFO, STDOUT)
    sys.stderr = PrintedLines(_handler, "stderr", logging.WARNING, STDERR)
    _write_stacks()


def change_logging(level: str, form: str) -> None:
    """Changes level and form of the log that `configure_logging` has set up, and those of processes started later. From
    any thread; without effect in an application that configured logging itself."""
    global _chosen
    if _handler is None:
        return
    _chosen = LogForm(level, form)
    _handler.setFormatter(JsonFormatter() if form == "json" else HumanFormatter())
    logging.getLogger().setLevel(level.upper())


def recent_lines() -> list[str]:
    """The last records of this process's log, the oldest first; none if the application configured logging."""
    return [] if _handler is None else _handler.recent()


def end_logging() -> None:
    """Write all records logged so far, within `FLUSH_S`; later prints go to the original streams."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, PrintedLines):
            stream.end_line()
            sys.stdout, sys.stderr = sys.__stdout__, sys.__stderr__
    if _handler is not None:
        _handler.flush()


def chosen_log() -> LogForm | None:
    """The configured form of this process, for those that it starts; None: the application configured logging."""
    return _chosen


def log_status() -> dict[str, object]:
    """The counts of the lines of this process's log, for the status document."""
    if _handler is None:
        return {"waiting": 0, "dropped": 0, "problem": ""}
    return {"waiting": _handler.waiting, "dropped": _handler.dropped, "problem": _handler.problem}


def _write_stacks() -> None:
    """Make a crash, and SIGUSR1, write the stacks of all threads to standard error. To a pipe they go through an open
    file of its own that does not block: a full one must not keep a dying process, and its resources, alive."""
    file = STDERR
    with contextlib.suppress(OSError):
        if stat.S_ISFIFO(os.fstat(STDERR).st_mode):
            file = os.open(f"/proc/self/fd/{STDERR}", os.O_WRONLY | os.O_APPEND | os.O_NONBLOCK | os.O_CLOEXEC)
    with contextlib.suppress(OSError):  # there is no standard error
        faulthandler.enable(file)
        faulthandler.register(signal.SIGUSR1, file)


def _log_thread_error(failure: threading.ExceptHookArgs) -> None:
    if failure.exc_type is SystemExit or failure.exc_value is None:
        return
    name = failure.thread.name if failure.thread else "a thread"
    error = failure.exc_value
    log.error("%s ended with an error", name, exc_info=(type(error), error, error.__traceback__))


LIMIT = 4 << 20
FLUSH_S = 0.3
MAX_MESSAGE = 64 << 10
# The lines that are kept for a bug report, and the letters of one.
RECENT, RECENT_TEXT = 256, 4 << 10
# The memory of a line in the queue beside its text.
_ITEM = 256


class QueuedHandler(logging.Handler):
    """Writes to the descriptor `fd`, which it borrows, from a separate thread.

    Logging costs its caller the text of the line and never blocks, in any state of the descriptor. About `limit` bytes
    wait at most. Lines that do not fit or cannot be written are counted in `dropped`, and the log reports them at the
    place where they are missing. After it was full, the queue takes lines again once it is half empty."""

    def __init__(self, fd: int, limit: int = LIMIT) -> None:
        super().__init__()
        self._fd = fd
        self._limit = limit
        # A line with the number of those refused before it, or an event to set.
        self._queue: SimpleQueue[tuple[bytes, int] | threading.Event] = SimpleQueue()
        # Logging threads write the first three, under the handler's lock; the writer the others.
        self._given, self._refused, self._full = 0, 0, False
        self._taken, self._failed, self._torn, self._reported = 0, 0, False, 0
        self._error = ""
        # The last lines, whatever became of them.
        self._recent: deque[str] = deque(maxlen=RECENT)
        threading.Thread(target=self._run, name="kvf-log", daemon=True).start()

    @property
    def dropped(self) -> int:
        """The number of lines that were not and will not be written."""
        return self._refused + self._failed

    @property
    def waiting(self) -> int:
        return self._queue.qsize()

    @property
    def problem(self) -> str:
        """The reason why the log does not reach its reader now, as the end of a sentence; "" if it does."""
        if self._error:
            return f"cannot be written: {self._error}"
        return "is not read" if self._full and self._given - self._taken > self._limit // 2 else ""

    def recent(self) -> list[str]:
        """The last lines, each as one text that is safe on a terminal."""
        return ["\n".join(map(visible, text.splitlines())) for text in self._recent.copy()]

    def emit(self, record: logging.LogRecord) -> None:
        text = self._text(record)
        half = RECENT_TEXT // 2
        self._recent.append(text if len(text) <= RECENT_TEXT else f"{text[:half]} ... {text[-half:]}")
        line = (text + "\n").encode("utf-8", "backslashreplace")
        size = len(line) + _ITEM
        waiting = self._given - self._taken
        self._full = waiting > self._limit // 2 if self._full else waiting + size > self._limit
        if self._full:
            self._refused += 1
            if self._queue.empty():  # else the thread reports it after the last line
                self._queue.put(threading.Event())
            return
        self._given += size
        self._queue.put((line, self._refused))

    def flush(self) -> None:
        self.drain(FLUSH_S)

    def drain(self, timeout_s: float) -> bool:
        """Wait until all earlier records are written; False after `timeout_s`."""
        written = threading.Event()
        self._queue.put(written)
        return written.wait(timeout_s)

    def _text(self, record: logging.LogRecord) -> str:
        try:
            message = record.getMessage()
        except Exception as error:  # noqa: BLE001  a log call must not fail its caller
            message = f"{record.msg} (the log arguments do not fit the text: {type(error).__name__})"
        record = copy.copy(record)
        record.msg = message if len(message) <= MAX_MESSAGE else f"{message[:MAX_MESSAGE]}..."
        record.args = None
        return self.format(record)

    # The writer's thread.

    def _run(self) -> None:
        while True:
            item = self._queue.get()
            if isinstance(item, tuple):
                line, refused = item
                self._report(refused)
                if not self._write(line):
                    self._failed += 1
                self._taken += len(line) + _ITEM
            if self._queue.empty():
                self._report(self._refused)
            if isinstance(item, threading.Event):
                item.set()

    def _report(self, refused: int) -> None:
        missing = refused + self._failed - self._reported
        if missing:
            text = f"{missing} lines are missing here: the log was not read, or could not be written"
            notice = logging.LogRecord(__name__, logging.WARNING, __file__, 0, text, (), None)
            if self._write((self.format(notice) + "\n").encode()):
                self._reported += missing

    def _write(self, line: bytes) -> bool:
        """Write one line; blocks as long as the reader does not read."""
        begun = self._torn
        data = memoryview(b"\n" + line if self._torn else line)
        try:
            while data:
                try:
                    data = data[os.write(self._fd, data) :]
                    begun = True
                except BlockingIOError:  # another process made it non-blocking: the description is shared
                    poller = select.poll()
                    poller.register(self._fd, select.POLLOUT)
                    poller.poll()
        except OSError as error:
            self._torn, self._error = begun, error.strerror or repr(error)
            return False
        self._torn, self._error = False, ""
        return True

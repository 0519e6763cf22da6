"""The queue between a log and its reader: lines wait in a bounded queue, and a thread writes them. A reader that does
not read costs lines, never time."""

from __future__ import annotations

import copy
import logging
import os
import select
import threading
from collections import deque
from datetime import datetime, timezone
from queue import SimpleQueue

from kvframework.text import one_line, visible

LIMIT = 4 << 20
FLUSH_S = 0.3
MAX_MESSAGE = 64 << 10
# The records that are kept for a bug report, and the letters of a message and of a traceback in one.
RECENT, RECENT_TEXT = 256, 2 << 10
# The memory of a record beside its texts.
_RECORD = 1 << 10


class QueuedHandler(logging.Handler):
    """Writes to the descriptor `fd`, which it borrows, from a thread of its own.

    Logging costs its caller the text of the message and never blocks, in any state of the descriptor. About `limit`
    characters wait at most. Lines that do not fit or cannot be written are counted in `dropped`, and the log reports
    them at the place where they are missing. After it was full, the queue takes lines again once it is half empty.
    """

    def __init__(self, fd: int, limit: int = LIMIT) -> None:
        super().__init__()
        self._fd = fd
        self._limit = limit
        self._queue: SimpleQueue[tuple[logging.LogRecord, int, int] | threading.Event] = SimpleQueue()
        # Each field is written by one side only: the first three by logging threads, under the handler's lock, the
        # others by the writer.
        self._given, self._refused, self._full = 0, 0, False
        self._taken, self._failed, self._torn, self._told = 0, 0, False, 0
        self._error = ""
        # The last records, whatever became of them: line and traceback.
        self._recent: deque[tuple[str, str]] = deque(maxlen=RECENT)
        threading.Thread(target=self._run, name="kvf-log", daemon=True).start()

    @property
    def dropped(self) -> int:
        """The number of lines that were not and will not be written."""
        return self._refused + self._failed

    @property
    def waiting(self) -> int:
        """The lines in the queue."""
        return self._queue.qsize()

    @property
    def problem(self) -> str:
        """The reason why the log does not reach its reader now, as the end of a sentence; "" if it does."""
        if self._error:
            return f"cannot be written: {self._error}"
        return "is not read" if self._full and self._given - self._taken > self._limit // 2 else ""

    def recent(self) -> list[str]:
        """The last records, each as one text that is safe on a terminal."""
        texts = [(one_line(line), *map(visible, traceback.splitlines())) for line, traceback in self._recent.copy()]
        return ["\n".join(text) for text in texts]

    def emit(self, record: logging.LogRecord) -> None:
        record = self._settled(record)
        self._recent.append(_brief(record))
        size = _RECORD + len(record.msg) + len(record.exc_text or "") + len(record.stack_info or "")
        waiting = self._given - self._taken
        self._full = waiting > self._limit // 2 if self._full else waiting + size > self._limit
        if self._full:
            self._refused += 1
            if self._queue.empty():  # else the thread reports it after the last line
                self._queue.put(threading.Event())
            return
        self._given += size
        self._queue.put((record, size, self._refused))

    def flush(self) -> None:
        self.drain(FLUSH_S)

    def drain(self, timeout_s: float) -> bool:
        """Waits until all earlier records are written; False after `timeout_s`."""
        written = threading.Event()
        self._queue.put(written)
        return written.wait(timeout_s)

    def _settled(self, record: logging.LogRecord) -> logging.LogRecord:
        """A copy of the record with texts only: its arguments may change until it is written, and the frames of an
        exception keep their objects alive, such as views of the arena."""
        record = copy.copy(record)
        try:
            text = record.getMessage()
        except Exception as error:  # noqa: BLE001  a log call must not fail its caller
            text = f"{record.msg} (its arguments do not fit: {type(error).__name__})"
        record.msg = text if len(text) <= MAX_MESSAGE else f"{text[:MAX_MESSAGE]}..."
        record.args = None
        if record.exc_info:
            record.exc_text = record.exc_text or (self.formatter or logging.Formatter()).formatException(
                record.exc_info
            )
            record.exc_info = None
        return record

    # The writer's thread.

    def _run(self) -> None:
        while True:
            item = self._queue.get()
            if isinstance(item, tuple):
                record, size, refused = item
                self._tell(refused)
                if not self._write(record):
                    self._failed += 1
                self._taken += size
            if self._queue.empty():
                self._tell(self._refused)
            if isinstance(item, threading.Event):
                item.set()

    def _tell(self, refused: int) -> None:
        missing = refused + self._failed - self._told
        if missing and self._write(_notice(missing)):
            self._told += missing

    def _write(self, record: logging.LogRecord) -> bool:
        """Writes one record; blocks as long as the reader does not read."""
        begun = self._torn
        try:
            data = memoryview((self.format(record) + "\n").encode("utf-8", "backslashreplace"))
            if self._torn:
                data = memoryview(b"\n" + data)
            while data:
                try:
                    data = data[os.write(self._fd, data) :]
                    begun = True
                except BlockingIOError:  # another process made it non-blocking: the description is shared
                    poller = select.poll()
                    poller.register(self._fd, select.POLLOUT)
                    poller.poll()
        except Exception as error:  # noqa: BLE001  the log has no other place to report it
            self._torn = begun
            self._error = getattr(error, "strerror", None) or repr(error)
            return False
        self._torn, self._error = False, ""
        return True


def _brief(record: logging.LogRecord) -> tuple[str, str]:
    time = datetime.fromtimestamp(record.created, timezone.utc).isoformat(timespec="milliseconds")
    line = f"{time} {record.levelname} {record.name}: {record.msg[:RECENT_TEXT]}"
    return line, (record.exc_text or "")[-RECENT_TEXT:]


def _notice(missing: int) -> logging.LogRecord:
    text = "%d lines are missing here: the log was not read, or could not be written"
    return logging.LogRecord(__name__, logging.WARNING, __file__, 0, text, (missing,), None)

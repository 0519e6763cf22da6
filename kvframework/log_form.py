"""Owns what the log of a server looks like: lines for people, or one JSON object a line. Set up once in `serve`, and
alike in each process that moves KV for it."""

from __future__ import annotations

import json
import logging
import sys
import threading
from datetime import datetime, timezone
from typing import NamedTuple

from kvframework.log_limit import LogLimit
from kvframework.one_line import one_line

HUMAN = "%(asctime)s %(levelname)s %(name)s: %(message)s"

log = logging.getLogger(__name__)


class LogForm(NamedTuple):
    """`level` is a level's name, `form` "human" or "json"."""

    level: str
    form: str


_chosen: LogForm | None = None


class HumanFormatter(logging.Formatter):
    """A line an event, whatever clients and plugins wrote into it; only a traceback has more."""

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
    """All logs, warnings and errors of threads go to standard error in this form."""
    global _chosen
    _chosen = LogForm(level, form)
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter() if form == "json" else HumanFormatter())
    handler.addFilter(LogLimit())
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)
    logging.captureWarnings(True)
    threading.excepthook = _log_thread_error


def chosen_log() -> LogForm | None:
    """What this process was configured with, for the processes that it starts; None: its log is somebody else's."""
    return _chosen


def _log_thread_error(failure: threading.ExceptHookArgs) -> None:
    if failure.exc_type is SystemExit or failure.exc_value is None:
        return
    name = failure.thread.name if failure.thread else "a thread"
    error = failure.exc_value
    log.error("%s ended by an error", name, exc_info=(type(error), error, error.__traceback__))

"""What a package writes into logs, on one line, whatever others sent; and the log of a process that is its own.

`configure_logging` sends all logs and printed text of a process to standard error, without ever waiting for its
reader. `LogForm` is what a server passes to a process that it starts.
"""

from __future__ import annotations

from kvframework.logs.form import LogForm, configure_logging, end_logging
from kvframework.logs.limit import LogLimit
from kvframework.text import one_line

__all__ = ["LogForm", "LogLimit", "configure_logging", "end_logging", "one_line"]

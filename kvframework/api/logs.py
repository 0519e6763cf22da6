"""What a package writes into logs: as often as is useful, on one line, whatever others sent; and a process's own log.

A line that repeats: `log.addFilter(LogLimit())` for a whole logger, or `LogLimit.once()`, whose `passes(kind)` is asked
before a line. `one_line` and `visible` take the line ends and the control characters out of a foreign text.
`configure_logging` sends all logs and printed text of a process to standard error, without ever waiting for its
reader; `LogForm` is what a server passes to a process that it starts.
"""

from __future__ import annotations

from kvframework.logs.form import LogForm, configure_logging, end_logging
from kvframework.logs.limit import LogLimit
from kvframework.text import one_line, visible

__all__ = ["LogForm", "LogLimit", "configure_logging", "end_logging", "one_line", "visible"]

"""What a package writes into logs: as often as is useful, on one line, whatever others sent.

A line that repeats: `log.addFilter(LogLimit())` for a whole logger, or `LogLimit.once()`, whose `passes(kind)` is asked
before a line. `one_line` and `visible` take the line ends and the control characters out of a foreign text.
"""

from __future__ import annotations

from kvframework.logs.limit import LogLimit
from kvframework.text import one_line, visible

__all__ = ["LogLimit", "one_line", "visible"]

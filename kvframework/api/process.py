"""The parts that every process needs: a log, child processes, and the delay before the next attempt of anything.

A line that repeats: `log.addFilter(LogLimit())` for a whole logger, or `LogLimit.once()`, whose `passes(kind)` is asked
before a line. `one_line` and `visible` take line ends and control characters out of a foreign text. `configure_logging`
sends all logs and printed text of a process to standard error and never waits for its reader; `LogForm` is what a
server passes to a process that it starts, and `chosen_log` that of this process.

`SupervisedChild` runs code that can freeze or crash its process in a separate one; `NamedCall` tells it a function and
its options; `kvframework.api.helper_tier.HelperTier` does so for a tier. `Backoff` delays retries.
"""

from __future__ import annotations

from kvframework.logs.limit import LogLimit
from kvframework.logs.process_log import LogForm, chosen_log, configure_logging, end_logging
from kvframework.supervise.child import NamedCall, SupervisedChild, end_with_parent, start_connected, start_process
from kvframework.supervise.state import Backoff, how_ended
from kvframework.text import one_line, visible

__all__ = [
    "Backoff",
    "LogForm",
    "LogLimit",
    "NamedCall",
    "SupervisedChild",
    "chosen_log",
    "configure_logging",
    "end_logging",
    "end_with_parent",
    "how_ended",
    "one_line",
    "start_connected",
    "start_process",
    "visible",
]

"""The framework's log records in vLLM's log. Runs once in each of vLLM's processes."""

from __future__ import annotations

import logging

_OURS = ("kvf_vllm", "kvframework", "kvf_cpu_gather")


def join_log(engine: str) -> None:
    """Gives the framework's loggers the handlers and the level of the logger `engine`, unless the application has
    configured logging itself."""
    theirs = logging.getLogger(engine)
    if logging.getLogger().handlers or not theirs.handlers:
        return
    for name in _OURS:
        ours = logging.getLogger(name)
        if not ours.handlers:
            ours.handlers = list(theirs.handlers)
            ours.setLevel(theirs.getEffectiveLevel())
            ours.propagate = False

"""What an engine process of `kvframework demo` tells the command: JSON lines on stdout, one an event."""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Callable
from typing import Any

from kvframework.errors import KVFrameworkError

Emit = Callable[..., None]


def run_engine(run: Callable[[Emit], None]) -> None:
    """Run an engine, which gets `emit(event, **fields)`; all else that it prints goes to stderr. An error of the
    framework becomes the event `failed`, with its parts, and exit status 1."""
    logging.basicConfig(level=logging.INFO, stream=sys.stderr)
    # Libraries may print: stdout is for events only.
    events, sys.stdout = sys.stdout, sys.stderr

    def emit(event: str, **fields: Any) -> None:
        print(json.dumps({"event": event, **fields}), file=events, flush=True)

    try:
        run(emit)
    except KeyboardInterrupt:
        sys.exit(130)
    except KVFrameworkError as error:
        logging.getLogger(__name__).exception("the engine ends")
        emit("failed", fact=error.fact, where=error.where, available=error.available, hint=error.hint)
        sys.exit(1)

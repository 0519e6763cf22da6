"""The prompts shorter than a chunk that a client has not looked up, for the server's explanations. Thread-safe.

PINGs carry them. Without them an operator would look for a lookup that was never sent.
"""

from __future__ import annotations

import threading
from collections import deque

from kvframework.wire.messages import MAX_SHORT, MAX_SHORT_ID, MOST_LOST, ShortPrompt


class ShortPrompts:
    """The number of such prompts in this session, and the last `MAX_SHORT` of them."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._count = self._known = 0
        self._last: deque[ShortPrompt] = deque(maxlen=MAX_SHORT)

    def add(self, request_id: str, tokens: int) -> None:
        """Add a prompt, unless it is the last one: a scheduler may ask for one request again and again."""
        prompt = ShortPrompt(request_id[:MAX_SHORT_ID], tokens)
        with self._lock:
            if not self._last or self._last[-1] != prompt:
                self._count = min(self._count + 1, MOST_LOST)
                self._last.append(prompt)

    def begin(self) -> None:
        """Start a new session: its server knows of none."""
        with self._lock:
            self._count, self._known = self._count - self._known, 0

    def report(self) -> tuple[int, tuple[ShortPrompt, ...]]:
        """Return the number of this session, and the last ones; (0, ()) if its server knows them already."""
        with self._lock:
            unknown = self._count - self._known
            return (self._count, tuple(self._last)[-min(unknown, MAX_SHORT) :]) if unknown else (0, ())

    def acknowledged(self, count: int) -> None:
        """Record that the server has answered a PING with this number."""
        with self._lock:
            self._known = max(self._known, count)

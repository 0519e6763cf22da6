"""Owns the circuit breaker of one tier. A pure state machine: the caller passes the time."""

from __future__ import annotations


class Breaker:
    """Closed: calls pass. After `threshold` failures in a row open: calls are refused for a while that doubles up to
    `max_backoff_s`. Then half open: one call passes and decides."""

    def __init__(self, threshold: int = 3, backoff_s: float = 0.25, max_backoff_s: float = 10.0) -> None:
        self._threshold = threshold
        self._first_backoff_s = backoff_s
        self._max_backoff_s = max_backoff_s
        self._failures = 0
        self._backoff_s = backoff_s
        self._retry_at = 0.0
        self._probing = False
        self.state = "closed"

    def allow(self, now: float) -> bool:
        """Whether a call may be tried now. A True while half open must be followed by `succeeded`, `undecided` or
        `failed`."""
        if self.state == "closed":
            return True
        if now >= self._retry_at and not self._probing:
            self.state = "half-open"
            self._probing = True
            return True
        return False

    def wait_s(self, now: float) -> float:
        """Seconds until a call may pass, 0 if now; a guess while another's call is the one that decides."""
        if self.state == "closed":
            return 0.0
        if self._probing:
            return self._first_backoff_s
        return max(self._retry_at - now, 0.0)

    def succeeded(self) -> None:
        self.state = "closed"
        self._failures = 0
        self._probing = False
        self._backoff_s = self._first_backoff_s

    def undecided(self) -> None:
        """A call worked that proves nothing: half open, the next one decides."""
        self._probing = False

    def failed(self, now: float) -> None:
        self._failures += 1
        if self.state == "half-open":
            self._backoff_s = min(self._backoff_s * 2, self._max_backoff_s)
        if self.state == "half-open" or self._failures >= self._threshold:
            self.state = "open"
            self._probing = False
            self._retry_at = now + self._backoff_s

"""A circuit breaker of a tier. A pure state machine: the caller passes the time."""

from __future__ import annotations


class Breaker:
    """Closed: calls pass. After `threshold` failures in a row open: calls are refused for a while that doubles up to
    `max_backoff_s`, which is short, since no request is the call that decides. Then half open: one call passes and
    decides.

    The results of calls that began before the circuit opened are ignored. `since` is the time at which the circuit
    closed, or left the closed state.
    """

    def __init__(self, threshold: int = 3, backoff_s: float = 0.25, max_backoff_s: float = 2.0) -> None:
        self._threshold = threshold
        self._first_backoff_s = backoff_s
        self._max_backoff_s = max_backoff_s
        self._failures = 0
        self._backoff_s = backoff_s
        self._retry_at = 0.0
        self._probing = False
        self._openings = 0
        self.state = "closed"
        self.since = 0.0

    def allow(self, now: float) -> int | None:
        """Return None if no call may be tried now; else a number to pass to `succeeded`, `undecided` or `failed` at the
        call's end."""
        if self.state != "closed":
            if now < self._retry_at or self._probing:
                return None
            self.state = "half-open"
            self._probing = True
        return self._openings

    def wait_s(self, now: float) -> float:
        """Return the seconds until a call may pass, 0 if now; an estimate while another call is the one that
        decides."""
        if self.state == "closed":
            return 0.0
        if self._probing:
            return self._first_backoff_s
        return max(self._retry_at - now, 0.0)

    def succeeded(self, call: int, now: float) -> None:
        if call != self._openings:
            return
        if self.state != "closed":
            self.state = "closed"
            self.since = now
        self._failures = 0
        self._probing = False
        self._backoff_s = self._first_backoff_s

    def undecided(self, call: int) -> None:
        """Record a call that worked but proves nothing: in the half-open state, the next call decides."""
        if call == self._openings:
            self._probing = False

    def failed(self, call: int, now: float) -> None:
        if call != self._openings:
            return
        self._failures += 1
        if self.state == "half-open":
            self._backoff_s = min(self._backoff_s * 2, self._max_backoff_s)
        elif self._failures < self._threshold:
            return
        else:
            self.since = now
        self.state = "open"
        self._openings += 1
        self._probing = False
        self._retry_at = now + self._backoff_s

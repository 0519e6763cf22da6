"""When something is tried again, and when a process is started, killed and started again. Pure, with a clock; of the
standard library alone, since the process of `kvframework hold` imports little else."""

from __future__ import annotations

import math
import signal

# After a life of this length, a process's end starts a new back-off.
HEALTHY_S = 30.0


class Backoff:
    """The delay before the next attempt: `first_s` after a failure, twice as long after each further one, at most
    `longest_s`; after a success it is `first_s` again. The next attempt may be made at `next_at`. Not thread-safe."""

    def __init__(self, first_s: float = 0.1, longest_s: float = 10.0) -> None:
        self._first_s, self._longest_s = first_s, longest_s
        self._wait_s = 0.0
        self.next_at = -math.inf

    def delay(self, now: float) -> float:
        """Note a failure; return the seconds until the next attempt."""
        self._wait_s = min(max(2 * self._wait_s, self._first_s), self._longest_s)
        self.next_at = now + self._wait_s
        return self._wait_s

    def reset(self) -> None:
        """Note a success: the next attempt may be made at once."""
        self._wait_s, self.next_at = 0.0, -math.inf

    def left(self, now: float) -> float:
        """Return the seconds until the next attempt, 0 if it may be made now."""
        return max(self.next_at - now, 0.0)


def how_ended(status: int) -> str:
    """Return a return code in words: "by signal SIGKILL", "with status 1"; a real-time signal by its number."""
    if status >= 0:
        return f"with status {status}"
    try:
        return f"by signal {signal.Signals(-status).name}"
    except ValueError:
        return f"by signal {-status}"


class Life:
    """One process, from its start until its end is seen. At `kill_at` it has to be killed."""

    def __init__(self, now: float, ready_s: float = math.inf) -> None:
        self.started = now
        self.ready_at: float | None = None
        self.stopping = False
        self.kill_at = now + ready_s

    def ready(self, now: float) -> None:
        """Note that it is ready. One that is to stop still has to."""
        self.ready_at = now
        if not self.stopping:
            self.kill_at = math.inf

    def stop(self, now: float, within_s: float) -> None:
        """Note that it has to end, within so many seconds. A later call never gives it more time."""
        self.kill_at = min(self.kill_at, now + within_s)
        self.stopping = True

    def must_be_killed(self, now: float) -> bool:
        """Whether its time is over. True once."""
        if now < self.kill_at:
            return False
        self.kill_at, self.stopping = math.inf, True
        return True


class Supervision:
    """One process at a time: it is started when it is wanted, killed if it is not ready `ready_s` seconds later or
    does not stop in time, and started again after a back-off, which a life of `HEALTHY_S` ends. `life` is that of the
    process, None while there is none."""

    def __init__(self, ready_s: float = math.inf, backoff: Backoff | None = None) -> None:
        self._ready_s = ready_s
        self._backoff = backoff or Backoff()
        self._wanted = self._closed = False
        self.life: Life | None = None

    @property
    def is_serving(self) -> bool:
        """Whether there is a process, ready or about to be, that does not have to stop."""
        return self.life is not None and not self.life.stopping

    @property
    def is_over(self) -> bool:
        """Whether there is no process, and never will be."""
        return self.life is None and self._closed

    @property
    def due(self) -> float:
        """When something has to be done, if nothing else happens before."""
        if self.life is not None:
            return self.life.kill_at
        return self._backoff.next_at if self._wanted else math.inf

    def must_start(self, now: float) -> bool:
        """Whether a process has to be started now: `started` follows."""
        return self.life is None and now >= self.due

    def must_kill(self, now: float) -> bool:
        """Whether the process has to be killed now. True once."""
        return self.life is not None and self.life.must_be_killed(now)

    def want(self) -> None:
        """Have a process started, if there is none."""
        self._wanted = not self._closed

    def started(self, now: float) -> None:
        """Note a start, or the attempt: `ended` follows at once."""
        self._wanted = False
        self.life = Life(now, self._ready_s)

    def close(self, now: float, within_s: float) -> None:
        """Stop the process, and start none any more. Idempotent."""
        if self.life is not None and not self._closed:
            self.life.stop(now, within_s)
        self._wanted, self._closed = False, True

    def ended(self, now: float) -> None:
        """Note that the process has ended, and touches nothing any more."""
        if self.life is not None and now - self.life.started >= HEALTHY_S:
            self._backoff.reset()
        self.life = None
        self._backoff.delay(now)

"""Child processes that are paused (SIGSTOP) and resumed (SIGCONT) during a measurement."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from pathlib import Path

from kvframework_bench.process import BenchChild

SWITCH_S = 10.0
_POLL_S = 0.0002


class PausableChild(BenchChild):
    """One child, which runs from the start. Must be made under `uninterrupted`."""

    def stop(self) -> None:
        """Kill it at once: a paused process reacts to no other signal."""
        self.kill()

    def resume(self) -> None:
        """Return at once. Raises `BenchFailed` if the process has ended."""
        self._send(signal.SIGCONT)

    def pause(self) -> None:
        """Return at once. Raises `BenchFailed` if the process has ended."""
        self._send(signal.SIGSTOP)

    def await_paused(self) -> None:
        """Wait until it is paused. Raises `BenchFailed` if it is not within seconds."""
        self.await_that(self.is_paused, "does not stop after SIGSTOP")

    def is_paused(self) -> bool:
        return Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"

    def await_that(self, condition: Callable[[], bool], fact: str, seconds: float = SWITCH_S) -> None:
        """Wait until the condition holds. Raises `BenchFailed`, which says `fact`, if it does not within `seconds`."""
        deadline = time.monotonic() + seconds
        while not condition():
            self.check_alive()
            if time.monotonic() > deadline:
                raise self.failure(f"{fact} within {seconds} s")
            time.sleep(_POLL_S)

    def _send(self, number: signal.Signals) -> None:
        self.check_alive()
        self._process.send_signal(number)

"""What one publisher says, taken in by steps: a message may have 65,536 events, and others wait for the event loop."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from itertools import chain

from kvf_route.contents import Contents


class Intake:
    """Where a `Follower` puts batches; `advance` does the work. `busy`: some is left."""

    def __init__(self, contents: Contents, clock: Callable[[], float] = time.monotonic) -> None:
        self.busy = False
        self._contents = contents
        self._clock = clock
        self._steps: Iterator[None] = iter(())

    def apply(self, topic: bytes, payload: bytes) -> None:
        """Take a batch in after those before."""
        self._steps = chain(self._steps, self._contents.steps(topic, payload))
        self.busy = True

    def clear(self) -> None:
        """Forget everything, with what is left."""
        self._steps, self.busy = iter(()), False
        self._contents.clear()

    def advance(self, until: float) -> bool:
        """Work until that time of the clock, for one step at least. True if nothing is left."""
        while self.busy:
            if next(self._steps, self) is self:
                self.busy = False
            elif self._clock() >= until:
                break
        return not self.busy

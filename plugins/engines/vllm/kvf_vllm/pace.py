"""How much loads may copy in a step of the engine's, so that the requests that it computes hardly wait. Pure, with a
clock."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

# The part of a step's own time by which loads may make it longer.
SHARE = 0.25
_STEPS = 32
_PIECES = 16


class Pace:
    """Knows how long steps take without loads, and how fast loads are copied. For one thread."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._steps: deque[float] = deque(maxlen=_STEPS)
        self._pieces: deque[tuple[int, float]] = deque(maxlen=_PIECES)
        # The end of the last step's loads, None if it computed nothing.
        self._since: float | None = None
        self._begun = 0.0

    def begin(self) -> None:
        """A step's loads begin."""
        self._begun = self._clock()

    def room(self, *, computes: bool) -> int | None:
        """Return the bytes that loads may copy in this step, None for all: a step that computes nothing holds up no
        request. 0 means the smallest piece, when nothing is known yet, or the loads' start has taken the time."""
        if not computes:
            return None
        if self._since is not None:
            self._steps.append(self._begun - self._since)
        if not self._steps or not self._pieces:
            return 0
        nbytes, seconds = (sum(each) for each in zip(*self._pieces, strict=True))
        # The shortest: the others were those of a prefill, or an idle engine's.
        left_s = self._begun + SHARE * min(self._steps) - self._clock()
        return int(max(left_s, 0.0) * nbytes / max(seconds, 1e-9))

    def copied(self, nbytes: int, seconds: float) -> None:
        """A piece was copied."""
        self._pieces.append((nbytes, seconds))

    def end(self, *, computes: bool) -> None:
        """A step's loads have had their time."""
        self._since = self._clock() if computes else None

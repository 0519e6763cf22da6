"""What was found for a request lately: SGLang's scheduler may ask at every step for as long as a request waits. Pure;
takes a clock."""

from __future__ import annotations

from collections.abc import Callable, Sequence

# How long the scheduler waits for an answer.
LOOKUP_S = 0.1
MISS_HOLDS_S = 0.5
# Well before the pins of a hit end.
HIT_HOLDS_S = 10.0
MOST_REQUESTS = 4096


class RecentLookups:
    """Answers by request. For one thread."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._known: dict[str, tuple[float, tuple[str, str, int], list[int]]] = {}

    def get(self, request: str, keys: Sequence[str], ask: Callable[[], list[int]]) -> list[int]:
        """The answer for these keys: a recent one, or that of `ask`."""
        now, asked = self._clock(), (keys[0], keys[-1], len(keys))
        until, known, answer = self._known.get(request, (now, None, []))
        if known != asked or until <= now:
            answer = ask()
            self.forget(request)
            if len(self._known) >= MOST_REQUESTS:
                del self._known[next(iter(self._known))]
            self._known[request] = (now + (HIT_HOLDS_S if answer else MISS_HOLDS_S), asked, answer)
        return answer

    def forget(self, request: str) -> None:
        self._known.pop(request, None)

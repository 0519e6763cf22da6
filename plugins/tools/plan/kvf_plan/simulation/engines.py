"""Engines as queues of prompts: each computes one at a time, in the order in which they became ready. Pure."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from kvf_plan.simulation.events import VirtualTime
from kvf_plan.simulation.settings import Engines
from kvframework.pricing import EngineSpeed


class PrefillQueue:
    """One engine. `busy_s` is how long it has computed. `idle` is called when it has nothing left."""

    def __init__(self, number: int, time: VirtualTime, idle: Callable[[], object] = lambda: None) -> None:
        self.number = number
        self._idle = idle
        self.busy_s = 0.0
        self._time = time
        self._until = 0.0
        self._waiting: deque[tuple[float, Callable[[], float], Callable[[], object]]] = deque()
        self._waiting_s = 0.0
        self._running = False

    @property
    def is_idle(self) -> bool:
        return not self._running

    @property
    def backlog_s(self) -> float:
        """The seconds until all that it has now would be computed, as far as is known."""
        return self._waiting_s + (max(self._until - self._time.now, 0.0) if self._running else 0.0)

    def add(self, about_s: float, begin: Callable[[], float], end: Callable[[], object]) -> None:
        """Compute a prompt of about so many seconds: `begin` is called at its turn, and returns how many they are;
        `end` once it is computed."""
        self._waiting.append((about_s, begin, end))
        self._waiting_s += about_s
        if not self._running:
            self._next()

    def _next(self) -> None:
        self._running = bool(self._waiting)
        if not self._running:
            self._waiting_s = 0.0
            self._idle()
            return
        about_s, begin, end = self._waiting.popleft()
        self._waiting_s -= about_s
        seconds = begin()
        self.busy_s += seconds
        self._until = self._time.now + seconds
        self._time.at(self._until, lambda: self._ended(end))

    def _ended(self, end: Callable[[], object]) -> None:
        end()
        self._next()


class Fleet:
    """The engines. A prompt goes to the one that would be free first once its load has ended, of several to the first
    one: until then it keeps no engine from others. `on_idle` is called when one has nothing left."""

    def __init__(self, settings: Engines, time: VirtualTime) -> None:
        self.queues = [PrefillQueue(number, time, lambda: self.on_idle()) for number in range(settings.count)]
        self.on_idle: Callable[[], object] = lambda: None
        self._settings = settings

    def asks(self, waiting: int) -> bool:
        """Whether one more prompt is looked up now, while so many are that no engine has begun."""
        lookahead = self._settings.lookahead
        if lookahead is None or waiting < lookahead * len(self.queues):
            return True
        return any(queue.is_idle for queue in self.queues)

    def least_loaded(self) -> PrefillQueue:
        return min(self.queues, key=lambda queue: queue.backlog_s)

    def seconds(self, x: int, y: int) -> float:
        """Return how long the tokens from x to y of a prompt take."""
        return EngineSpeed(self._settings.tokens_per_s, self._settings.attention_tokens).prefill_s(x, y)

    def speed(self, queue: PrefillQueue, unasked_s: float) -> EngineSpeed:
        """Return what an engine says of itself with a LOOKUP. `unasked_s` are those of the prompts that wait before
        all engines and are not looked up yet: an engine computes those while a load is under way."""
        queued_s = max(queue.backlog_s + unasked_s / len(self.queues), 0.0)
        return EngineSpeed(self._settings.tokens_per_s, self._settings.attention_tokens, queued_s)

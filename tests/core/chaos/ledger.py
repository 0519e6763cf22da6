"""The records of a run: the active faults, the reports of the engines, and the first broken promise.

Used in the harness's process, by all of its threads."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import msgspec

from tests.core.chaos.events import Complaint, Event, Tally, TimedOut

# Seconds after its end in which a fault still explains a failure.
AFTERMATH_S = 1.0
# One call in flight and the ends of all that it held; one request more if an earlier PONG was still unread.
MOST_TIMEOUTS = 8


@dataclass
class Work:
    """An active fault; `engine` is the number of the engine that it affects, None for all."""

    kind: str
    engine: int | None
    began: float
    ended: float = float("inf")


class Ledger:
    """Thread-safe. `failed` is set at the first violation, whose text is `violation`."""

    def __init__(self) -> None:
        self.tally: Counter[str] = Counter()
        self.faults: Counter[str] = Counter()
        self.violation = ""
        self.failed = threading.Event()
        self._works: list[Work] = []
        self._timeouts: list[tuple[int, str, float]] = []
        self._lock = threading.Lock()

    def violate(self, text: str) -> None:
        with self._lock:
            self.violation = self.violation or text
        self.failed.set()

    def count(self, **amounts: int) -> None:
        with self._lock:
            self.tally.update(amounts)

    @contextmanager
    def work(self, kind: str, engine: int | None = None) -> Iterator[None]:
        """Mark the whole time in which a fault may have effects."""
        work = Work(kind, engine, time.monotonic())
        with self._lock:
            self._works.append(work)
            self.faults[kind] += 1
        try:
            yield
        finally:
            work.ended = time.monotonic()

    def explained(self, kinds: Sequence[str], began: float, ended: float, engine: int | None = None) -> bool:
        """Whether a fault of `kinds` that affects `engine` was active between two times."""
        with self._lock:
            return any(
                work.kind in kinds
                and work.engine in (None, engine)
                and work.began <= ended
                and began <= work.ended + AFTERMATH_S
                for work in self._works
            )

    def record(self, engine: int, event: Event) -> None:
        """Record an engine's report, in the thread that reads it."""
        if isinstance(event, Tally):
            self.count(**msgspec.structs.asdict(event))
        elif isinstance(event, TimedOut):
            with self._lock:
                self.tally["timeouts"] += 1
                self._timeouts.append((engine, event.name, event.ended))
        elif isinstance(event, Complaint):
            if event.excuses and self.explained(event.excuses, event.began, event.ended, engine):
                self.count(excused=1)
            else:
                self.violate(f"engine {engine}: {event.text}")

    def check_silences(self) -> None:
        """Check that a stopped server cost each engine one timeout and not one for every call."""
        with self._lock:
            stops = [work for work in self._works if work.kind == "stop_server"]
            for stop in stops:
                within = [(engine, name) for engine, name, at in self._timeouts if stop.began <= at <= stop.ended]
                for engine, times in Counter(engine for engine, _ in within).items():
                    if times > MOST_TIMEOUTS:
                        names = Counter(name for number, name in within if number == engine)
                        text = f"waited {times} times for a server that was stopped once: {dict(names)}"
                        self.violation = self.violation or f"engine {engine}: {text}"

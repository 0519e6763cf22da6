"""The calls to one tier: circuits that admit them, deadlines, durations, and what the tier lacked a moment ago."""

from __future__ import annotations

import copy
import logging
import math
import threading
from collections import Counter
from collections.abc import Callable, Iterable
from typing import NamedTuple, TypeVar

from kvframework.api.counter import Histogram
from kvframework.api.keys import PackedKey
from kvframework.errors import KVFrameworkError, TierError
from kvframework.logs.limit import LogLimit
from kvframework.status import TierCounters, zeros
from kvframework.supervise.state import Backoff
from kvframework.text import described

log = logging.getLogger(__name__)


class Breaker:
    """A circuit breaker, pure. Closed: calls pass. After `threshold` failures in a row open: calls are refused for a
    while that doubles up to `max_backoff_s`: short, since no request decides. Then half open: one call passes and does.

    Results of calls from before it opened are ignored. `since`: when it closed, or left the closed state."""

    def __init__(self, threshold: int = 3, backoff_s: float = 0.25, max_backoff_s: float = 2.0) -> None:
        self._threshold = threshold
        self._first_backoff_s = backoff_s
        self._backoff = Backoff(backoff_s, max_backoff_s)
        self._failures = 0
        self._probing = False
        self._openings = 0
        self.state = "closed"
        self.since = 0.0

    def allow(self, now: float) -> int | None:
        """Return None if no call may be tried now; else a number for `succeeded`, `undecided` or `failed` then."""
        if self.state != "closed":
            if self._backoff.left(now) or self._probing:
                return None
            self.state = "half-open"
            self._probing = True
        return self._openings

    def wait_s(self, now: float) -> float:
        """Return the seconds until a call may pass, 0 if now; an estimate while another call decides."""
        if self.state == "closed":
            return 0.0
        return self._first_backoff_s if self._probing else self._backoff.left(now)

    def succeeded(self, call: int, now: float) -> None:
        if call != self._openings:
            return
        if self.state != "closed":
            self.state = "closed"
            self.since = now
            self._backoff.reset()
        self._failures = 0
        self._probing = False

    def undecided(self, call: int) -> None:
        """Record a call that worked but proves nothing: in the half-open state, the next call decides."""
        if call == self._openings:
            self._probing = False

    def failed(self, call: int, now: float) -> None:
        if call != self._openings:
            return
        self._failures += 1
        if self.state != "half-open":
            if self._failures < self._threshold:
                return
            self.since = now
        self.state = "open"
        self._openings += 1
        self._probing = False
        self._backoff.delay(now)


# Values that another node writes are seen at most this much later; vLLM's connector remembers a miss for as long.
HOLD_S = 0.5
MOST = 1 << 14


class Absences:
    """The keys that a tier lacked a moment ago: several requests ask for one prompt. Pure; its caller serialises.

    An answer is remembered for `hold_s` at most, since other nodes write to a shared tier. What this server writes is
    forgotten at once, and an answer during which it has written is not believed: see `writes`. The latest `most` keys.
    """

    def __init__(self, hold_s: float = HOLD_S, most: int = MOST) -> None:
        self._hold_s = hold_s
        self._most = most
        # The time until which each holds, the soonest first.
        self._until: dict[PackedKey, float] = {}
        self.writes = 0

    def __len__(self) -> int:
        return len(self._until)

    def lacked(self, key: PackedKey, now: float) -> bool:
        return self._until.get(key, now) > now

    def answered(self, missing: Iterable[PackedKey], writes: int, now: float) -> None:
        """The tier answers now that it lacks keys, to a question that began when there were so many `writes`."""
        if writes != self.writes:
            return
        while self._until and self._until[oldest := next(iter(self._until))] <= now:
            del self._until[oldest]
        for key in missing:
            self._until.pop(key, None)
            self._until[key] = now + self._hold_s
        while len(self._until) > self._most:
            del self._until[next(iter(self._until))]

    def written(self, keys: Iterable[PackedKey]) -> None:
        self.writes += 1
        for key in keys:
            self._until.pop(key, None)


R = TypeVar("R")

# Durations of calls: from 1 us to about 4 minutes.
FIRST_S, OCTAVES = 1e-6, 28
LOADING = ("contains", "get_into")
OPERATIONS = (*LOADING, "put", "delete", "touch", "ping", "usage", "scan", "admit")
STATES = ("closed", "half-open", "open")


class Call(NamedTuple):
    """A call in progress. `number` comes from its circuit."""

    name: str
    number: int
    began: float
    deadline: float


class CircuitOpen(TierError):
    """The call was refused without asking the tier."""


class TierCalls:
    """The calls to one tier. Thread-safe; no call is made under the lock. `breaker` is fresh, and the template of both
    circuits: `put` has its own, since a store that no longer accepts writes (full, read-only) may be readable for long.
    `clock` is that of the tier's deadlines; `timeout_s` may be changed at any time."""

    def __init__(self, name: str, timeout_s: float, breaker: Breaker, clock: Callable[[], float]) -> None:
        self.name = name
        self.counters = Counter(zeros(TierCounters))
        self.last_error = ""
        # The last success of a call in the circuit of reads.
        self.answered_at = 0.0
        # The last call of a load that had no result: its time by the clock, and what happened.
        self.read_trouble = (-math.inf, "")
        self.timeout_s = timeout_s
        self._clock = clock
        breaker.since = clock()
        self._circuits = {"read": breaker, "write": copy.deepcopy(breaker)}
        self._circuit_of = {name: self._circuits["write" if name == "put" else "read"] for name in OPERATIONS}
        self._durations = {name: Histogram(FIRST_S, OCTAVES) for name in OPERATIONS}
        self._pending: dict[int, Call] = {}
        self._closed = False
        # Limits tracebacks of the plugin's bugs, by call and exception type.
        self._once = LogLimit.once()
        self._lock = threading.Lock()

    @property
    def state(self) -> str:
        """`closed`, `half-open` or `open`: the worse state of the two circuits."""
        return self._worst().state

    def wait_s(self, *names: str) -> float:
        """Return the seconds until the circuits admit these calls."""
        with self._lock:
            now = self._clock()
            return max(self._circuit_of[name].wait_s(now) for name in names)

    def probe_s(self) -> float:
        """Return the seconds until a ping may show whether the tier answers reads again; infinite if none is due."""
        with self._lock:
            circuit = self._circuit_of["ping"]
            return math.inf if self._closed or circuit.state == "closed" else circuit.wait_s(self._clock())

    def refuse_unless_closed(self, name: str) -> None:
        """Raise `CircuitOpen` unless the circuit is closed, also where it would admit this call as the one that
        decides: a request that tried it would wait, which an idle thread's ping does instead."""
        with self._lock:
            if self._circuit_of[name].state != "closed":
                raise self._refused(name)

    def count(self, **amounts: int) -> None:
        with self._lock:
            for name, amount in amounts.items():
                self.counters[name] += amount

    def status(self) -> dict[str, object]:
        """Return the known facts; never calls the tier, which may hang."""
        with self._lock:
            worst, now = self._worst(), self._clock()
            late = min(self._pending.values(), key=lambda call: call.deadline, default=None)
            overdue_s = max(now - late.deadline, 0.0) if late else 0.0
            return {
                "state": worst.state,
                "state_s": round(now - worst.since, 1),
                "circuits": {name: breaker.state for name, breaker in self._circuits.items()},
                "last_error": self.last_error,
                "pending_calls": len(self._pending),
                "oldest_call_s": round(max((now - call.began for call in self._pending.values()), default=0.0), 1),
                "overdue_call": late.name if late and overdue_s else "",
                "overdue_s": round(overdue_s, 1),
                "latency_ms": {name: _in_ms(each) for name, each in self._durations.items() if each.count},
                "seconds": {name: each.octaves() for name, each in self._durations.items()},
                **self.counters,
            }

    def call(self, name: str, operation: Callable[[float], R], timeout_s: float | None = None) -> R:
        """Call the operation with its deadline. Raises `TierError`; `CircuitOpen` if the call was refused."""
        call = self._begin(name, timeout_s or self.timeout_s)
        try:
            result = operation(call.deadline)
        except TierError as error:
            self._failed(call, error)
            raise
        except Exception as error:
            # Under no name: it refers to this frame, whose operation has views of the arena.
            raise self._failed(call, self._failure_of(name, error)) from error
        finally:
            with self._lock:
                del self._pending[id(call)]
        self._succeeded(call)
        return result

    def presume_writable(self) -> None:
        """Close the circuit of writes: the tier answers and no write waits, so it is not broken until a `put` fails."""
        with self._lock:
            circuit, now = self._circuits["write"], self._clock()
            call = None if circuit.state == "closed" else circuit.allow(now)
            if call is not None:
                circuit.succeeded(call, now)

    def _worst(self) -> Breaker:
        """Return the worse circuit; of two in the same state, the one that has been in it for longer."""
        return max(self._circuits.values(), key=lambda breaker: (STATES.index(breaker.state), -breaker.since))

    def _begin(self, name: str, timeout_s: float) -> Call:
        with self._lock:
            now = self._clock()
            if self._closed:
                raise TierError("the tier is closed", where=self.name)
            number = self._circuit_of[name].allow(now)
            if number is None:
                raise self._refused(name)
            call = Call(name, number, now, now + timeout_s)
            self._pending[id(call)] = call
            return call

    def _refused(self, name: str) -> CircuitOpen:
        """Count a call that is not made; the caller holds the lock."""
        self.counters["refused"] += 1
        self._note(name, "the tier is down")
        return CircuitOpen("the tier is down after failures", where=self.name, hint=self.last_error)

    def _failed(self, call: Call, error: TierError) -> TierError:
        said = str(error)  # a log record that waits in a queue would keep the error, its frames and their views
        with self._lock:
            circuit = self._circuit_of[call.name]
            was, quiet = circuit.state, self._closed
            circuit.failed(call.number, self._clock())
            opened = was == "closed" != circuit.state
            self.counters["errors"] += 1
            self.last_error = said
            self._note(call.name, "a call failed")
        if opened and not quiet:
            log.error("tier %s is down for %s: %s", self.name, _stopped_with(call), said)
        else:
            log.log(logging.DEBUG if quiet or was != "closed" else logging.WARNING, "tier %s: %s", self.name, said)
        return error

    def _note(self, name: str, what: str) -> None:
        if name in LOADING:
            self.read_trouble = self._clock(), what

    def _failure_of(self, name: str, error: Exception) -> TierError:
        """Wrap any exception as `TierError`. An exception that is not this framework's is a bug of the plugin: its
        traceback is logged once per call and type, later ones like any failure."""
        if isinstance(error, KVFrameworkError):
            return TierError(error.fact, where=error.where or self.name, hint=error.hint)
        cause = described(error)
        self.count(bugs=1)
        if self._once.passes((name, type(error))) and not self._closed:
            log.error("tier %s: %s raised %s, which is a bug in the plugin", self.name, name, cause, exc_info=error)
        return TierError(
            f"{name} raised {cause}, which is a bug in the plugin", where=self.name, hint="ask the plugin's author"
        )

    def _succeeded(self, call: Call) -> None:
        with self._lock:
            ended = self._clock()
            circuit = self._circuit_of[call.name]
            was, since = circuit.state, circuit.since
            if call.name == "usage":
                # A usage may come from memory, and is asked before every put: it proves nothing.
                circuit.undecided(call.number)
            else:
                circuit.succeeded(call.number, ended)
                if call.name != "put":
                    self.answered_at = ended
            back = was != "closed" == circuit.state
            self._durations[call.name].add(ended - call.began)
        if back:
            log.warning("tier %s works again for %s after %.0f s", self.name, _stopped_with(call), ended - since)


def _stopped_with(call: Call) -> str:
    return "writes" if call.name == "put" else "reads"


def _in_ms(durations: Histogram) -> dict[str, float]:
    quantiles = {name: round(durations.quantile(q) * 1e3, 3) for name, q in (("p50", 0.5), ("p99", 0.99))}
    return {"count": durations.count, **quantiles}

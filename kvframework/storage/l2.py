"""Owns one attached L2 tier: deadlines, circuit breaker, envelope, codec, room and counters around a `Tier` plugin.

Called from the storage threads (write-back, prefetch), never from the serving thread; every call blocks for at most the
tier's timeout, but for making room in a full tier, which may take `SCAN_S`.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

from kvframework.api import Outcome, PackedKey, Tier, TierUsage
from kvframework.errors import TierError
from kvframework.storage.breaker import Breaker
from kvframework.storage.codecs import CodecTable
from kvframework.storage.envelope import HEADER_BYTES, NO_CODEC, UNTOLD_LAYOUT, seal, unseal
from kvframework.storage.latency import Latencies
from kvframework.storage.tier_room import Watermarks, oldest

log = logging.getLogger(__name__)
R = TypeVar("R")

SCAN_S = 60.0
CHECK_EVERY_S = 5.0
DELETE_AT_ONCE = 256
# Names of codecs that are told in the log: they are whatever somebody wrote into the store.
MAX_FOREIGN = 64


class L2Store:
    """A tier as the controllers see it. Thread-safe. Raises `TierError` when the tier is down, its circuit is open, or
    it is closed.

    `codec` packs what is written; what is read may have been packed by any of `codecs`. `layout_of` gives the
    fingerprint of a namespace's object layout. `capabilities` are what the tier's provider declares.
    """

    def __init__(
        self,
        tier: Tier,
        *,
        timeout_s: float,
        breaker: Breaker | None = None,
        capabilities: Iterable[str] = (),
        codec: str = NO_CODEC,
        codecs: CodecTable | None = None,
        layout_of: Callable[[bytes], bytes] = lambda _namespace: UNTOLD_LAYOUT,
        watermarks: Watermarks = Watermarks(),  # noqa: B008  frozen
    ) -> None:
        self.name = tier.name
        self.timeout_s = timeout_s
        self.capabilities = frozenset(capabilities)
        self.counters: Counter[str] = Counter()
        self.last_error = ""
        self._tier = tier
        self._breaker = breaker or Breaker()
        self._codec = codec
        self._codecs = codecs or CodecTable()
        self._layout_of = layout_of
        self._watermarks = watermarks
        self._latencies: dict[str, Latencies] = {}
        self._foreign: set[str] = set()
        self._usage: TierUsage | None = None
        self._answered_at = 0.0
        self._closed = False
        self._lock = threading.Lock()
        self._making_room = threading.Lock()

    @property
    def state(self) -> str:
        return self._breaker.state

    @property
    def wants_touches(self) -> bool:
        """Whether the tier forgets what is not used."""
        return bool(self.capabilities & {"ttl", "scan"})

    def wait_s(self) -> float:
        """Seconds until the circuit lets a call through."""
        with self._lock:
            return self._breaker.wait_s(time.monotonic())

    def count(self, **amounts: int) -> None:
        """Adds to the counters that `status` shows."""
        with self._lock:
            self.counters.update(amounts)

    def contains(self, keys: Sequence[PackedKey]) -> list[bool]:
        outcomes = self._each("contains", keys, lambda deadline: self._tier.contains(keys, deadline=deadline))
        for key, outcome in zip(keys, outcomes, strict=True):
            if outcome is Outcome.DAMAGED:
                self._discard(key, "it is none that was stored here")
        return [outcome is Outcome.FOUND for outcome in outcomes]

    def get_into(self, keys: Sequence[PackedKey], ranges: Sequence[memoryview]) -> list[bool]:
        """Fills each range from the tier; True where its bytes are proven to be those that were stored.

        Received straight into the ranges. What is packed there is copied out once and unpacked into its place. A value
        that is damaged, foreign or of another format is deleted and counted.
        """
        headers = [bytearray(HEADER_BYTES) for _ in keys]
        parts = [[memoryview(header), view] for header, view in zip(headers, ranges, strict=True)]
        outcomes = self._each("get_into", keys, lambda deadline: self._tier.get_into(keys, parts, deadline=deadline))
        good = [
            self._open(key, header, view, outcome)
            for key, header, view, outcome in zip(keys, headers, ranges, outcomes, strict=True)
        ]
        self.count(
            hits=sum(good),
            misses=len(good) - sum(good),
            read_failed=outcomes.count(Outcome.FAILED),
            bytes_read=sum(view.nbytes for view, ok in zip(ranges, good, strict=True) if ok),
        )
        return good

    def put(self, keys: Sequence[PackedKey], values: Sequence[memoryview]) -> list[bool]:
        """Stores each value behind its header, sent straight from the given memory if no codec packs it."""
        parts: list[list[memoryview]] = []
        for key, value in zip(keys, values, strict=True):
            name, packed = self._codecs.pack(self._codec, value)
            layout = self._layout_of(key[:16])
            header = seal(key, packed, object_bytes=value.nbytes, codec=name, layout=layout)
            parts.append([memoryview(header), *packed])
        self._make_room([sum(part.nbytes for part in each) for each in parts])
        outcomes = self._each("put", keys, lambda deadline: self._tier.put(keys, parts, deadline=deadline))
        stored = [outcome is Outcome.STORED for outcome in outcomes]
        sizes = [value.nbytes for value, ok in zip(values, stored, strict=True) if ok]
        self.count(stored=len(sizes), store_failed=len(keys) - len(sizes), bytes_written=sum(sizes))
        return stored

    def delete(self, keys: Sequence[PackedKey]) -> int:
        """The number that was there."""
        outcomes = self._each("delete", keys, lambda deadline: self._tier.delete(keys, deadline=deadline))
        return outcomes.count(Outcome.DELETED)

    def touch(self, keys: Sequence[PackedKey]) -> None:
        self._call("touch", lambda deadline: self._tier.touch(keys, deadline=deadline))

    def close(self) -> None:
        """Refuses calls from now on and closes the tier, which ends the calls in flight. Idempotent, raises nothing."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
        try:
            self._tier.close()
        except Exception:
            log.exception("tier %s: closing it failed", self.name)

    def status(self) -> dict[str, object]:
        """What is known; never asks the tier, which may hang."""
        with self._lock:
            return {
                "name": self.name,
                "state": self.state,
                "last_error": self.last_error,
                "codec": self._codec,
                "capabilities": sorted(self.capabilities),
                "usage": self._usage
                and {
                    "used_bytes": int(self._usage.used_bytes),
                    "capacity_bytes": int(self._usage.capacity_bytes),
                },
                "latency_ms": {name: latencies.describe() for name, latencies in self._latencies.items()},
                **self.counters,
            }

    def check(self) -> None:
        """Asks the tier whether it works, unless it has just shown it, and how full it is. Raises nothing."""
        try:
            if time.monotonic() - self._answered_at >= CHECK_EVERY_S:
                self._call("ping", lambda deadline: self._tier.ping(deadline=deadline))
            if "capacity" in self.capabilities:
                self._ask_usage()
        except TierError:
            log.debug("tier %s: it does not work now", self.name)

    def _open(self, key: PackedKey, header: bytearray, place: memoryview, outcome: Outcome) -> bool:
        if outcome is not Outcome.FOUND:
            if outcome is Outcome.DAMAGED:
                self._discard(key, "it is none that was stored here")
            return False
        try:
            name, packed = unseal(header, key, place, layout=self._layout_of(key[:16]))
            if name == NO_CODEC:
                return True
            codec = self._codecs.get(name)
            if codec is None:
                self._pass_over(name)
                return False
            codec.decode_into(memoryview(bytes(packed)), place)
        except ValueError as error:
            self._discard(key, str(error))
            return False
        except Exception as error:  # noqa: BLE001  a bug of the codec says nothing about this value or the others
            self.count(codec_failed=1)
            log.error("tier %s: a value could not be unpacked, a miss: %r (key %s)", self.name, error, key.hex())
            return False
        return True

    def _pass_over(self, codec: str) -> None:
        self.count(foreign_codec=1)
        if codec not in self._foreign and len(self._foreign) < MAX_FOREIGN:
            self._foreign.add(codec)
            log.warning("tier %s: values packed by codec %r are misses: it is not in [codecs] allow", self.name, codec)

    def _discard(self, key: PackedKey, problem: str) -> None:
        self.count(corrupt=1)
        log.warning("tier %s: a value is unusable and is deleted: %s (key %s)", self.name, problem, key.hex())
        try:
            self.delete([key])
        except TierError:
            log.debug("tier %s: could not delete it", self.name)

    def _make_room(self, sizes: Sequence[int]) -> None:
        """Deletes what was used longest ago, if values of `sizes` would fill the tier beyond its high watermark."""
        if not self.capabilities >= {"capacity", "scan"}:
            return
        with self._making_room:
            excess = self._watermarks.excess(self._ask_usage(), sizes)
            if not excess:
                return
            leaving = self._call(
                "scan", lambda deadline: oldest(self._tier.scan(deadline=deadline), excess), timeout_s=SCAN_S
            )
            for first in range(0, len(leaving), DELETE_AT_ONCE):
                self.count(evicted=self.delete(leaving[first : first + DELETE_AT_ONCE]))

    def _ask_usage(self) -> TierUsage:
        self._usage = self._call("usage", lambda deadline: self._tier.usage(deadline=deadline))
        return self._usage

    def _each(self, name: str, keys: Sequence[PackedKey], operation: Callable[[float], list[Outcome]]) -> list[Outcome]:
        def checked(deadline: float) -> list[Outcome]:
            outcomes = operation(deadline)
            if len(outcomes) != len(keys):
                raise TierError(f"the tier answered {len(outcomes)} outcomes for {len(keys)} keys", where=self.name)
            return outcomes

        return self._call(name, checked)

    def _call(self, name: str, operation: Callable[[float], R], timeout_s: float | None = None) -> R:
        began = time.monotonic()
        with self._lock:
            if self._closed:
                raise TierError("the tier is closed", where=self.name)
            if not self._breaker.allow(began):
                self.counters["refused"] += 1
                raise TierError("the circuit is open after failures", where=self.name, hint=self.last_error)
        try:
            result = operation(began + (timeout_s or self.timeout_s))
        except Exception as error:
            with self._lock:
                self._breaker.failed(time.monotonic())
                self.counters["errors"] += 1
                self.last_error = str(error)
                level = logging.DEBUG if self._closed else logging.WARNING
            log.log(level, "tier %s: %s", self.name, error)
            if isinstance(error, TierError):
                raise
            raise TierError(f"{type(error).__name__}: {error}", where=self.name) from error
        with self._lock:
            ended = time.monotonic()
            if name == "usage":
                # A disk that cannot be written any more still tells how full it is, before every write.
                self._breaker.undecided()
            else:
                self._breaker.succeeded()
                self._answered_at = ended
            self._latencies.setdefault(name, Latencies()).add(ended - began)
        return result

"""An attached L2 tier: envelope, codec and space around a `Tier` plugin, over its calls (`tier_calls.py`).

Called from the storage threads (writes, prefetch), never from the serving thread. Each operation blocks: a call takes
at most the tier's timeout, except for listing a full tier to make space, which may take `SCAN_S`.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Protocol, TypeVar

import msgspec

from kvframework.api.codec import NO_CODEC, Codec
from kvframework.api.copying import joined
from kvframework.api.keys import PackedKey
from kvframework.api.tier import Outcome, Tier, TierUsage
from kvframework.errors import TierError
from kvframework.pricing import TierSpeed
from kvframework.storage.envelope import HEADER_BYTES, UNKNOWN_LAYOUT, checksum_in, seal, unseal
from kvframework.storage.l1.leases import PinLease, PromptPart
from kvframework.storage.l2.full_tier import Shares, Space, SpaceReservation, Watermarks, victims
from kvframework.storage.l2.tier_calls import Absences, Breaker, TierCalls
from kvframework.storage.namespaces import is_record_key

log = logging.getLogger(__name__)

# The codecs that this server may use, created on first use. Thread-safe: called from the storage threads.


class CodecTable:
    """Codecs by name. A name stored in L2 only selects among `makers`."""

    def __init__(self, makers: Mapping[str, Callable[[], Codec]] | None = None) -> None:
        self._makers = dict(makers or {})
        self._codecs: dict[str, Codec | None] = {}
        self._lock = threading.Lock()

    def get(self, name: str) -> Codec | None:
        """Return the codec, None if it is not allowed here or fails to start (logged once)."""
        with self._lock:
            if name not in self._makers:
                return None
            if name not in self._codecs:
                try:
                    self._codecs[name] = self._makers[name]()
                except Exception as error:  # noqa: BLE001  any error of a plugin turns its values into misses
                    log.error("codec %s cannot be used: %s", name, error)
                    self._codecs[name] = None
            return self._codecs[name]

    def pack(self, name: str, data: memoryview, dtype: str = "") -> tuple[str, Sequence[memoryview]]:
        """Return the codec's name and the packed form of elements of `dtype` ("" for unknown ones); `none` and the
        unchanged data where packing does not make it smaller."""
        codec = None if name == NO_CODEC else self.get(name)
        packed = self._encoded(name, codec, data, dtype) if codec is not None else None
        if packed is not None and sum(part.nbytes for part in packed) < data.nbytes:
            return name, packed
        return NO_CODEC, [data]

    def _encoded(self, name: str, codec: Codec, data: memoryview, dtype: str) -> Sequence[memoryview] | None:
        """Pack; None if the codec fails: this value is then stored unpacked, and other values are unaffected."""
        try:
            parts = codec.encode_elements(data, dtype)
            # Tiers rely on flat bytes.
            return [part if part.format == "B" and part.ndim == 1 else part.cast("B") for part in parts]
        except Exception as error:  # noqa: BLE001  any error of a plugin
            log.error("codec %s failed on %d bytes, which are stored unpacked: %r", name, data.nbytes, error)
            return None


R = TypeVar("R", bound="int | Outcome")
# Outcomes after which the tier does not have a value.
_ABSENT = (Outcome.MISSING, Outcome.DELETED, Outcome.DAMAGED)

SCAN_S = 60.0
CHECK_EVERY_S = 5.0
DELETE_AT_ONCE = 256
# Unknown codecs that are logged by name: any client of the store may have written these names.
MAX_FOREIGN = 64
MAX_PROBLEMS = 16
MAX_DETAILS_BYTES = 64 << 10


class L2Store:
    """A tier as the controllers see it. Thread-safe. Raises `TierError` when the tier is down, its circuit is open, or
    it is closed.

    `codec` packs written values; values read may have been packed by any of `codecs`. `layout_of` gives the fingerprint
    of a namespace's object layout, `dtype_of` the dtype of an object's elements. `breaker` is the template of the
    tier's circuits; `clock` differs from the tier's own only in a simulation, where each byte of an object may stand
    for `scale` bytes.
    """

    def __init__(
        self,
        tier: Tier,
        *,
        timeout_s: float,
        breaker: Breaker | None = None,
        codec: str = NO_CODEC,
        codecs: CodecTable | None = None,
        layout_of: Callable[[bytes], bytes] = lambda _namespace: UNKNOWN_LAYOUT,
        dtype_of: Callable[[PackedKey], str] = lambda _key: "",
        watermarks: Watermarks = Watermarks(),  # noqa: B008  frozen
        clock: Callable[[], float] = time.monotonic,
        scale: int = 1,
    ) -> None:
        self.name = tier.name
        self.capabilities = frozenset(tier.capabilities())
        self.read_only = tier.read_only
        self._keeps_space = self.capabilities >= {"scan", "usage"}
        self._tier = tier
        self._calls = TierCalls(tier.name, timeout_s, breaker or Breaker(), clock)
        self.counters = self._calls.counters
        self.count = self._calls.count
        self._codec = codec
        self._codecs = codecs or CodecTable()
        self._layout_of = layout_of
        self._dtype_of = dtype_of
        self._watermarks = watermarks
        self._clock = clock
        self.scale = scale
        # Receives, in a storage thread, the key of each value that is unusable.
        self.on_damaged: Callable[[PackedKey], None] = lambda _key: None
        # Receives, in a storage thread, the checksums of objects that it sends as they are.
        self.on_sealed: Callable[[Mapping[PackedKey, int]], None] = lambda _checksums: None
        # Receives, in a storage thread, objects that the tier was asked about, and whether it has each.
        self.on_seen: Callable[[Sequence[PackedKey], Sequence[bool]], None] | None = None
        # Of a tier that knows its capacity and lists its values.
        self.shares = Shares()
        self._foreign: set[str] = set()
        self._usage: TierUsage | None = None
        self._problems: list[str] = []
        self._details: Mapping[str, object] = {}
        self._space = Space()
        # What loads learn of its speed; whoever uses it holds `pricing`.
        self.speed = TierSpeed(clock())
        self.pricing = threading.Lock()
        self._absences = Absences()
        self._remembering = threading.Lock()

    @property
    def timeout_s(self) -> float:
        """The longest wait for a call that is given no other."""
        return self._calls.timeout_s

    def configure(self, *, timeout_s: float, watermarks: Watermarks) -> None:
        """Change the timeout and the watermarks, from the next call on. May be called from any thread."""
        self._calls.timeout_s = timeout_s
        self._watermarks = watermarks

    @property
    def state(self) -> str:
        """`closed`, `half-open` or `open`: the worse of the circuits of reads and writes."""
        return self._calls.state

    @property
    def read_trouble(self) -> tuple[float, str]:
        """When a load last got no answer of the tier, and why; the time is of the clock."""
        return self._calls.read_trouble

    @property
    def wants_touches(self) -> bool:
        """Whether the tier may delete unused values."""
        return "touch" in self.capabilities

    def wait_s(self, *calls: str) -> float:
        """Return the seconds until the circuits admit these calls; without any, the calls that `put` makes."""
        if not calls:
            calls = ("usage", "put") if self._keeps_space else ("put",)
        return max(self._calls.wait_s(name) for name in calls)

    def probe_s(self) -> float:
        """Return the seconds until `answers` may end what keeps loads from the tier; infinite if nothing does."""
        return self._calls.probe_s()

    def spare_the_request(self, name: str) -> None:
        """Raise `CircuitOpen` unless the tier answers reads as far as is known: a request that tried it would wait,
        which `answers` does instead."""
        self._calls.refuse_unless_closed(name)

    def clear(self, dropped: Mapping[PackedKey, int], wanted: Callable[[PackedKey], bool]) -> tuple[int, int]:
        """Delete the values under the keys of `dropped`, which have these sizes, and, if the tier can list its values,
        all that are `wanted`: (values deleted, their bytes). Blocks for a listing and several calls."""
        if self.read_only:
            return 0, 0
        sizes = dict(dropped)
        if self.lists:
            sizes |= self._calls.call(
                "scan",
                lambda at: {each.key: each.nbytes for each in self._tier.scan(deadline=at) if wanted(each.key)},
                timeout_s=SCAN_S,
            )
        keys = list(sizes)
        deleted: list[PackedKey] = []
        for first in range(0, len(keys), DELETE_AT_ONCE):
            part = keys[first : first + DELETE_AT_ONCE]
            outcomes = self._each("delete", part, partial(self._delete, part))
            deleted += [key for key, outcome in zip(part, outcomes, strict=True) if outcome is Outcome.DELETED]
        return len(deleted), sum(sizes[key] for key in deleted)

    def listed_namespaces(self) -> set[bytes]:
        """Return the namespaces of the values in a tier that can list them, else none. Blocks for a listing."""
        if not self.lists:
            return set()
        return self._calls.call(
            "scan", lambda at: {each.key[:16] for each in self._tier.scan(deadline=at)}, timeout_s=SCAN_S
        )

    @property
    def lists(self) -> bool:
        """Whether the tier can list its values."""
        return "scan" in self.capabilities

    def _delete(self, keys: Sequence[PackedKey], deadline: float) -> list[Outcome]:
        return self._tier.delete(keys, deadline=deadline)

    def lacked(self, keys: Sequence[PackedKey]) -> list[bool]:
        """Return which of `keys` the tier lacked a moment ago, as `Absences` remembers it. Never calls the tier."""
        with self._remembering:
            now = self._clock()
            return [self._absences.lacked(key, now) for key in keys]

    def contains(self, keys: Sequence[PackedKey]) -> list[bool]:
        """Ask which of `keys` the tier has, without those that it `lacked` a moment ago."""
        lacked = self.lacked(keys)
        asked = [key for key, absent in zip(keys, lacked, strict=True) if not absent]
        if not asked:
            return [False] * len(keys)
        outcomes = self._ask("contains", asked, lambda at: self._tier.contains(asked, deadline=at))
        self.count(misses=outcomes.count(Outcome.MISSING))
        for key, outcome in zip(asked, outcomes, strict=True):
            if outcome is Outcome.DAMAGED:
                self._discard(key, "it was not stored by this framework")
        found = iter(outcomes)
        return [not absent and next(found) is Outcome.FOUND for absent in lacked]

    def get(self, keys: Sequence[PackedKey], ranges: Sequence[memoryview]) -> list[bool]:
        """Fill each range from the tier; True where its bytes are verified as those that were stored.

        Values are received straight into the ranges. Packed bytes are copied out once and unpacked into their place. A
        value that is damaged, foreign or of another format is deleted and counted.
        """
        headers = [bytearray(HEADER_BYTES) for _ in keys]
        parts = [[memoryview(header), view] for header, view in zip(headers, ranges, strict=True)]

        def receive(deadline: float) -> list[int | Outcome]:
            answers = self._tier.get_into(keys, parts, deadline=deadline)
            if Outcome.FOUND in answers:
                raise TierError("the tier does not report how many bytes it received", where=self.name)
            return answers

        outcomes = self._ask("get_into", keys, receive)
        if Outcome.FAILED in outcomes:
            self._calls.read_trouble = self._clock(), "a value could not be read"
        good = []
        for key, header, view, outcome in zip(keys, headers, ranges, outcomes, strict=True):
            good.append(self._open(key, header, view, outcome))
        read = [self._stands_for(key, view.nbytes) for key, view, ok in zip(keys, ranges, good, strict=True) if ok]
        self.count(hits=len(read), bytes_read=sum(read))
        if len(read) < len(keys):
            self.count(misses=outcomes.count(Outcome.MISSING), read_failed=outcomes.count(Outcome.FAILED))
        return good

    def put(self, keys: Sequence[PackedKey], values: Sequence[memoryview]) -> list[bool]:
        """Store each value behind its header, sent straight from the given memory if no codec packs it. Values that
        exceed the space of a small tier are sent in several calls, each after making space."""
        parts: list[list[memoryview]] = []
        plain: dict[PackedKey, int] = {}
        for key, value in zip(keys, values, strict=True):
            name, packed = self._codecs.pack(self._codec, value, self._dtype_of(key))
            layout = self._layout_of(key[:16])
            header = seal(key, packed, object_bytes=value.nbytes, codec=name, layout=layout)
            parts.append([memoryview(header), *packed])
            if name == NO_CODEC:
                plain[key] = checksum_in(header)
        self.on_sealed(plain)
        if not self._keeps_space:
            return self._put_together(keys, values, parts)
        stored: list[bool] = []
        while len(stored) < len(keys):
            rest = slice(len(stored), None)
            sizes = [
                self._stands_for(key, sum(part.nbytes for part in each))
                for key, each in zip(keys[rest], parts[rest], strict=True)
            ]
            taken = self._make_space(sizes)
            now = slice(len(stored), len(stored) + taken.number)
            try:
                stored += self._put_together(keys[now], values[now], parts[now])
            finally:
                self._space.release(taken)
        return stored

    def _put_together(
        self, keys: Sequence[PackedKey], values: Sequence[memoryview], parts: Sequence[Sequence[memoryview]]
    ) -> list[bool]:
        try:
            outcomes = self._each("put", keys, lambda at: self._tier.put(keys, parts, deadline=at))
        finally:
            # A call that failed may have written.
            with self._remembering:
                self._absences.written(keys)
        stored = [outcome is Outcome.STORED for outcome in outcomes]
        sizes = [self._stands_for(key, value.nbytes) for key, value, ok in zip(keys, values, stored, strict=True) if ok]
        self.count(stored=len(sizes), bytes_written=sum(sizes))
        if len(sizes) < len(keys) or self._problems:
            self._ask_for_facts()
        if len(sizes) < len(keys):
            self._calls.last_error = "; ".join(self._problems) or "the tier does not say why"
            self.count(store_failed=len(keys) - len(sizes))
        return stored

    def delete(self, keys: Sequence[PackedKey]) -> int:
        outcomes = self._each("delete", keys, lambda at: self._tier.delete(keys, deadline=at))
        return outcomes.count(Outcome.DELETED)

    def touch(self, keys: Sequence[PackedKey]) -> None:
        self._calls.call("touch", lambda at: self._tier.touch(keys, deadline=at))

    def answers(self) -> bool:
        """Whether the tier answers at all, now."""
        try:
            self._calls.call("ping", lambda at: self._tier.ping(deadline=at))
        except TierError:
            return False
        return True

    def check(self) -> None:
        """Check that the tier works, unless it has just shown it, and how full it is. Raises nothing. The caller
        ensures that no write waits."""
        self._ask_for_facts()
        try:
            stale = self._clock() - self._calls.answered_at >= CHECK_EVERY_S
            if stale and not self.answers():
                return
            self._calls.presume_writable()
            if "usage" in self.capabilities:
                self._ask_usage()
        except TierError:
            log.debug("tier %s: it does not work at the moment", self.name)

    def close(self) -> None:
        """Refuse later calls and close the tier, which ends the calls in flight. Idempotent, raises nothing."""
        if self._calls.close():
            try:
                self._tier.close()
            except Exception:
                log.exception("tier %s: closing it failed", self.name)

    def status(self) -> dict[str, object]:
        """Return the known facts; never calls the tier, which may hang."""
        usage = self._usage
        with self.pricing:
            prices, queued = self.speed.prices(), self.speed.queued_bytes
        return {
            "name": self.name,
            "codec": self._codec,
            "read_only": self.read_only,
            "problems": self._problems,
            "details": self._details,
            "capabilities": sorted(self.capabilities),
            "usage": usage and {"used_bytes": int(usage.used_bytes), "capacity_bytes": int(usage.capacity_bytes)},
            "load_bytes_per_s": 1 / prices[0] if prices else 0.0,
            "load_call_s": prices[1] if prices else 0.0,
            "load_queued_bytes": queued,
            **self._calls.status(),
        }

    def _open(self, key: PackedKey, header: bytearray, place: memoryview, outcome: int | Outcome) -> bool:
        if isinstance(outcome, Outcome):
            if outcome is Outcome.DAMAGED:
                self._discard(key, "it was not stored by this framework")
            return False
        try:
            name, packed = unseal(header, key, place, received=outcome, layout=self._layout_of(key[:16]))
            if name == NO_CODEC:
                return True
            codec = self._codecs.get(name)
            if codec is None:
                self._pass_over(name)
                self.on_damaged(key)
                return False
            codec.decode_into(joined([packed]), place)
        except ValueError as error:
            self._discard(key, str(error))
            return False
        except Exception as error:  # noqa: BLE001  a bug of the codec is no evidence about this value or the others
            self.count(codec_failed=1)
            self.on_damaged(key)
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
        self.on_damaged(key)
        if self.read_only:
            log.warning("tier %s: a value is unusable: %s (key %s)", self.name, problem, key.hex())
            try:
                self._tier.rejected(key)
            except Exception:
                log.exception("tier %s: its `rejected` failed", self.name)
            return
        log.warning("tier %s: a value is unusable and is deleted: %s (key %s)", self.name, problem, key.hex())
        try:
            self.delete([key])
        except TierError:
            log.debug("tier %s: could not delete it", self.name)

    def _ask_for_facts(self) -> None:
        """For the status: what the tier says of itself. A bug of it is a problem there, and raises nothing."""
        try:
            self._problems = [str(each) for each in list(self._tier.problems())[:MAX_PROBLEMS]]
        except Exception as error:  # noqa: BLE001  a bug of the plugin
            self._problems = [f"its `problems` raised {type(error).__name__}"]
        try:
            details = msgspec.json.encode(self._tier.status())
            if len(details) > MAX_DETAILS_BYTES:
                raise ValueError(f"{len(details)} bytes")
            self._details = msgspec.json.decode(details, type=dict[str, Any])
        except Exception as error:  # noqa: BLE001  a bug of the plugin
            self._problems.append(f"its `status` raised {type(error).__name__}")
            self._details = {}

    def _make_space(self, sizes: Sequence[int]) -> SpaceReservation:
        """Delete the least recently used values, if values of `sizes` and those of concurrent writers would fill the
        tier beyond its high watermark. Returns the space of those that may be written now, which the caller
        releases."""
        deleted = self._space.asking()
        usage = self._ask_usage()
        taken = self._space.take(usage, sizes, self._watermarks, deleted)
        if taken.excess:
            try:
                self._delete_oldest(taken.excess, usage.capacity_bytes)
            except BaseException:
                self._space.release(taken)
                raise
        return taken

    def _delete_oldest(self, nbytes: int, capacity: int) -> None:
        left = nbytes
        try:
            leaving = self._calls.call(
                "scan",
                lambda at: victims(self._tier.scan(deadline=at), nbytes, capacity, self.shares),
                timeout_s=SCAN_S,
            )
            for first in range(0, len(leaving), DELETE_AT_ONCE):
                part = leaving[first : first + DELETE_AT_ONCE]
                self.count(evicted=self.delete(part))
                gone = nbytes * len(part) // len(leaving)
                left -= gone
                self._space.deleted(gone)
        finally:
            self._space.deleted(left)

    def _stands_for(self, key: PackedKey, nbytes: int) -> int:
        return nbytes if self.scale == 1 or is_record_key(key) else nbytes * self.scale

    def _ask_usage(self) -> TierUsage:
        self._usage = self._calls.call("usage", lambda at: self._tier.usage(deadline=at))
        return self._usage

    def _ask(self, name: str, keys: Sequence[PackedKey], operation: Callable[[float], list[R]]) -> list[R]:
        """Call a reading operation like `_each`, and remember what is missing."""
        missing: list[PackedKey] = []
        with self._remembering:
            question = self._absences.ask()
        try:
            outcomes = self._each(name, keys, operation)
            missing += [key for key, outcome in zip(keys, outcomes, strict=True) if outcome is Outcome.MISSING]
            return outcomes
        finally:
            with self._remembering:
                self._absences.answered(question, missing, self._clock())

    def _each(self, name: str, keys: Sequence[PackedKey], operation: Callable[[float], list[R]]) -> list[R]:
        def checked(deadline: float) -> list[R]:
            outcomes = operation(deadline)
            if len(outcomes) != len(keys):
                raise TierError(f"the tier answered {len(outcomes)} outcomes for {len(keys)} keys", where=self.name)
            return outcomes

        outcomes = self._calls.call(name, checked)
        if self.on_seen is not None:
            self._see(self.on_seen, keys, outcomes)
        return outcomes

    @staticmethod
    def _see(
        on_seen: Callable[[Sequence[PackedKey], Sequence[bool]], None],
        keys: Sequence[PackedKey],
        outcomes: Sequence[int | Outcome],
    ) -> None:
        """Report what the outcomes of any call say of the values; a failure says nothing."""
        sure = [(key, each) for key, each in zip(keys, outcomes, strict=True) if each is not Outcome.FAILED]
        on_seen([key for key, _ in sure], [each not in _ABSENT for _, each in sure])


# The operations of L1 that writers and loads use. `kvframework.storage.table` provides them, above this room.


class L1(Protocol):
    """All methods are thread-safe; pins and reservations belong to the server itself and end with the writer or
    load."""

    def which_present(self, keys: Sequence[PackedKey]) -> list[bool]: ...

    def any_writing(self, keys: Sequence[PackedKey]) -> bool: ...

    def pin_present(self, keys: Sequence[PackedKey]) -> list[PinLease]: ...

    def release(self, leases: Sequence[PinLease]) -> None: ...

    def bytes_of(self, lease: PinLease) -> memoryview: ...

    def reserve_load(
        self, key: PackedKey, nbytes: int, prompt: PromptPart, client: int
    ) -> tuple[str, memoryview] | None: ...

    def finish_load(self, lease_id: str, good: bool) -> PinLease | None: ...

    def sealed(self, checksums: Mapping[PackedKey, int]) -> None: ...

    def damaged(self, key: PackedKey) -> None: ...

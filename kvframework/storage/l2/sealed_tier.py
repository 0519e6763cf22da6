"""An attached L2 tier: envelope, codec and space around a `Tier` plugin, over its calls (`tier_calls.py`)."""

from __future__ import annotations

import heapq
import logging
import math
import threading
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import Any, Protocol, TypeVar

import msgspec

from kvframework.api.codec import MAX_OVERHEAD, NO_CODEC, Codec, ValueName, ValueRefused
from kvframework.api.copying import joined
from kvframework.api.keys import PackedKey
from kvframework.api.tier import Outcome, Terms, Tier, TierEntry, TierUsage
from kvframework.errors import TierError
from kvframework.pricing import TierSpeed
from kvframework.storage import namespaces
from kvframework.storage.l1.entries import StoredObject
from kvframework.storage.l1.leases import PromptPart
from kvframework.storage.l2.tier_calls import Absences, Breaker, TierCalls

log = logging.getLogger(__name__)


class CodecTable:
    """Codecs by name. A name stored in L2 only selects among `makers`. Those `required` (see `CodecProvider`) are
    created here, which raises what they raise; the others on first use. Thread-safe."""

    def __init__(self, makers: Mapping[str, Callable[[], Codec]] | None = None, required: Collection[str] = ()) -> None:
        self._makers = dict(makers or {})
        self.required = frozenset(required)
        self._codecs: dict[str, Codec | None] = {name: self._makers[name]() for name in required}
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

    def pack(self, name: str, data: memoryview, dtype: str, value: ValueName) -> tuple[str, Sequence[memoryview]]:
        """Return the codec's name and the packed form of elements of `dtype` ("" for unknown ones); `none` and the
        unchanged data where packing does not make it smaller. Raises `TierError` where a required codec fails."""
        codec = None if name == NO_CODEC else self.get(name)
        try:
            parts = codec.encode_named(data, dtype, value) if codec is not None else [data]
            # Tiers rely on flat bytes.
            packed = [part if part.format == "B" and part.ndim == 1 else part.cast("B") for part in parts]
        except Exception as error:  # noqa: BLE001  any error of a plugin, which costs nothing but this value's packing
            if name in self.required:
                raise TierError(f"codec {name}: {error}") from None
            log.error("codec %s failed, so %d bytes are stored unpacked: %r", name, data.nbytes, error)
            return NO_CODEC, [data]
        kept = name in self.required or sum(part.nbytes for part in packed) < data.nbytes
        return (name, packed) if kept else (NO_CODEC, [data])


@dataclass(frozen=True)
class Watermarks:
    """Fractions of a tier's capacity: above `high`, values are deleted down to `low`."""

    high: float = 0.95
    low: float = 0.85

    def excess(self, usage: TierUsage, sizes: Iterable[int]) -> int:
        """Return the bytes to delete before values of `sizes` are written, 0 if none. Too large values are ignored."""
        high = self.high * usage.capacity_bytes
        wanted = usage.used_bytes + sum(nbytes for nbytes in sizes if nbytes <= high)
        return max(wanted - int(self.low * usage.capacity_bytes), 0) if wanted > high else 0


@dataclass(frozen=True)
class Shares:
    """The shares of a tier's capacity by number of tenant, 0 for all without a name: what others do not take from each
    while they have something to give, and the most that each keeps once space is made. `tenant_of` numbers a key;
    `quotas` are the most bytes of each that the tier admits, 0 for all."""

    tenant_of: Callable[[PackedKey], int] = lambda _key: 0
    least: Sequence[float] = (0.0,)
    most: Sequence[float] = (1.0,)
    names: Sequence[str] = ("",)
    quotas: Sequence[int] = (0,)


def victims(entries: Iterable[TierEntry], nbytes: int, capacity: int, shares: Shares) -> list[PackedKey]:
    """Return keys with at least `nbytes` in total, if there are as many: first of tenants that have more than their
    most, then of those that have more than their least, then of any; of each the least recently used first. Memory is
    bounded by the result and one entry, for each tenant."""
    oldest: list[list[tuple[float, int, TierEntry]]] = [[] for _ in shares.least]
    held, totals, now = [0] * len(oldest), [0] * len(oldest), time.time()
    for number, entry in enumerate(entries):
        if (entry.used_at or 0.0) > now:  # it is promised
            continue
        tenant = shares.tenant_of(entry.key)
        heap = oldest[tenant]
        heapq.heappush(heap, (-(entry.used_at or 0.0), number, entry))
        totals[tenant] += entry.nbytes
        held[tenant] += entry.nbytes
        while heap and held[tenant] - heap[0][2].nbytes >= nbytes:
            held[tenant] -= heapq.heappop(heap)[2].nbytes
    chosen: dict[PackedKey, None] = {}
    for kept in (shares.most, shares.least, [-math.inf] * len(oldest)):
        for _, _, entry in sorted(chain(*oldest), reverse=True):
            tenant = shares.tenant_of(entry.key)
            if nbytes > 0 and entry.key not in chosen and totals[tenant] > kept[tenant] * capacity:
                chosen[entry.key] = None
                nbytes -= entry.nbytes
                totals[tenant] -= entry.nbytes
    return list(chosen)


T = TypeVar("T")
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


class L2Store(TierCalls):
    """A tier as the controllers see it. Thread-safe; called from the storage threads, never from the serving thread.
    Each operation blocks: a call at most for the tier's timeout, a listing for `SCAN_S`. Raises `TierError` when the
    tier is down, its circuit is open, or it is closed.

    `codec` packs written values; values read may have been packed by any of `codecs`. `layout_of` gives the fingerprint
    of a namespace's object layout, `dtype_of` the dtype of an object's elements. `breaker` is the template of the
    tier's circuits; `clock` differs from the tier's own only in a simulation: a byte may stand for `scale` bytes."""

    def __init__(
        self,
        tier: Tier,
        *,
        timeout_s: float,
        breaker: Breaker | None = None,
        codec: str = NO_CODEC,
        codecs: CodecTable | None = None,
        layout_of: Callable[[bytes], bytes] = lambda _namespace: namespaces.UNKNOWN_LAYOUT,
        dtype_of: Callable[[PackedKey], str] = lambda _key: "",
        watermarks: Watermarks = Watermarks(),
        clock: Callable[[], float] = time.monotonic,
        scale: int = 1,
    ) -> None:
        super().__init__(tier.name, timeout_s, breaker or Breaker(), clock)
        self.capabilities = frozenset(tier.capabilities())
        self.read_only = tier.read_only
        self.lists = "scan" in self.capabilities
        # Whether the tier may delete unused values.
        self.wants_touches = "touch" in self.capabilities
        self._keeps_space = self.capabilities >= {"scan", "usage"}
        # The calls that `put` makes.
        self.writing = ("usage", "put") if self._keeps_space else ("put",)
        self._tier = tier
        self._codec = codec
        self._codecs = codecs or CodecTable()
        # Loaded values whose form is an old one, which the writer takes and writes again.
        self.stale: set[PackedKey] = set()
        self._layout_of = layout_of
        self._dtype_of = dtype_of
        self.watermarks = watermarks
        self.scale = scale
        # These are called in a storage thread. Receives the key of each value that is unusable.
        self.on_damaged: Callable[[PackedKey], None] = lambda _key: None
        # Receives the checksums of objects that it has stored as they are.
        self.on_sealed: Callable[[Mapping[PackedKey, int]], None] = lambda _checksums: None
        # Receives objects that the tier was asked about, and whether it has each.
        self.on_seen: Callable[[Sequence[PackedKey], Sequence[bool]], None] | None = None
        self._foreign: set[str] = set()
        self._usage: TierUsage | None = None
        self._problems: list[str] = []
        self._details: Mapping[str, object] = {}
        # Whose a key is; the fractions are used by a tier that knows its capacity and lists its values.
        self.shares = Shares()
        self._making_space = threading.Lock()
        # The tier's speed, measured by loads; guarded by `pricing`.
        self.speed = TierSpeed(clock())
        self.pricing = threading.Lock()
        self._absences = Absences()

    def clear(self, dropped: Mapping[PackedKey, int], wanted: Callable[[PackedKey], bool]) -> tuple[int, int]:
        """Delete the values under the keys of `dropped`, which have these sizes, and, if the tier can list its values,
        all that are `wanted`: (values deleted, their bytes). Blocks for a listing and several calls."""
        if self.read_only:
            return 0, 0
        sizes = dict(dropped)
        if self.lists:
            sizes |= self._listed(lambda found: {each.key: each.nbytes for each in found if wanted(each.key)})
        deleted = self.delete(list(sizes))
        return len(deleted), sum(sizes[key] for key in deleted)

    def remaining(self, dropped: Iterable[PackedKey], wanted: Callable[[PackedKey], bool]) -> int:
        """Return how many of the `wanted` values the tier lists, or without a listing has of `dropped`. Blocks."""
        if self.lists:
            return self._listed(lambda found: sum(wanted(each.key) for each in found))
        return sum(self.contains(list(dropped)))

    def listed_namespaces(self) -> set[bytes]:
        """Return the namespaces of the values in a tier that can list them, else none. Blocks for a listing."""
        return self._listed(lambda found: {each.key[:16] for each in found}) if self.lists else set()

    def record(self, namespace: bytes) -> namespaces.NamespaceRecord | None:
        """Return the namespace's record, None if the tier has none that is good."""
        value = bytearray(namespaces.RECORD_BYTES)
        good = self.get([namespaces.record_key(namespace)], [memoryview(value)])[0]
        return namespaces.decode_record(bytes(value)) if good else None

    def lacked(self, keys: Sequence[PackedKey]) -> list[bool]:
        """Return which of `keys` the tier lacked a moment ago, as `Absences` remembers it. Never calls the tier."""
        with self._lock:
            now = self._clock()
            return [self._absences.lacked(key, now) for key in keys]

    def contains(self, keys: Sequence[PackedKey]) -> list[bool]:
        """Ask which of `keys` the tier has, without those that it `lacked` a moment ago."""
        lacked = self.lacked(keys)
        asked = [key for key, absent in zip(keys, lacked, strict=True) if not absent]
        if not asked:
            return [False] * len(keys)
        outcomes = self._ask("contains", asked, partial(self._tier.contains, asked))
        self.count(misses=outcomes.count(Outcome.MISSING))
        for key, outcome in zip(asked, outcomes, strict=True):
            if outcome is Outcome.DAMAGED:
                self._discard(key, "kvframework did not store it")
        found = iter(outcomes)
        return [not absent and next(found) is Outcome.FOUND for absent in lacked]

    def get(self, keys: Sequence[PackedKey], ranges: Sequence[memoryview]) -> list[bool]:
        """Fill each range from the tier; True where its bytes are verified as those that were stored. Values are
        received straight into the ranges. Packed bytes are copied out once and unpacked into their place. A value that
        is damaged, foreign or of another format is deleted and counted."""
        headers = [bytearray(namespaces.HEADER_BYTES) for _ in keys]
        tails = [memoryview(bytearray(MAX_OVERHEAD if self._codecs.required else 0)) for _ in keys]
        read = zip(headers, ranges, tails, strict=True)
        parts = [[memoryview(header), view, *([tail] if tail else ())] for header, view, tail in read]

        def receive(deadline: float) -> list[int | Outcome]:
            answers = self._tier.get_into(keys, parts, deadline=deadline)
            if Outcome.FOUND in answers:
                raise TierError("the tier does not report how many bytes it received", where=self.name)
            return answers

        outcomes = self._ask("get_into", keys, receive)
        if Outcome.FAILED in outcomes:
            self.read_trouble = self._clock(), "a value could not be read"
        good = list(map(self._open, keys, headers, ranges, tails, outcomes))
        sizes = [self._stands_for(key, view.nbytes) for key, view, ok in zip(keys, ranges, good, strict=True) if ok]
        self.count(hits=len(sizes), bytes_read=sum(sizes))
        if len(sizes) < len(keys):
            self.count(misses=outcomes.count(Outcome.MISSING), read_failed=outcomes.count(Outcome.FAILED))
        return good

    def put(self, keys: Sequence[PackedKey], values: Sequence[memoryview]) -> list[bool]:
        """Store each value behind its header, without a copy if no codec packs it; none if a required codec fails."""
        parts: list[list[memoryview]] = []
        plain: dict[PackedKey, int] = {}
        for key, value in zip(keys, values, strict=True):
            layout = self._layout_of(key[:16])
            name, packed = self._codecs.pack(self._codec, value, self._dtype_of(key), self._name(key, layout))
            header = namespaces.seal(key, packed, object_bytes=value.nbytes, codec=name, layout=layout)
            parts.append([memoryview(header), *packed])
            if name == NO_CODEC:
                plain[key] = namespaces.checksum_in(header)
        self._make_space(keys, parts)
        asked = {key: (sum(part.nbytes for part in each),) for key, each in zip(keys, parts, strict=True)}
        refused = {key for key, each in self._admit(asked).items() if each is not Outcome.STORED}
        some = [(key, each) for key, each in zip(keys, parts, strict=True) if key not in refused]
        put = partial(self._tier.put, [key for key, _ in some], [each for _, each in some])
        try:
            answers = iter(self._each("put", [key for key, _ in some], put))
            outcomes = [Outcome.FAILED if key in refused else next(answers) for key in keys]
        finally:
            # A call that failed may have written.
            with self._lock:
                self._absences.written(keys)
        stored = [outcome is Outcome.STORED for outcome in outcomes]
        self.on_sealed({key: plain[key] for key, ok in zip(keys, stored, strict=True) if ok and key in plain})
        sizes = [self._stands_for(key, value.nbytes) for key, value, ok in zip(keys, values, stored, strict=True) if ok]
        self.count(stored=len(sizes), bytes_written=sum(sizes))
        if len(sizes) < len(keys) or self._problems:
            self._ask_for_facts()
        if len(sizes) < len(keys):
            self.last_error = "; ".join(self._problems) or "the tier does not say why"
            self.count(store_failed=len(keys) - len(sizes))
        return stored

    def keep(self, promises: Mapping[PackedKey, tuple[int, float, int]]) -> list[PackedKey]:
        """Make promises, of (0, Unix time, priority) by key; return the keys of values that the tier lacks."""
        answers = self._admit(promises)
        made = list(answers.values()).count(Outcome.STORED)
        lacking = [key for key, each in answers.items() if each is Outcome.MISSING]
        self.count(promised=made, promise_refused=len(promises) - made - len(lacking))
        return lacking

    def _admit(self, asked: Mapping[PackedKey, tuple[Any, ...]]) -> dict[PackedKey, Outcome]:
        """Ask the tier what it admits of tenants with a quota: the last fields of `Terms` by key."""
        shares, terms = self.shares, []
        for key, each in asked.items() if any(shares.quotas) and "admit" in self.capabilities else ():
            tenant = shares.tenant_of(key)
            if shares.quotas[tenant]:
                terms.append(Terms(key, shares.names[tenant], shares.quotas[tenant], *each))
        answers = self.call("admit", lambda at: self._tier.admit(terms, deadline=at)) if terms else []
        return {each.key: outcome for each, outcome in zip(terms, answers, strict=True)}

    def delete(self, keys: Sequence[PackedKey]) -> list[PackedKey]:
        """Delete values in several calls; return the keys of those that were there."""
        deleted: list[PackedKey] = []
        for first in range(0, len(keys), DELETE_AT_ONCE):
            part = keys[first : first + DELETE_AT_ONCE]
            outcomes = self._each("delete", part, partial(self._tier.delete, part))
            deleted += [key for key, outcome in zip(part, outcomes, strict=True) if outcome is Outcome.DELETED]
        return deleted

    def touch(self, keys: Sequence[PackedKey]) -> None:
        self.call("touch", lambda at: self._tier.touch(keys, deadline=at))

    def answers(self) -> bool:
        try:
            self.call("ping", lambda at: self._tier.ping(deadline=at))
        except TierError:
            return False
        return True

    def check(self) -> None:
        """Check that the tier works, unless it has just shown it, and how full it is. Raises nothing. The caller
        ensures that no write waits."""
        self._ask_for_facts()
        try:
            stale = self._clock() - self.answered_at >= CHECK_EVERY_S
            if stale and not self.answers():
                return
            self.presume_writable()
            if "usage" in self.capabilities:
                self._ask_usage()
        except TierError:
            log.debug("tier %s does not work for now", self.name)

    def close(self) -> None:
        """Refuse later calls and close the tier, which ends the calls in flight. Idempotent, raises nothing."""
        with self._lock:
            before, self._closed = self._closed, True
        try:
            if not before:
                self._tier.close()
        except Exception:
            log.exception("closing tier %s failed", self.name)

    def status(self) -> dict[str, object]:
        usage = self._usage
        with self.pricing:
            prices, queued = self.speed.price.prices, self.speed.queued_bytes
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
            **super().status(),
        }

    def _name(self, key: PackedKey, layout: bytes) -> ValueName:
        return ValueName(key, layout, self.shares.names[self.shares.tenant_of(key)])

    def _open(
        self, key: PackedKey, header: bytearray, place: memoryview, tail: memoryview, read: int | Outcome
    ) -> bool:
        if isinstance(read, Outcome):
            if read is Outcome.DAMAGED:
                self._discard(key, "kvframework did not store it")
            return False
        try:
            layout = self._layout_of(key[:16])
            name, packed = namespaces.unseal(header, key, place, tail, received=read, layout=layout)
            if self._codec in self._codecs.required and name not in self._codecs.required:
                raise ValueRefused("unsealed", f"it was packed by {name!r}, and values here are sealed")
            if name == NO_CODEC:
                return True
            codec = self._codecs.get(name)
            if codec is None:
                self._pass_over(name)
                self.on_damaged(key)
                return False
            source = packed if packed.nbytes > place.nbytes else joined([packed])
            if codec.decode_named(source, place, self._name(key, bytes(header[namespaces.LAYOUT]))):
                self.stale.add(key)
        except ValueError as error:
            self._discard(key, str(error), error.reason if isinstance(error, ValueRefused) else "corrupt")
            return False
        except Exception as error:  # noqa: BLE001  a bug of the codec is no evidence about this value or the others
            self.count(codec_failed=1)
            self.on_damaged(key)
            log.error("tier %s: a value could not be unpacked and is a miss: %r (key %s)", self.name, error, key.hex())
            return False
        return True

    def _pass_over(self, codec: str) -> None:
        self.count(foreign_codec=1)
        if codec not in self._foreign and len(self._foreign) < MAX_FOREIGN:
            self._foreign.add(codec)
            log.warning("tier %s: values packed by codec %r are misses: [codecs] allow lacks it", self.name, codec)

    def _discard(self, key: PackedKey, problem: str, reason: str = "corrupt") -> None:
        self.count(**{reason: 1})
        self.on_damaged(key)
        if reason != "corrupt":
            self.read_trouble = self._clock(), f"a value is refused ({reason}): {problem}"
        if reason == "no_key":
            return
        deleted = "" if self.read_only else " and is deleted"
        log.warning("tier %s: a value is unusable%s: %s (key %s)", self.name, deleted, problem, key.hex())
        try:
            self._tier.rejected(key) if self.read_only else self.delete([key])
        except TierError:
            log.debug("tier %s: the value could not be deleted", self.name)
        except Exception:
            log.exception("tier %s: the plugin's `rejected` failed", self.name)

    def _ask_for_facts(self) -> None:
        """For the status: what the tier says of itself. A bug of it is a problem there, and raises nothing."""
        try:
            codec = self._codecs.get(self._codec)
            told = [*(codec.problems() if codec is not None else ()), *self._tier.problems()]
            self._problems = [str(each) for each in told[:MAX_PROBLEMS]]
        except Exception as error:  # noqa: BLE001  a bug of the plugin
            self._problems = [f"the plugin's `problems` raised {type(error).__name__}"]
        try:
            details = msgspec.json.encode(self._tier.status())
            if len(details) > MAX_DETAILS_BYTES:
                raise ValueError(f"the status has {len(details)} bytes")
            self._details = msgspec.json.decode(details, type=dict[str, Any])
        except Exception as error:  # noqa: BLE001  a bug of the plugin
            self._problems.append(f"the plugin's `status` raised {type(error).__name__}")
            self._details = {}

    def _make_space(self, keys: Sequence[PackedKey], parts: Sequence[Sequence[memoryview]]) -> None:
        """Delete the least recently used values if these would fill the tier beyond its high watermark. One writer does
        so at a time; the others write meanwhile into what is above the watermark, and the rest is tried again."""
        if not self._keeps_space or not self._making_space.acquire(blocking=False):
            return
        try:
            sizes = [
                self._stands_for(key, sum(part.nbytes for part in each)) for key, each in zip(keys, parts, strict=True)
            ]
            usage = self._ask_usage()
            excess = self.watermarks.excess(usage, sizes)
            if excess:
                leaving = self._listed(lambda found: victims(found, excess, usage.capacity_bytes, self.shares))
                self.count(evicted=len(self.delete(leaving)))
        finally:
            self._making_space.release()

    def _listed(self, read: Callable[[Iterable[TierEntry]], T]) -> T:
        return self.call("scan", lambda at: read(self._tier.scan(deadline=at)), timeout_s=SCAN_S)

    def _stands_for(self, key: PackedKey, nbytes: int) -> int:
        return nbytes if self.scale == 1 or namespaces.is_record_key(key) else nbytes * self.scale

    def _ask_usage(self) -> TierUsage:
        self._usage = self.call("usage", lambda at: self._tier.usage(deadline=at))
        return self._usage

    def _ask(self, name: str, keys: Sequence[PackedKey], operation: Callable[..., list[R]]) -> list[R]:
        """Call a reading operation like `_each`, and remember what is missing."""
        writes = self._absences.writes
        outcomes = self._each(name, keys, operation)
        missing = [key for key, outcome in zip(keys, outcomes, strict=True) if outcome is Outcome.MISSING]
        with self._lock:
            self._absences.answered(missing, writes, self._clock())
        return outcomes

    def _each(self, name: str, keys: Sequence[PackedKey], operation: Callable[..., list[R]]) -> list[R]:
        def checked(deadline: float) -> list[R]:
            outcomes = operation(deadline=deadline)
            if len(outcomes) != len(keys):
                raise TierError(f"the tier answered {len(outcomes)} outcomes for {len(keys)} keys", where=self.name)
            return outcomes

        outcomes = self.call(name, checked)
        if self.on_seen is not None:
            # A failure says nothing of its value.
            sure = [(key, each) for key, each in zip(keys, outcomes, strict=True) if each is not Outcome.FAILED]
            self.on_seen([key for key, _ in sure], [each not in _ABSENT for _, each in sure])
        return outcomes


class L1(Protocol):
    """The operations of L1 that writers and loads use, which `kvframework.storage.table` provides. All are thread-safe;
    pins and reservations belong to the server itself and end with the writer or load."""

    def which_present(self, keys: Sequence[PackedKey]) -> list[bool]: ...
    def any_writing(self, keys: Sequence[PackedKey]) -> bool: ...
    def pin_present(self, keys: Sequence[PackedKey]) -> list[StoredObject]: ...
    def release(self, objects: Sequence[StoredObject]) -> None: ...
    def bytes_of(self, stored: StoredObject) -> memoryview: ...
    def reserve_load(
        self, key: PackedKey, nbytes: int, prompt: PromptPart, client: int
    ) -> tuple[str, memoryview] | None: ...
    def finish_load(self, lease_id: str, good: bool) -> list[StoredObject]: ...
    def loaded_ahead(self, objects: Sequence[StoredObject]) -> None: ...
    def sealed(self, checksums: Mapping[PackedKey, int]) -> None: ...
    def damaged(self, key: PackedKey) -> None: ...

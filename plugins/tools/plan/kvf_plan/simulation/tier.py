"""A tier of a simulation: it knows what it holds, and how long its calls take. Values are all zeros."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence

from kvf_plan.simulation.events import Channel, VirtualTime
from kvf_plan.simulation.settings import TierSpeed
from kvf_plan.simulation.threads import Sleep
from kvframework.api.tier import Outcome, PackedKey, Tier, TierEntry, TierUsage
from kvframework.errors import TierError
from kvframework.storage.namespaces import HEADER_BYTES, is_record_key, seal


class VirtualTier(Tier):
    """`scale` is how many bytes each byte of a value stands for. A value is there once its write has ended; a call that
    would end after its deadline fails at that time."""

    def __init__(
        self,
        speed: TierSpeed,
        time: VirtualTime,
        sleep: Sleep,
        *,
        start: float,
        scale: int,
        layout_of: Callable[[bytes], bytes],
    ) -> None:
        self.name = speed.name
        self.read_only = speed.has_all
        self.speed = speed
        slow = [type(each)(each.begin_s + start, each.end_s + start, each.factor) for each in speed.slow]
        self.reads = Channel(speed.read_bytes_per_s, slow)
        own = speed.write_bytes_per_s
        self.writes = self.reads if own is None else Channel(own, slow)
        self.read_bytes = self.written_bytes = 0
        self.used_bytes = self.most_bytes = 0
        self._time = time
        self._sleep = sleep
        self._scale = scale
        self._layout_of = layout_of
        # By key, least recently used first: bytes, and since when it is there and when it was used.
        self._values: OrderedDict[PackedKey, list[float]] = OrderedDict()
        self._records: dict[PackedKey, bytes] = {}

    def capabilities(self) -> frozenset[str]:
        return frozenset({"touch", "usage", "scan"} if self.speed.capacity_bytes is not None else ())

    def __len__(self) -> int:
        return len(self._values)

    def knows(self, keys: Sequence[PackedKey], nbytes: int) -> None:
        """It has these values, of so many bytes each, from now on, as if by another's writes."""
        for key in keys:
            self._hold(key, nbytes * self._scale, self._time.now)

    def contains(self, keys: Sequence[PackedKey], *, deadline: float) -> list[Outcome]:
        self._lasts(self._time.now + self.speed.latency_s, deadline)
        return [Outcome.FOUND if self._has(key) else Outcome.MISSING for key in keys]

    def get_into(
        self, keys: Sequence[PackedKey], parts: Sequence[Sequence[memoryview]], *, deadline: float
    ) -> list[int | Outcome]:
        outcomes: list[int | Outcome] = []
        nbytes = 0
        for key, (header, place) in zip(keys, parts, strict=True):
            if key in self._records:
                value = self._records[key]
                header[:], place[: len(value) - HEADER_BYTES] = value[:HEADER_BYTES], value[HEADER_BYTES:]
                outcomes.append(len(value))
            elif self._has(key):
                header[:] = seal(key, [place], object_bytes=place.nbytes, layout=self._layout_of(key[:16]))
                nbytes += place.nbytes * self._scale
                outcomes.append(HEADER_BYTES + place.nbytes)
            else:
                outcomes.append(Outcome.MISSING)
        self._lasts(self.reads.send(nbytes, self._time.now, deadline) + self.speed.latency_s, deadline)
        self.read_bytes += nbytes
        return outcomes

    def put(
        self, keys: Sequence[PackedKey], parts: Sequence[Sequence[memoryview]], *, deadline: float
    ) -> list[Outcome]:
        records = [index for index, key in enumerate(keys) if is_record_key(key)]
        # A value's header takes no time.
        sizes = [sum([part.nbytes for part in each[1:]]) * self._scale for each in parts]
        for index in records:
            sizes[index] = 0
        total = sum(sizes)
        ends = self.writes.send(total, self._time.now, deadline) + self.speed.latency_s
        self._lasts(ends, deadline)
        self.written_bytes += total
        for index in records:
            self._records[keys[index]] = b"".join(parts[index])
        for key, nbytes in zip(keys, sizes, strict=True):
            if key not in self._records:
                self._hold(key, nbytes, ends)
        return [Outcome.STORED] * len(keys)

    def delete(self, keys: Sequence[PackedKey], *, deadline: float) -> list[Outcome]:
        self._lasts(self._time.now + self.speed.latency_s, deadline)
        return [self._dropped(key) for key in keys]

    def touch(self, keys: Sequence[PackedKey], *, deadline: float) -> None:
        self._lasts(self._time.now + self.speed.latency_s, deadline)
        for key in keys:
            value = self._values.get(key)
            if value is not None:
                value[2] = self._time.now
                self._values.move_to_end(key)

    def usage(self, *, deadline: float) -> TierUsage:
        capacity = self.speed.capacity_bytes
        return TierUsage(self.used_bytes, self.used_bytes if capacity is None else capacity)

    def scan(self, *, deadline: float) -> Iterator[TierEntry]:
        for key, (nbytes, _, used_at) in self._values.items():
            yield TierEntry(key, int(nbytes), used_at)

    def ping(self, *, deadline: float) -> None:
        self._lasts(self._time.now + self.speed.latency_s, deadline)

    def close(self) -> None:
        self._values.clear()

    def _lasts(self, until: float, deadline: float) -> None:
        self._sleep.until(min(until, deadline))
        if until > deadline:
            self._sleep.failed = True
            raise TierError(f"no answer by {deadline:g} s", where=self.name)

    def _has(self, key: PackedKey) -> bool:
        value = self._values.get(key)
        return key in self._records if value is None else value[1] <= self._time.now

    def _hold(self, key: PackedKey, nbytes: int, since: float) -> None:
        before = self._values.pop(key, None)
        self.used_bytes += nbytes - int(before[0] if before else 0)
        self.most_bytes = max(self.most_bytes, self.used_bytes)
        there = since if before is None else min(before[1], since)
        self._values[key] = [nbytes, there, since]

    def _dropped(self, key: PackedKey) -> Outcome:
        if self._records.pop(key, None) is not None:
            return Outcome.DELETED
        value = self._values.pop(key, None)
        if value is None:
            return Outcome.MISSING
        self.used_bytes -= int(value[0])
        return Outcome.DELETED

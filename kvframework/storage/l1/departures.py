"""What left L1: how many objects for which cause, how long unused, how soon wanted again, and which hits a larger L1
would give. Pure. An eviction costs 2 us, a lookup that hits 0.2 us, each evicted chunk that a lookup misses 0.5 us.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence

from kvframework.api.keys import PackedKey
from kvframework.histogram import Histogram
from kvframework.storage.l1.allocator import ALIGNMENT
from kvframework.storage.l1.capacity_curve import CapacityCurve
from kvframework.storage.l1.ghosts import CAUSES, EVICTIONS, LAST_EVICTION, Cause, Ghost, Ghosts
from kvframework.storage.l1.leases import StoredObject

# A ghost has one byte for the model.
_MOST_MODELS = 255
_MOST_NAMESPACES = 4096
# Objects dropped by one store that are remembered: a lookup misses its first chunk first, of some groups.
MOST_DROPPED = 32
_FIRST_S = 0.1
_OCTAVES = 20

FindRow = Callable[[bytes, Sequence[bytes]], "list[StoredObject | None]"]


class Departures:
    """See the module. `capacity` in bytes; `most_ghosts` 0 keeps no ghosts, and without them no curve. `model_of` names
    the model of a namespace, "" for none."""

    def __init__(
        self, capacity: int, most_ghosts: int, model_of: Callable[[bytes], str], clock: Callable[[], float]
    ) -> None:
        self._ghosts = Ghosts(most_ghosts)
        self._curve = CapacityCurve(capacity // ALIGNMENT)
        self._evicted = [0] * len(EVICTIONS)
        self._idle = Histogram(_FIRST_S, _OCTAVES)
        self._wanted = Histogram(_FIRST_S, _OCTAVES)
        self._model_of = model_of
        self._clock = clock
        self._models = [""]
        self._model_ids: dict[bytes, int] = {}

    def left(self, stored: StoredObject, cause: Cause, by: PackedKey | None = None) -> None:
        """Record an object that leaves L1, and `by` whose object it was replaced."""
        now = self._clock()
        if cause > LAST_EVICTION:
            self._ghosts.left(stored.key, cause, now)
            return
        self._evicted[cause] += 1
        idle_s = now - abs(stored.used)
        self._idle.add(idle_s)
        if self._ghosts.most:
            units = (stored.length + ALIGNMENT - 1) // ALIGNMENT
            # No call for a model that is known.
            model = 0 if by is None else self._model_ids.get(by[:16]) or self._model_id(by)
            self._ghosts.left(stored.key, cause, now, idle_s, model, self._curve.stack.push(units), units)

    def lost(self, keys: Sequence[PackedKey], cause: Cause) -> None:
        """Record objects that did not get into L1: dropped, or damaged in a tier."""
        self.back(keys)
        now = self._clock()
        for key in keys:
            self._ghosts.left(key, cause, now)

    def back(self, keys: Sequence[PackedKey]) -> None:
        """Record objects that are in L1 again."""
        if not self._ghosts.held:
            return
        now = self._clock()
        for key in keys:
            slot = self._ghosts.slot(key)
            if slot >= 0:
                self._want(slot, now)
                place, units = self._ghosts.forget(slot)
                if place:
                    self._curve.stack.take(place, units)

    def looked_up(self, row_of: FindRow, prefix: bytes, digests: Sequence[bytes], hits: int, tokens: int) -> None:
        """Record a lookup of chunks of `tokens` tokens, of which the first `hits` are in L1. The row of `prefix` stands
        for all rows: objects of one chunk come and go together."""
        self._curve.looked_up(len(digests) * tokens, hits * tokens)
        if hits == len(digests) or not self._ghosts.held:
            return
        first = digests[hits]
        if row_of(prefix, [first])[0] is None:
            slot = self._ghosts.slot(prefix + first)
            if slot < 0:
                return
            self._want(slot, self._clock())
        self._curve.missed(self._places(row_of, prefix, digests[hits:]), tokens)

    def was_done(self, key: PackedKey) -> bool:
        """Whether a key that is not in L1 left it since no one was to ask again, as far as that is remembered."""
        slot = self._ghosts.slot(key)
        return slot >= 0 and self._ghosts.facts(slot)[0] == Cause.HINTED

    def ghost(self, key: PackedKey) -> Ghost | None:
        """Return the ghost of a key that is not in L1, None if there is none."""
        slot = self._ghosts.slot(key)
        if slot < 0:
            return None
        cause, at, idle_s, by = self._ghosts.facts(slot)
        return Ghost(CAUSES[cause], at, idle_s, self._models[by])

    def status(self) -> dict[str, object]:
        return {
            "evicted": {CAUSES[cause]: self._evicted[cause] for cause in EVICTIONS},
            "evicted_idle_s": self._idle.octaves(),
            "wanted_after_eviction_s": self._wanted.octaves(),
            "ghosts": {"held": self._ghosts.held, "most": self._ghosts.most, "bytes": self._ghosts.nbytes},
            "more_capacity": self._curve.rates(ALIGNMENT, self._reach()),
        }

    def _reach(self) -> float:
        """Return the units of evicted objects up to which next to none is forgotten."""
        evicted = sum(self._evicted)
        units = self._curve.stack.pushed / evicted if evicted else math.inf
        return units * self._ghosts.most / 2 if self._ghosts.most else 0.0

    def _places(self, row_of: FindRow, prefix: bytes, digests: Sequence[bytes]) -> Iterator[float]:
        """Yield the places of the chunks' objects, infinity for one that is here, up to the first that is neither here
        nor was evicted."""
        for stored, digest in zip(row_of(prefix, digests), digests, strict=True):
            if stored is not None:
                yield math.inf
                continue
            slot = self._ghosts.slot(prefix + digest)
            place = self._ghosts.place(slot) if slot >= 0 else 0
            if not place:
                return
            yield place

    def _want(self, slot: int, now: float) -> None:
        after = self._ghosts.want(slot, now)
        if after is not None:
            self._wanted.add(after)

    def _model_id(self, key: PackedKey) -> int:
        """Return the number of the model whose object `key` names; 0 beyond the bound."""
        namespace = key[:16]
        known = self._model_ids.get(namespace)
        if known is None:
            name = self._model_of(namespace)
            if name not in self._models and len(self._models) <= _MOST_MODELS:
                self._models.append(name)
            known = self._models.index(name) if name in self._models else 0
            if len(self._model_ids) >= _MOST_NAMESPACES:
                self._model_ids.clear()
            self._model_ids[namespace] = known
        return known

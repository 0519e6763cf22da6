"""Load or recompute: a LOOKUP's hit in the tiers is cut where computing the rest is quicker.

The engines say how fast they are, the tiers are measured (`kvframework.pricing`); the decision falls once the tiers
have said what they have, in a storage thread, so that what L1 answers alone pays nothing for it.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median

from kvframework.pricing import EngineSpeed, Priced, TierPart, Traffic, Turns, cut
from kvframework.service.keys import KeyGrid
from kvframework.service.records import PendingLookup
from kvframework.storage.l2.loading import BATCH_BYTES, BATCH_OBJECTS
from kvframework.storage.l2.sealed_tier import L2Store
from kvframework.storage.manager import StorageManager

# Chunks that a load brings which only shows whether a tier is quick again.
PROBE_CHUNKS = 2
# Requests of one engine that count once: an engine asks again for a request that waits.
MOST_REQUESTS = 1024


@dataclass(eq=False)
class _Engine:
    """A client session whose lookups say how fast its engine is. `loading` are its lookups whose loads are under way,
    with the seconds in which it computes the rest."""

    name: str
    pid: int
    speed: EngineSpeed
    traffic: Traffic
    loading: dict[PendingLookup, float] = field(default_factory=dict)
    requests: set[str] = field(default_factory=set)


class Pricing:
    """Thread-safe. `on` may be changed at any time."""

    def __init__(self, storage: StorageManager, *, on: bool) -> None:
        self.on = on
        self._storage = storage
        self._clock = storage.clock
        self._engines: dict[int, _Engine] = {}
        self._lock = threading.Lock()
        self._priced = self._cut = self._cut_tokens = 0
        self._saved_s = 0.0

    def asked(self, asked: PendingLookup, speed: EngineSpeed) -> None:
        client, request_id = asked.client, asked.key.request_id
        with self._lock:
            engine = self._engines.get(client.session_id)
            if engine is None:
                engine = _Engine(client.name, client.pid, speed, Traffic(asked.began))
                self._engines[client.session_id] = engine
            engine.speed = speed
            if request_id not in engine.requests:
                if len(engine.requests) >= MOST_REQUESTS:
                    engine.requests.clear()
                engine.requests.add(request_id)
                engine.traffic.add(asked.began)

    def end_session(self, session_id: int) -> None:
        with self._lock:
            self._engines.pop(session_id, None)

    def located(self, asked: PendingLookup, here: Sequence[bool], source: Mapping[int, L2Store]) -> None:
        """Decide what of a hit is loaded: L1 has the objects `here` of `asked.grid.flat`, tiers those of `source`."""
        grid, speed = asked.grid, asked.speed
        if not self.on or speed is None or grid is None or not source:
            return
        l1 = grid.hit(here)
        found = grid.hit([there or index in source for index, there in enumerate(here)])
        if found <= l1:
            return
        now = self._clock()
        # Of windows and states most ends within a prefix are of no use.
        stride = found - l1 if grid.has_windows else 1
        stores = set(source.values())
        parts = []
        for store in stores:
            with store.pricing:
                turns = store.speed.turns(now)
            load_s = list(_load_s(grid, source, store, turns, range(l1, found + 1, stride)))
            parts.append(TierPart(turns, load_s))
        first = asked.key.start + l1 * grid.desc.chunk_tokens
        wait_s, rate = max(speed.queued_s - (now - asked.began), 0.0), 0.0
        with self._lock:
            engine = self._engines.get(asked.client.session_id)
            if engine is not None:
                rate, _ = engine.traffic.rates(now)
                wait_s += sum(engine.loading.values())
            # For the eviction policy; one engine that is mistaken has little weight among others.
            self._storage.table.compute_s = 1 / median(
                [each.speed.tokens_per_s for each in self._engines.values()] or [speed.tokens_per_s]
            )
        tokens = stride * grid.desc.chunk_tokens
        best = cut(parts, speed, wait_s=wait_s, rate=rate, first=first, last=asked.key.end, chunk_tokens=tokens)
        chunks = l1 + best.chunks * stride
        # A tier that nothing was loaded from for long may be quick again.
        if chunks < found and [store for store in stores if _probes(store, now)]:
            chunks = min(chunks + max(PROBE_CHUNKS, stride), found)
        asked.priced = best._replace(chunks=chunks, found=found)
        with self._lock:
            if engine is not None and chunks > l1 and not asked.over:
                engine.loading[asked] = speed.prefill_s(first + (chunks - l1) * grid.desc.chunk_tokens, asked.key.end)

    def ended(self, asked: PendingLookup, priced: Priced) -> None:
        assert asked.grid is not None
        with self._lock:
            engine = self._engines.get(asked.client.session_id)
            if engine is not None:
                engine.loading.pop(asked, None)
            self._priced += 1
            if priced.is_cut:
                self._cut += 1
                self._cut_tokens += (priced.found - priced.chunks) * asked.grid.desc.chunk_tokens
                self._saved_s += priced.saved_s

    def status(self) -> dict[str, object]:
        now = self._clock()
        with self._lock:
            return {
                "on": self.on,
                "lookups": self._priced,
                "cut": self._cut,
                "cut_tokens": self._cut_tokens,
                "saved_s": self._saved_s,
                "engines": [
                    {
                        "client": engine.name,
                        "pid": engine.pid,
                        "tokens_per_s": engine.speed.tokens_per_s,
                        "attention_tokens": engine.speed.attention_tokens,
                        "queued_s": engine.speed.queued_s,
                        "requests_per_s": engine.traffic.rates(now)[0],
                    }
                    for engine in self._engines.values()
                ],
            }


def _probes(store: L2Store, now: float) -> bool:
    with store.pricing:
        return store.speed.probes(now)


def _load_s(
    grid: KeyGrid, source: Mapping[int, L2Store], store: L2Store, turns: Turns, cuts: Sequence[int]
) -> Iterator[float]:
    """Yield for each of `cuts` the seconds in which the tier loads what it has of a hit of so many chunks."""
    sizes = [group.nbytes * store.scale for group in grid.row_groups]
    rows = len(sizes)
    nbytes = objects = end = 0
    for chunks in cuts:
        indices: Sequence[int] = range(end, chunks * rows)
        end = chunks * rows
        if grid.has_windows:
            nbytes = objects = 0
            indices = grid.needed(chunks)
        for index in indices:
            if source.get(index) is store:
                nbytes += sizes[index % rows]
                objects += 1
        yield turns.work_s(nbytes, max(objects / BATCH_OBJECTS, nbytes / BATCH_BYTES, 1.0)) if objects else 0.0

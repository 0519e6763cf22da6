"""Load or recompute: a LOOKUP's hit in the tiers is cut where computing the rest is quicker. Engines say how fast they
are, tiers are measured (`kvframework.pricing`); the decision falls in a storage thread, once the tiers have said what
they have. And the limits of tenants: a hit in the tiers is cut to what is left, and loaded at the tenant's pace."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from statistics import median

import msgspec

from kvframework.api.requests import ClientInfo
from kvframework.pricing import EngineSpeed, LoadRate, Priced, cut
from kvframework.service.keys import KeyGrid
from kvframework.service.records import PendingLookup
from kvframework.storage.l2.loading import BATCH_BYTES, BATCH_OBJECTS, Pace
from kvframework.storage.l2.sealed_tier import L2Store
from kvframework.storage.manager import StorageManager

# Cuts that are priced at most, and the chunks of a load that only shows whether a tier is quick again.
MOST_CUTS, PROBE_CHUNKS = 256, 2
MOST_MODELS = 256


class Pricing:
    """`located` runs in storage threads, `status` in any, the rest on the serving thread."""

    def __init__(self, storage: StorageManager, *, on: bool) -> None:
        self.on = on
        self._storage = storage
        self._engines: dict[int, tuple[ClientInfo, EngineSpeed]] = {}  # by session
        # What engines last said by model, for the first hits of one that has computed nothing yet.
        self._by_model: dict[str, EngineSpeed] = {}
        self._counts = {"lookups": 0, "cut": 0, "cut_tokens": 0, "saved_s": 0.0}

    def asked(self, client: ClientInfo, model: str, speed: EngineSpeed) -> None:
        self._engines[client.session_id] = client, speed
        if model in self._by_model or len(self._by_model) < MOST_MODELS:
            self._by_model[model] = speed

    def saved_s(self, asked: PendingLookup, hit_tokens: int) -> float:
        """Return what a hit saves at the speed of its engine, or of the last engine of its model."""
        speed = asked.speed or self._by_model.get(asked.key.model_name)
        return 0.0 if speed is None else speed.prefill_s(asked.key.start, asked.key.start + hit_tokens)

    def _limited(self, rate: LoadRate, grid: KeyGrid, l1: int, found: int) -> tuple[int, Pace]:
        """Return the chunks of a hit that the tenant may load, of `l1` to `found`, and their pace."""
        with self._storage.table.lock:
            now, each = self._storage.clock(), (grid.nbytes(found) - grid.nbytes(l1)) / (found - l1)
            most = min(l1 + int(max(rate.room(now), 0.0) // max(each, 1.0)), found)
            return most, (rate.take((most - l1) * each, now), rate.bytes_per_s)

    def end_session(self, session_id: int) -> None:
        self._engines.pop(session_id, None)

    def located(self, asked: PendingLookup, here: Sequence[bool], source: Mapping[int, L2Store]) -> Pace | None:
        """Decide what of a hit is loaded: L1 has the objects `here` of `asked.grid.flat`, tiers those of `source`."""
        grid, speed, pace = asked.grid, asked.speed, None
        if (asked.rate is None and (not self.on or speed is None)) or grid is None or not source:
            return None
        l1 = grid.hit(here)
        found = grid.hit([there or index in source for index, there in enumerate(here)])
        if asked.rate is not None and found > l1:
            most, pace = self._limited(asked.rate, grid, l1, found)
            asked.most, found = (None if most == found else most), most
        if not self.on or speed is None or found <= l1:
            return pace
        # For the eviction policy; one engine that is mistaken has little weight among others.
        known = [each.tokens_per_s for _, each in list(self._engines.values())]
        self._storage.table.compute_s = 1 / median(known or [speed.tokens_per_s])
        # Of windows and states most ends within a prefix are of no use.
        stride = found - l1 if not grid.ends_anywhere else -(-(found - l1) // MOST_CUTS)
        cuts = [*range(l1, found, stride), found]
        start, tokens, now = asked.key.start, grid.desc.chunk_tokens, self._storage.clock()
        compute_s = [speed.prefill_s(start + chunks * tokens, asked.key.end) for chunks in cuts]
        wait_s = max(speed.queued_s - (now - asked.began), 0.0)
        priced = cut(cuts, list(_load_s(grid, source, cuts)), compute_s, wait_s)
        if priced.chunks < found and [store for store in set(source.values()) if _probes(store, now)]:
            priced = priced._replace(chunks=min(priced.chunks + max(PROBE_CHUNKS, stride), found))
        asked.priced = priced
        return pace

    def ended(self, priced: Priced, chunk_tokens: int) -> None:
        self._counts["lookups"] += 1
        if priced.chunks < priced.found:
            self._counts["cut"] += 1
            self._counts["cut_tokens"] += (priced.found - priced.chunks) * chunk_tokens
            self._counts["saved_s"] += priced.saved_s

    def status(self) -> dict[str, object]:
        engines = [
            {"client": client.name, "pid": client.pid, **msgspec.structs.asdict(speed)}
            for client, speed in list(self._engines.values())
        ]
        return {"on": self.on, **self._counts, "engines": engines}


def _load_s(grid: KeyGrid, source: Mapping[int, L2Store], cuts: Sequence[int]) -> Iterator[float]:
    """Yield for each of `cuts` the seconds until the slowest tier has loaded what it has of a hit of so many chunks."""
    rows, end = len(grid.prefixes), 0
    nbytes, objects = dict.fromkeys(source.values(), 0.0), dict.fromkeys(source.values(), 0)
    for chunks in cuts:
        for index in grid.needed(chunks) if grid.has_windows else range(end * rows, chunks * rows):
            store = source.get(index)
            if store is not None:
                nbytes[store] += grid.nbytes_of(index) * store.scale
                objects[store] += 1
        end = chunks
        yield max(_seconds(store, size, objects[store]) for store, size in nbytes.items())


def _seconds(store: L2Store, nbytes: float, objects: int) -> float:
    with store.pricing:
        return store.speed.load_s(nbytes, max(objects / BATCH_OBJECTS, nbytes / BATCH_BYTES, 1.0))


def _probes(store: L2Store, now: float) -> bool:
    with store.pricing:
        return store.speed.probes(now)

"""The pages of one host pool: which the server has, and their way between pool and arena. Engine side; SGLang's storage
threads call it.

Each call ends by its own deadline, also beside a server that hangs; whatever fails is a miss.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Collection, Sequence
from itertools import takewhile
from typing import NamedTuple, TypeVar

from kvf_sglang.pools import PoolForm
from kvframework.api.futures import Future
from kvframework.api.hasher import DIGEST_BYTES
from kvframework.api.transport import LoadOutcome, Registration, StoreOutcome
from kvframework.client import KVClient, LoadGrant, LookupResult, RequestHashes, WorkerAdapter

log = logging.getLogger(__name__)

# Pages of one question: the server answers at most 32768 objects, those of all ranks and layer groups.
ASKED_OBJECTS = 1 << 14
# Well before the server's default of 60 s ends a ticket.
TICKET_HOLDS_S = 20.0
MOST_TICKETS = 256
# A copy that was begun ends by itself; only a broken transport takes longer.
_LAST_RESORT_S = 60.0

O = TypeVar("O", LoadOutcome, StoreOutcome)  # noqa: E741


class Salt:
    """The salt of all requests of this engine: "" until the cache is cleared, then another one each time."""

    def __init__(self, engine: str) -> None:
        self._engine = engine
        self._times = 0

    def renew(self) -> None:
        self._times += 1

    @property
    def text(self) -> str:
        return f"cleared-{self._times}-{self._engine}" if self._times else ""


class _Held(NamedTuple):
    last: bytes
    salt: str
    until: float
    result: LookupResult


class Tickets:
    """The tickets of hits that are not loaded yet, by the digest of their last page. Thread-safe."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._held: list[_Held] = []
        self._lock = threading.Lock()

    def hold(self, result: LookupResult, last: bytes, salt: str) -> list[LookupResult]:
        """Return those that are to be freed."""
        with self._lock:
            self._held.append(_Held(last, salt, self._clock() + TICKET_HOLDS_S, result))
            return self._ended(())

    def grants(self, last: bytes, salt: str, tokens: int) -> Sequence[LoadGrant]:
        """What a question has prepared that found so many tokens up to this page under this salt, once."""
        with self._lock:
            held = [each for each in self._held if (each.last, each.salt) == (last, salt)]
        found = [each.result for each in held if each.result.hit_tokens == tokens]
        return found[-1].take_grants() if found else ()

    def take(self, ends: Collection[bytes]) -> list[LookupResult]:
        """The tickets whose last page is one of these, or whose time is over: to be freed."""
        with self._lock:
            return self._ended(ends)

    def _ended(self, ends: Collection[bytes]) -> list[LookupResult]:
        now, oldest = self._clock(), len(self._held) - MOST_TICKETS
        ended = [each.last in ends or each.until < now or index < oldest for index, each in enumerate(self._held)]
        freed = [each.result for each, over in zip(self._held, ended, strict=True) if over]
        self._held = [each for each, over in zip(self._held, ended, strict=True) if not over]
        return freed


class PoolPages:
    """One registered pool, whose pages are the chunks of its `registration`. SGLang loads and stores in two threads at
    once, and an adapter belongs to one: so there are two, both registered. Questions may come from a third thread.
    `slots` are the pool's indices of one page, `page_bytes` the bytes of a page of this rank."""

    def __init__(
        self,
        client: KVClient,
        form: PoolForm,
        registration: Registration,
        loads: WorkerAdapter,
        stores: WorkerAdapter,
        salt: Salt,
        *,
        clock: Callable[[], float],
    ) -> None:
        self._client, self._loads, self._stores, self._lookups = client, loads, stores, loads.scheduler()
        self._loading, self._storing = threading.Lock(), threading.Lock()
        self._salt = salt
        self._clock = clock
        self._tickets = Tickets(clock)
        self._groups, self._page_tokens = len(registration.layout.groups), registration.desc.chunk_tokens
        self._step = max(ASKED_OBJECTS // (self._groups * registration.world_size), 1)
        self.slots, self.holds_states = form.slots, form.state
        self.page_bytes = registration.desc.nbytes

    def close(self) -> None:
        """Unregister, if the server runs. No transfer may be in progress."""
        self._loads.close()
        self._stores.close()

    def prefix(self, digests: Sequence[bytes], deadline_s: float) -> int:
        """The number of pages from the first on that all ranks can load; pinned until they are loaded."""
        until, found = self._clock() + deadline_s, 0
        for at in range(0, len(digests), self._step):
            part = digests[at : at + self._step]
            hit = self._asked(part, until)
            found += hit
            if hit < len(part):
                break
        return found

    def ends(self, digests: Sequence[bytes], most: int, deadline_s: float) -> list[int]:
        """The last `most` numbers of pages after which all ranks have a state, ascending; pinned until they are
        loaded."""
        until, end = self._clock() + deadline_s, len(digests)
        found: list[int] = []
        while end and len(found) < most:
            start = max(end - self._step, 0)
            hit = self._asked(digests[start:end], until)
            if hit:
                found.append(start + hit)
                end = start + hit - 1
            else:
                end = start
        return found[::-1]

    def load(self, digests: Sequence[bytes], places: Sequence[int], deadline_s: float) -> int:
        """Load pages into these places of the pool. Returns how many from the first on are there. After it returns
        nothing writes into the pool."""
        until, ends = self._clock() + deadline_s, {digests[-1]}
        try:
            loaded = self._load(digests, places, until)
            if not loaded and len(digests) > 1:
                # A page was evicted meanwhile: what is before it can still be loaded.
                left = max(until - self._clock(), 0.0)
                there = self.prefix(digests, left) if left else 0
                ends.add(digests[there - 1])
                loaded = self._load(digests[:there], places[:there], until) if 0 < there < len(digests) else 0
            return loaded
        finally:
            self._free(self._tickets.take(ends))

    def store(self, digests: Sequence[bytes], places: Sequence[int], deadline_s: float) -> bool:
        """Store the pages in these places; those that are stored already are skipped. True if the server has all of
        them. After it returns nothing reads the pool."""
        until = self._clock() + deadline_s
        request = self._request(digests)
        if request is None or not digests:
            return not digests
        blocks = [places] * self._groups
        with self._storing:
            future = self._stores.submit_store(request, 0, len(digests) * self._page_tokens, blocks)
            outcome = self._ended(future, until)
            self._stores.get_finished()
        return outcome is not None and not (outcome.dropped or outcome.unknown or outcome.error)

    def _load(self, digests: Sequence[bytes], places: Sequence[int], until: float) -> int:
        """All pages or none, each in one request if it is a state: then those before the first that failed."""
        size = 1 if self.holds_states else max(len(digests), 1)
        parts = [digests[at : at + size] for at in range(0, len(digests), size)]
        requests = [request for request in map(self._request, parts) if request is not None]
        if len(requests) < len(parts):
            return 0
        for request, part in zip(requests, parts, strict=True):
            request.grants.add(self._tickets.grants(part[-1], request.cache_salt, len(part) * self._page_tokens))
        ranges = [(0, len(part) * self._page_tokens) for part in parts]
        blocks = [[places[at : at + size]] * self._groups for at in range(0, len(digests), size)]
        with self._loading:
            futures = self._loads.batched_submit_retrieve(requests, ranges, blocks)
            outcomes = [self._ended(future, until) for future in futures]
            self._loads.get_finished()
            self._loads.take_failed_blocks()
        loaded = takewhile(lambda outcome: outcome is not None and outcome.ok, outcomes)
        return sum(len(part) for part, _ in zip(parts, loaded, strict=False))

    def _asked(self, digests: Sequence[bytes], until: float) -> int:
        """The hit in pages; its ticket is held."""
        request, left = self._request(digests), until - self._clock()
        if request is None or left <= 0:
            return 0
        result = self._lookups.wait(self._lookups.lookup(request, wait_s=left), left)
        pages = result.hit_tokens // self._page_tokens
        if result.ticket:
            self._free(self._tickets.hold(result, digests[pages - 1] if pages else b"", request.cache_salt))
        return pages

    def _free(self, results: Sequence[LookupResult]) -> None:
        for each in results:
            self._lookups.free(each)

    def _request(self, digests: Sequence[bytes]) -> RequestHashes | None:
        """The pages as the content of a request; None while no server answers. A digest names all tokens before it, so
        the first page of a call may stand anywhere in a prompt."""
        if not digests or not self._client.usable:
            return None
        return RequestHashes(
            self._client.hasher,
            self._page_tokens,
            request_id=digests[-1].hex()[:32],
            cache_salt=self._salt.text,
            digests=b"".join(digests),
        )

    def _ended(self, future: Future[O], until: float) -> O | None:
        """The outcome; None after the deadline or a failure, once the transfer no longer touches the pool."""
        try:
            future.wait(max(until - self._clock(), 0.0))
            if not future.query():
                future.cancel()
                if not future.wait(_LAST_RESORT_S):
                    log.error("a transfer did not end within %s s after its cancel", _LAST_RESORT_S)
                return None
            return None if future.exception() is not None else future.result(0)
        except Exception as error:  # noqa: BLE001 - in doubt it has failed
            log.debug("a transfer failed: %r", error)  # the client has logged it
            return None


def digests_of(keys: Sequence[str]) -> list[bytes]:
    """The digests that SGLang's page hashes are. Raises `ValueError` for a key that is none."""
    digests = [bytes.fromhex(key) for key in keys]
    if any(len(each) != DIGEST_BYTES for each in digests):
        raise ValueError(f"a page hash is not of {DIGEST_BYTES} bytes")
    return digests


def places_of(indices: Sequence[int], slots: int) -> list[int] | None:
    """The places of pages whose slots these are; None unless each page has all slots of a place, in their order, and
    no other page has the same."""
    places = [first // slots for first in indices[::slots]]
    whole = [slot for place in places for slot in range(place * slots, (place + 1) * slots)]
    return places if whole == list(indices) and len({*places}) == len(places) else None

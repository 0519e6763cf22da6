"""The lease book: write leases (ranges to fill) and pin leases (objects protected from eviction), by id and by owner.
Pure bookkeeping: the object table decides what a lease's end means for objects and ranges."""

from __future__ import annotations

import itertools
import math
import secrets
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import NamedTuple, TypeVar

from kvframework.api.eviction import PackedKey, Use
from kvframework.api.keys import Retain
from kvframework.errors import LeaseUnknown, RequestError
from kvframework.storage.l1.entries import NO_ACCOUNT, Account, StoredObject, rounded

INTERNAL_OWNER = 0
MAX_LEASES_PER_OWNER = 4096
# Bounds the work of unpinning when a client ends: some 50 ms. 128 lookups of the largest size.
MAX_PINS_PER_OWNER = 1 << 22
NO_DEADLINE = math.inf
# An engine loads what its scheduler has looked up lately.
LATEST_HITS = 64


class PromptPart(NamedTuple):
    """Where in its prompt a request's objects are: for each the index of its chunk, and the tokens of a chunk; () and 0
    if not known. `retain` is what the request says of its tokens."""

    chunks: Sequence[int] = ()
    chunk_tokens: int = 0
    retain: Sequence[Retain] = ()

    def of(self, indices: Sequence[int]) -> list[int]:
        """Return the chunks of some of the objects, -1 if not known."""
        return [self.chunks[index] for index in indices] if self.chunks else [-1] * len(indices)


NO_PROMPT = PromptPart()


@dataclass(slots=True)
class _Lease:
    """`payer` is the session in whose leases, pins and share of L1 it counts; `LeaseBook.open` gives `id`."""

    owner: int
    request_id: str
    deadline: float
    payer: int
    id: str = ""


@dataclass(slots=True)
class WriteLease(_Lease):
    """Ranges that one writer may fill, then commit. `items` hold key, offset and length, `nbytes` the bytes of these
    ranges; `present` holds the objects of the same request that existed already: they stay pinned as long as the lease
    may be committed, so that all of it is a hit. `tenant` is the number of the tenant, see `Tenants`, `account` that of
    the client; `slots` are those of the items in the journal, `chunks` and `present_chunks` the places in the prompt;
    `use` and `prompt` are for the policy."""

    items: list[tuple[PackedKey, int, int]] = field(default_factory=list)
    nbytes: int = 0
    present: list[StoredObject] = field(default_factory=list)
    quarantined: bool = False
    tenant: int = 0
    account: Account = NO_ACCOUNT
    slots: Sequence[int] = ()
    chunks: Sequence[int] = ()
    present_chunks: Sequence[int] = ()
    use: Use = "store"
    prompt: PromptPart = NO_PROMPT


@dataclass(slots=True)
class PinLease(_Lease):
    """Objects protected from eviction: under a LOOKUP's ticket, or while a RETRIEVE reads them; none, and not `held`,
    once it has lapsed. A `hit` is what no one reads without a further lease: it may lapse before its deadline."""

    objects: list[StoredObject] = field(default_factory=list)
    hit: bool = False
    held: bool = True


@dataclass(slots=True)
class Reservation:
    """Result of `reserve`. `placed` holds (index of the item, offset); the counts cover the other items. `stopped_at`
    is the index of the first item that was not placed, None if all were; `over_share` says that the share of its owner
    or tenant stopped it, `refused` that the eviction policy did."""

    lease: WriteLease | None
    placed: list[tuple[int, int]] = field(default_factory=list)
    present: int = 0
    in_flight: int = 0
    dropped: int = 0
    stopped_at: int | None = None
    over_share: bool = False
    refused: bool = False


Lease = WriteLease | PinLease
L = TypeVar("L", bound=Lease)


class LeaseBook:
    """All leases. Ids are unique across restarts: a lease of an earlier boot never passes for one of this."""

    def __init__(self) -> None:
        self.writes: dict[str, WriteLease] = {}
        self.pins: dict[str, PinLease] = {}
        self._of: dict[int, dict[str, Lease]] = {}
        # The numbers of leases and of their pins, by payer.
        self._open: Counter[int] = Counter()
        self._pinned: Counter[int] = Counter()
        # The hits of each payer, the oldest first.
        self._hits: dict[int, dict[str, PinLease]] = {}
        self._boot = secrets.token_hex(4)
        self._count = itertools.count(1)

    def open(self, lease: L) -> L:
        """Add a lease and give it its id. Raises `RequestError` if its `payer` holds too many leases or pins."""
        payer = lease.payer
        if payer != INTERNAL_OWNER and self._open[payer] >= MAX_LEASES_PER_OWNER:
            fact, hint = (
                f"the client holds {MAX_LEASES_PER_OWNER} leases and tickets",
                "commit, abort or free some leases or tickets",
            )
            raise RequestError(fact, available=f"at most {MAX_LEASES_PER_OWNER} at once", hint=hint)
        lease.id = f"{self._boot}-{next(self._count):x}"
        if isinstance(lease, PinLease):
            pinned = self._pinned[payer] + len(lease.objects)
            if payer != INTERNAL_OWNER and pinned > MAX_PINS_PER_OWNER:
                raise RequestError(
                    f"the client would pin {pinned} objects",
                    available=f"at most {MAX_PINS_PER_OWNER} at once",
                    hint="free the tickets of ended requests",
                )
            self._pinned[payer] = pinned
            self.pins[lease.id] = lease
            if lease.hit:
                self._hits.setdefault(payer, {})[lease.id] = lease
        else:
            self.writes[lease.id] = lease
        self._of.setdefault(lease.owner, {})[lease.id] = lease
        self._open[payer] += 1
        return lease

    def close(self, lease: Lease) -> None:
        payer = lease.payer
        if isinstance(lease, PinLease):
            del self.pins[lease.id]
            self._pinned[payer] -= len(lease.objects)
            if lease.hit:
                _remove(self._hits, payer, lease.id)
        else:
            del self.writes[lease.id]
        _remove(self._of, lease.owner, lease.id)
        self._open[payer] -= 1
        if not self._open[payer]:
            del self._open[payer], self._pinned[payer]

    def hits(self, payer: int) -> Iterator[PinLease]:
        """Yield the hits of a payer, the oldest first, while the caller ends each."""
        while of := self._hits.get(payer):
            yield next(iter(of.values()))

    def has_hit(self, payer: int, request_id: str) -> bool:
        """Whether one of the latest hits of a payer is of this request."""
        latest = islice(reversed(self._hits.get(payer, {}).values()), LATEST_HITS)
        return any(lease.request_id == request_id for lease in latest)

    def write(self, lease_id: str, owner: int) -> WriteLease:
        """Return the write lease. Raises `LeaseUnknown` unless it exists and is this owner's."""
        return _own(self.writes, lease_id, owner)

    def pin(self, lease_id: str, owner: int) -> PinLease:
        """Return the pin lease. Raises `LeaseUnknown` unless it exists and is this owner's."""
        return _own(self.pins, lease_id, owner)

    def of(self, owner: int, request_id: str | None = None) -> list[Lease]:
        leases = self._of.get(owner, {}).values()
        return [lease for lease in leases if request_id is None or lease.request_id == request_id]


def _remove(leases: dict[int, dict[str, L]], session: int, lease_id: str) -> None:
    of = leases[session]
    del of[lease_id]
    if not of:
        del leases[session]


def _own(leases: dict[str, L], lease_id: str, owner: int) -> L:
    lease = leases.get(lease_id)
    if lease is None or lease.owner != owner:
        raise LeaseUnknown(
            f"unknown lease {lease_id!r} of this client", hint="the lease ended or the server restarted: prepare again"
        )
    return lease


# How long the bound on other sessions applies after a session found L1 full.
NEEDED_S = 30.0
# The owner of an object that several sessions pin.
SEVERAL = -1


class Pinned(NamedTuple):
    """The bytes that a session keeps from eviction, and how many of its leases its share has ended or refused."""

    nbytes: int
    cut: int


NOTHING_PINNED = Pinned(0, 0)


class PinShares:
    """The bytes of L1 that each client session keeps from eviction: the objects that it pins, each once however often
    it is pinned, and the ranges that it has reserved. Pins of the server itself, of session 0, count for none.

    `most` is the bound of each session, in bytes, which applies only while another session needs room; `held` is what
    the open leases of a session say, in whole ranges of the arena; `over` are those above `most`. `cuts` counts, by
    session, the leases that it ended early or refused, `all_cuts` those of all sessions since the start."""

    def __init__(self) -> None:
        self.most = math.inf
        self.held: dict[int, int] = {}
        self.over: set[int] = set()
        self.cuts: Counter[int] = Counter()
        self.all_cuts = 0
        # For each object that several sessions pin: the pins of each session.
        self._several: dict[StoredObject, Counter[int]] = {}
        # The sessions in whose place another one counts.
        self._for: dict[int, int] = {}
        # The sessions that found L1 full lately, and when.
        self._needs: dict[int, float] = {}

    def configure(self, most: float) -> None:
        self.most = most
        self.over = {payer for payer, nbytes in self.held.items() if nbytes > most}

    def by_session(self) -> dict[int, Pinned]:
        sessions = self.held.keys() | self.cuts.keys()
        return {each: Pinned(self.held.get(each, 0), self.cuts[each]) for each in sessions}

    def payer(self, session: int) -> int:
        """Return the session for which a lease of this one counts."""
        return self._for.get(session, session)

    def work_for(self, session: int, payer: int) -> None:
        """Let the next leases of a session count for another one of its engine, which takes over what it needed."""
        if session != payer:
            self._for[session] = payer
            if session in self._needs:
                self._needs[payer] = max(self._needs.pop(session), self._needs.get(payer, -math.inf))

    def end_session(self, session: int) -> None:
        self._needs.pop(session, None)
        self.cuts.pop(session, None)
        self._for = {who: payer for who, payer in self._for.items() if session not in (who, payer)}

    def pin(self, objects: Sequence[StoredObject], payer: int) -> None:
        if not payer:
            for stored in objects:
                stored.pins += 1
                stored.holds += 1
            return
        of = length = nbytes = 0
        for stored in objects:
            stored.pins += 1
            before = stored.payer
            if before == payer or (before and not self._is_new(stored, payer)):
                continue
            if not before:
                stored.payer = payer
            if stored.length != of:
                of, length = stored.length, rounded(stored.length)
            nbytes += length
        self.add(payer, nbytes)

    def unpin(self, objects: Sequence[StoredObject], payer: int) -> None:
        """End one pin of each object, of the session that it counts for."""
        if not payer:
            for stored in objects:
                stored.pins -= 1
                stored.holds -= 1
            return
        of = length = nbytes = 0
        for stored in objects:
            pins = stored.pins = stored.pins - 1
            if stored.payer != payer:
                if not self._was_last(stored, payer):
                    continue
            elif pins == stored.holds:
                stored.payer = 0
            else:
                continue
            if stored.length != of:
                of, length = stored.length, rounded(stored.length)
            nbytes += length
        self.add(payer, -nbytes)

    def add(self, payer: int, nbytes: int) -> None:
        """Add bytes to what a session holds, or take them away."""
        if not payer or not nbytes:
            return
        held = self.held.get(payer, 0) + nbytes
        if held:
            self.held[payer] = held
        else:
            del self.held[payer]
        if held > self.most:
            self.over.add(payer)
        else:
            self.over.discard(payer)

    def space_left(self, payer: int) -> float:
        """Return the bytes that a session may hold beyond what it holds."""
        return max(self.most - self.held.get(payer, 0), 0)

    def cut(self, payer: int) -> None:
        self.cuts[payer] += 1
        self.all_cuts += 1

    def need(self, payer: int, now: float) -> None:
        self._needs = {who: since for who, since in self._needs.items() if now < since + NEEDED_S}
        self._needs[payer] = now

    def is_bound(self, payer: int, now: float) -> bool:
        """Whether another session needs room."""
        return payer != 0 and any(who != payer and now < since + NEEDED_S for who, since in self._needs.items())

    def _is_new(self, stored: StoredObject, payer: int) -> bool:
        """Add a pin on an object that another session pins; return whether it is the first of this one."""
        pins = self._several.get(stored)
        if pins is None:
            pins = self._several[stored] = Counter({stored.payer: stored.pins - stored.holds - 1})
            stored.payer = SEVERAL
        pins[payer] += 1
        return pins[payer] == 1

    def _was_last(self, stored: StoredObject, payer: int) -> bool:
        """End a pin on an object that several sessions pin; return whether it was the last one of this session."""
        pins = self._several[stored]
        pins[payer] -= 1
        if pins[payer]:
            return False
        del pins[payer]
        if len(pins) == 1:
            (stored.payer,) = pins
            del self._several[stored]
        return True

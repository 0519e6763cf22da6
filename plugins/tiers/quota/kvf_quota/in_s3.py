"""What a bucket knows of the values of tenants with a quota: one object, which servers replace by conditional puts.

A server takes bytes of a quota in parts, before it puts values. Near the limit one server lists the bucket, counts, and
deletes the tenant's oldest values. A sum may be too high by the parts that servers hold, never too low. Promises are
empty objects, whose names have the end and the key.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import time
from collections import Counter, OrderedDict
from collections.abc import AsyncIterator, Collection, Sequence
from typing import Any

import msgspec
import obstore
from obstore.exceptions import AlreadyExistsError, PreconditionError

from kvf_s3 import Address, S3Options
from kvf_s3.failures import Failure, understood
from kvf_s3.loop_thread import ask_each
from kvf_s3.settings import Settings
from kvf_s3.sweep import pages
from kvf_s3.tier import S3Tier
from kvframework.api.keys import PACKED_KEY_BYTES
from kvframework.api.process import LogLimit
from kvframework.api.tier import Outcome, PackedKey, Terms, TierEntry

log = logging.getLogger(__name__)

NAME, KEPT = "kvframework-tenants", "kvframework-kept/"
# The salt in a key, see `kvframework.api.keys`.
SALT = slice(16, 32)
MOST_SALTS = 4096
# The part of a quota that a server takes at once; above which part of it values make room, and down to which.
PART, ABOVE, DOWN_TO = 512, 1 - 1 / 64, 1 - 1 / 32
# A part that was taken before this is neither used nor, a while later, counted; ends of promises are in whole steps.
PART_S, FORGOTTEN_S, STEP_S = 300.0, 600.0, 3600
COUNT_S, AGAIN_S, TRIES = 600.0, 0.5, 64
# How long others leave the counting to the server that has begun it.
CLAIM_S = 10.0
MOST_DONE = 1 << 16


class Tenant(msgspec.Struct):
    """`held` bytes with the parts that servers hold, counted at `at`; `kept` are promised; `taken` were given to
    servers in all. `claimed`: when a server has begun to count. `way`: a server's part and what it is writing, and when
    it last said so."""

    held: int = 0
    kept: int = 0
    taken: int = 0
    at: float = 0.0
    claimed: float = 0.0
    salts: list[str] = []
    way: dict[str, tuple[int, float]] = {}


class Part:
    """What a server may still write of a tenant's quota, since `at`, and what it is writing."""

    def __init__(self) -> None:
        self.left = self.writing = 0
        self.at = 0.0


Tenants = dict[str, Tenant]


class S3Ledger:
    """The ledger of one prefix; for one event loop. Raises what obstore does. `keeps`: no rule of the bucket deletes
    values."""

    def __init__(self, store: Any, address: Address, *, keeps: bool, where: str) -> None:
        self._store, self._address, self._keeps, self._where = store, address, keeps, where
        self._name = f"{address.prefix}{NAME}"
        self._me = secrets.token_hex(8)
        self._turn, self._full = asyncio.Lock(), asyncio.Event()
        self._parts: dict[str, Part] = {}
        self._quotas: dict[str, int] = {}
        self._salts: set[tuple[str, str]] = set()
        self._way: dict[PackedKey, tuple[str, int]] = {}
        self._done: OrderedDict[tuple[PackedKey, int], None] = OrderedDict()
        self._task: asyncio.Task[None] | None = None
        self._once = LogLimit.once()
        self.sums: dict[str, object] = {}
        self.refuses = False

    async def admit(self, terms: Sequence[Terms]) -> list[Outcome]:
        self._task = self._task or asyncio.ensure_future(self._watch())
        answers: dict[PackedKey, Outcome] = {}
        async with self._turn:
            for tenant, most in dict.fromkeys((one.tenant, one.most) for one in terms):
                self._quotas[tenant] = most
                of_tenant = [one for one in terms if one.tenant == tenant]
                put = [one for one in of_tenant if not one.until]
                # Whose put was not tried.
                self.settle([one.key for one in put])
                part = await self._part(tenant, most, put)
                for one in put:
                    fits = one.nbytes <= part.left
                    answers[one.key] = Outcome.STORED if fits else Outcome.FAILED
                    if fits:
                        part.left -= one.nbytes
                        part.writing += one.nbytes
                        self._way[one.key] = tenant, one.nbytes
                for one in of_tenant:
                    if one.until:
                        answers[one.key] = await self._keep(one)
        return [answers[one.key] for one in terms]

    def settle(self, keys: Sequence[PackedKey]) -> None:
        """Take note that values are written no longer. One that failed may be in the store all the same, so it counts
        until the next listing."""
        for key in keys:
            tenant, nbytes = self._way.pop(key, ("", 0))
            if nbytes:
                self._parts[tenant].writing -= nbytes

    async def kept(self) -> set[PackedKey]:
        """Return the keys of promised values; delete promises that have ended."""
        found, ended = set(), []
        async for page in obstore.list(self._store, prefix=f"{self._address.prefix}{KEPT}"):
            for each in page:
                until, _, digits = each["path"].removeprefix(f"{self._address.prefix}{KEPT}").partition("/")
                if len(digits) != 2 * PACKED_KEY_BYTES or not until.isdigit():
                    continue
                if int(until) > time.time():
                    found.add(bytes.fromhex(digits))
                else:
                    ended.append(each["path"])
        if ended:
            with contextlib.suppress(FileNotFoundError):
                await obstore.delete_async(self._store, ended)
        return found

    async def _keep(self, terms: Terms) -> Outcome:
        self.refuses = not self._keeps
        if self.refuses:
            return Outcome.FAILED
        until = int(-(-terms.until // STEP_S) * STEP_S)
        if (terms.key, until) in self._done:
            return Outcome.STORED
        try:
            found = await obstore.head_async(self._store, self._address.name_of(terms.key))
        except FileNotFoundError:
            return Outcome.MISSING
        if found["size"] > terms.most:
            return Outcome.FAILED
        name = f"{self._address.prefix}{KEPT}{until}/{terms.key.hex()}"
        await obstore.put_async(self._store, name, b"", use_multipart=False)
        self._done[terms.key, until] = None
        if len(self._done) > MOST_DONE:
            self._done.popitem(last=False)
        return Outcome.STORED

    async def _part(self, tenant: str, most: int, put: Sequence[Terms]) -> Part:
        """Return the part of the quota that this server has, with more of it where that is needed."""
        part, now = self._parts.setdefault(tenant, Part()), time.monotonic()
        if now - part.at > PART_S:
            part.left = 0
        needed = sum(one.nbytes for one in put)
        salts = {(tenant, one.key[SALT].hex()) for one in put} - self._salts
        if needed <= part.left and not salts:
            return part
        for attempt in range(TRIES):
            tenants, tag = await self._read()
            row = tenants.setdefault(tenant, Tenant())
            row.salts += [salt for _, salt in salts if salt not in row.salts][: MOST_SALTS - len(row.salts)]
            more = max(min(max(needed - part.left, most // PART), most - row.held), 0)
            row.held, row.taken = row.held + more, row.taken + more
            row.way[self._me] = part.left + more + part.writing, time.time()
            if row.held > most * ABOVE or time.time() - row.at > COUNT_S:
                self._full.set()
            if await self._write(tenants, tag):
                part.left, part.at = part.left + more, now
                self._salts |= salts
                break
            await asyncio.sleep(0.01 * (1 + attempt % 8) * (0.5 + secrets.randbelow(100) / 100))
        return part

    async def _watch(self) -> None:
        """Make room whenever a quota is nearly used, until the loop ends."""
        while True:
            await self._full.wait()
            self._full.clear()
            try:
                async with asyncio.timeout(FORGOTTEN_S) if hasattr(asyncio, "timeout") else contextlib.nullcontext():
                    await self._make_room()
                self._once.clear()
            except Exception as error:  # noqa: BLE001  the next one that is refused asks again
                fact = understood(error).fact
                if self._once.passes(fact):
                    log.warning("%s: making room for tenants failed: %s", self._where, fact)
            await asyncio.sleep(AGAIN_S)

    async def _make_room(self) -> None:
        tenants, tag = await self._read()
        now = time.time()
        # One server counts at a time: who claims it by writing first.
        stale = [name for name, row in tenants.items() if now - row.claimed > CLAIM_S]
        full = {name for name in stale if tenants[name].held > self._quotas.get(name, 1 << 62) * ABOVE}
        if not full and not any(now - tenants[name].at > COUNT_S for name in stale):
            return
        for name in stale:
            tenants[name].claimed = now
        if not await self._write(tenants, tag):
            return
        before = tenants
        kept = await self.kept()
        of_salt = {bytes.fromhex(salt): name for name, row in tenants.items() for salt in row.salts}
        held, promised = Counter[str](), Counter[str]()
        found: dict[str, list[TierEntry]] = {name: [] for name in full}
        async for page in self._pages():
            for each in page:
                name = of_salt.get(each.key[SALT], "")
                held[name] += each.nbytes
                promised[name] += each.nbytes * (each.key in kept)
                if name in full and each.key not in kept:
                    found[name].append(each)
        for name, values in found.items():
            excess = held[name] + _under_way(before[name], now) - int(self._quotas[name] * DOWN_TO)
            leaving = []
            for each in sorted(values, key=lambda each: each.used_at or 0.0):
                if excess > 0:
                    leaving.append(each)
                    excess -= each.nbytes
            for first in range(0, len(leaving), 1000):
                names = [self._address.name_of(each.key) for each in leaving[first : first + 1000]]
                with contextlib.suppress(FileNotFoundError):
                    await obstore.delete_async(self._store, names)
            held[name] -= sum(each.nbytes for each in leaving)
        for _ in range(TRIES):
            tenants, tag = await self._read()
            for name, row in tenants.items():
                if name in before:
                    # What was taken meanwhile, and what had been taken and may not be in the listing.
                    row.held = held[name] + row.taken - before[name].taken + _under_way(before[name], now)
                    row.kept, row.at, row.claimed = promised[name], time.time(), 0.0
                    row.way = {server: each for server, each in row.way.items() if now - each[1] < FORGOTTEN_S}
            if await self._write(tenants, tag):
                return

    async def _pages(self) -> AsyncIterator[list[TierEntry]]:
        async for page in pages(self._store, self._address):
            yield page

    async def look(self) -> None:
        """Read the sums."""
        await self._read()

    async def _read(self) -> tuple[Tenants, Any]:
        """The tenants, and the condition under which they may be written."""
        try:
            answer = await obstore.get_async(self._store, self._name)
        except FileNotFoundError:
            return {}, "create"
        tag = {name: answer.meta[name] for name in ("e_tag", "version") if answer.meta.get(name) is not None}
        tenants = msgspec.json.decode(bytes(await answer.bytes_async()), type=Tenants)
        self.sums = {name: {"bytes": row.held, "kept_bytes": row.kept} for name, row in tenants.items()}
        return tenants, tag

    async def _write(self, tenants: Tenants, tag: Any) -> bool:
        try:
            written = msgspec.json.encode(tenants)
            await obstore.put_async(self._store, self._name, written, mode=tag, use_multipart=False)
        except (AlreadyExistsError, PreconditionError):
            return False
        return True


def _under_way(row: Tenant, now: float) -> int:
    return sum(nbytes for nbytes, at in row.way.values() if now - at < FORGOTTEN_S)


class QuotaS3(S3Tier):
    """The tier `s3` with quotas and promises."""

    def __init__(self, settings: Settings, options: S3Options, *, where: str) -> None:
        super().__init__(settings, options, where=where)
        self._ledger = S3Ledger(self._store, self._address, keeps=options.keeps, where=self._where)

    async def kept(self) -> Collection[PackedKey]:
        return await self._ledger.kept()

    def admit(self, terms: Sequence[Terms], *, deadline: float) -> list[Outcome]:
        async def admit(_index: int) -> list[Outcome]:
            return await self._ledger.admit(terms)

        (answer,) = self._run(lambda: ask_each([b""], admit, at_once=1, deadline=deadline), deadline)
        if isinstance(answer, Failure):
            raise answer.error(self._where)
        return answer

    def put(
        self, keys: Sequence[PackedKey], parts: Sequence[Sequence[memoryview]], *, deadline: float
    ) -> list[Outcome]:
        try:
            return super().put(keys, parts, deadline=deadline)
        finally:
            self._ledger.settle(keys)

    def problems(self) -> list[str]:
        problems = super().problems()
        if self._ledger.refuses:
            problems.append(
                f"{self._shown_as}: no value is promised: a lifecycle rule may delete it, as keeps is false"
            )
        return problems

    def status(self) -> dict[str, object]:
        return {"tenants": self._ledger.sums} if self._ledger.sums else {}

    def ping(self, *, deadline: float) -> None:
        """Also reads the sums, which other servers change."""
        super().ping(deadline=deadline)
        self._run(lambda: ask_each([b""], self._look, at_once=1, deadline=deadline), deadline)

    async def _look(self, _index: int) -> None:
        await self._ledger.look()

"""The listing of a bucket, the values below the prefix, a page at a time, in the event loop; and the sweep: keeps the
bytes below a prefix within `capacity`, by one server of all that name the same prefix.

Who sweeps is settled by an object of the bucket, the lease. A server that has seen it unchanged for three turns by its
own clock takes it by a conditional put; its owner renews it in the same way, each turn and in the middle of a long one.
Two that sweep at once, after a long stop of one of them, delete the same oldest values, which does no harm.

The checks of `kvframework doctor` for a bucket: whether it answers, what else lies below the prefix, what bounds it.
Runs in a separate process; reads only.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Mapping
from typing import Any, TypeVar

import obstore
from obstore.exceptions import AlreadyExistsError, PreconditionError

from kvf_s3 import Address, S3Options
from kvf_s3.failures import Failure, understood
from kvf_s3.settings import read_settings
from kvframework.api.plugin import ByteSize, Finding, TableContext
from kvframework.api.process import LogLimit
from kvframework.api.tier import PackedKey, TierEntry

PAGE = 1000


async def first_page(store: Any, address: Address, most: int) -> list[str]:
    """Names below the prefix, so many at most, this tier's or not."""
    async for page in obstore.list(store, prefix=address.prefix or None, chunk_size=most):
        return [each["path"] for each in page]
    return []


async def pages(store: Any, address: Address) -> AsyncIterator[list[TierEntry]]:
    """All values below the prefix; names that are not this tier's are passed over."""
    async for page in obstore.list(store, prefix=address.prefix or None, chunk_size=PAGE):
        keys = [(address.key_of(each["path"]), each) for each in page]
        yield [TierEntry(key, each["size"], each["last_modified"].timestamp()) for key, each in keys if key is not None]


T = TypeVar("T")
log = logging.getLogger(__name__)
LEASE = "kvframework-sweep"
TURNS_TO_TAKE = 3
# What is left after a sweep, as a part of the capacity.
LEFT = 0.9
# By how much two values may differ in age and count as equally old, in seconds.
STEP_S = 10
# For one request, and what lies between the pages of a listing.
_ANSWER_S = 60.0


Kept = Callable[[], Awaitable[Collection[PackedKey]]]


async def _nothing() -> Collection[PackedKey]:
    return ()


class Sweeper:
    def __init__(
        self, store: Any, address: Address, capacity: int, kept: Kept = _nothing, *, every_s: float, where: str
    ) -> None:
        self._store, self._kept = store, kept
        self._address = address
        self._capacity = capacity
        self._every_s = every_s
        self._where = where
        self._lease = f"{address.prefix}{LEASE}"
        self._me = secrets.token_hex(8).encode()
        self._mine: dict[str, str] | None = None
        self._last: dict[str, str] | None = None
        self._turns, self._renewed = 0, 0.0
        self._once = LogLimit.once()

    async def run(self) -> None:
        """Take turns for ever. A failed turn is logged once for each cause."""
        while True:
            try:
                await self.turn()
                self._once.clear()
            except LostLease:
                pass
            except Exception as error:  # noqa: BLE001  a sweep is for later, whatever fails now
                self._mine = None
                fact = understood(error).fact
                if self._once.passes(fact):
                    log.warning("%s: deleting the oldest values failed: %s", self._where, fact)
            await asyncio.sleep(self._every_s)

    async def turn(self) -> bool:
        """One turn: renew or try the lease, and sweep with it. True: this server has the lease. Raises `LostLease` if
        another server takes it meanwhile, and what obstore raises."""
        if not await self._elected():
            return False
        await self._sweep()
        return True

    async def _elected(self) -> bool:
        if self._mine is not None:
            return await self._put(self._mine)
        try:
            seen = _unchanged(await _soon(obstore.head_async(self._store, self._lease)))
        except FileNotFoundError:
            return await self._put("create")
        self._turns = self._turns + 1 if seen == self._last else 0
        self._last = seen
        return self._turns >= TURNS_TO_TAKE and await self._put(seen)

    async def _put(self, mode: Any) -> bool:
        """Write the lease, if no other server has meanwhile. Its bytes differ each time, and so does its tag."""
        text = self._me + secrets.token_hex(8).encode()
        self._mine, self._turns = None, 0
        try:
            request = obstore.put_async(self._store, self._lease, text, mode=mode, use_multipart=False)
            written = await _soon(request)
        except (AlreadyExistsError, PreconditionError):
            return False
        self._mine, self._renewed = _unchanged(written), time.monotonic()
        return True

    async def _sweep(self) -> None:
        """List twice rather than remember every name: once to learn from which age on values go, once to delete."""
        used: Counter[int] = Counter()
        kept, promised = await self._kept(), 0
        async for page in self._pages():
            for each in page:
                promised += each.nbytes * (each.key in kept)
                used[int((each.used_at or 0) // STEP_S)] += each.nbytes * (each.key not in kept)
        if used.total() + promised <= self._capacity:
            return
        newest, of_newest = cut(used, used.total() + promised - int(LEFT * self._capacity))
        count = nbytes = 0
        async for page in self._pages():
            old = []
            for each in page:
                if each.key in kept:
                    continue
                step = int((each.used_at or 0) // STEP_S)
                if step < newest or (step == newest and of_newest > 0):
                    of_newest -= each.nbytes if step == newest else 0
                    old.append(each)
            if old:
                with contextlib.suppress(FileNotFoundError):  # somebody else has deleted one of them
                    await _soon(obstore.delete_async(self._store, [self._address.name_of(each.key) for each in old]))
            count, nbytes = count + len(old), nbytes + sum(each.nbytes for each in old)
        log.info("%s: deleted the %d oldest values, %d bytes", self._where, count, nbytes)

    async def _pages(self) -> AsyncIterator[list[TierEntry]]:
        listing = pages(self._store, self._address)
        while (page := await _soon(anext(listing, None))) is not None:
            yield page
            if time.monotonic() - self._renewed >= self._every_s and not await self._put(self._mine):
                raise LostLease


class LostLease(Exception):
    """Another server sweeps now."""


def _soon(request: Awaitable[T]) -> Awaitable[T]:
    return asyncio.wait_for(request, _ANSWER_S)


def _unchanged(described: Mapping[str, Any]) -> dict[str, str]:
    """The condition of a put: that no other server has written since."""
    return {name: described[name] for name in ("e_tag", "version") if described.get(name) is not None}


def cut(used: Counter[int], excess: int) -> tuple[int, int]:
    """What to delete so that at least `excess` bytes go: all before a step of age, and so many bytes of that step."""
    for step in sorted(used):
        if excess <= used[step]:
            return step, excess
        excess -= used[step]
    return max(used, default=0) + 1, 0


_SAMPLE = 100


def diagnose(options: S3Options, context: TableContext, deadline: float) -> list[Finding]:
    """Check the bucket; blocks until `deadline` at most. Raises `ConfigFieldError`."""
    settings = read_settings(options, where=context.where)
    began = time.monotonic()
    answer = asyncio.run(_ask(settings.store, settings.address, deadline - began))
    if isinstance(answer, Failure):
        advice = answer.hint or "until then the server runs without this tier"
        return [Finding("s3.reachable", "fail", f"{settings.shown}: {answer.fact}", advice)]
    took = (time.monotonic() - began) * 1000
    fact = f"{settings.shown} answered a listing in {took:.0f} ms, connection included; writing was not tested"
    reached = Finding("s3.reachable", "ok", fact)
    return [reached, _strangers(answer, settings.address), _bound(options), _transport(options)]


async def _ask(store: Any, address: Address, seconds: float) -> list[str] | Failure:
    try:
        return await asyncio.wait_for(first_page(store, address, _SAMPLE), max(seconds, 0.0))
    except (TimeoutError, asyncio.TimeoutError):
        return Failure("no answer before the deadline", "check that this machine can reach the store")
    except Exception as error:  # noqa: BLE001  whatever obstore raises
        return understood(error)


def _strangers(names: list[str], address: Address) -> Finding:
    foreign = [each for each in names if address.key_of(each) is None and each != f"{address.prefix}{LEASE}"]
    if not foreign:
        return Finding("s3.prefix", "ok", f"the first {len(names)} names under the prefix belong to this tier")
    fact = f"{len(foreign)} of the first {len(names)} names under the prefix are not of this tier and are ignored"
    return Finding(
        "s3.prefix", "warn", fact, "set a separate prefix in url: each listing reads all names under the prefix"
    )


def _bound(options: S3Options) -> Finding:
    if options.capacity:
        fact = f"one server keeps the prefix below {ByteSize(options.capacity)}, counted every {options.sweep_s:g} s"
        return Finding("s3.capacity", "ok", fact)
    fact = "capacity is 0: without a lifecycle rule of the bucket the prefix grows without limit"
    return Finding("s3.capacity", "warn", fact, "set capacity, or an expiration rule for the prefix")


def _transport(options: S3Options) -> Finding:
    if options.endpoint.startswith("http://"):
        fact = "endpoint is http://: anyone on the network can read the values"
        return Finding("s3.transport", "warn", fact, "use https://, unless you trust every machine of the network")
    return Finding("s3.transport", "ok", "the store is reached over TLS")

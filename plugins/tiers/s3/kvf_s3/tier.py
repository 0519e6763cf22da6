"""The S3 tier: the tier contract's operations as requests to an object store. The caller's storage thread waits for the
tier's own thread, in which all requests are under way (`loop_thread.py`).

The requests for one value. Run in the event loop; each ends with an answer, a `Failure` or an exception of obstore.

A value is sent from the caller's memory as it lies there, and no reference to it is left when a coroutine has ended,
cancelled or not. Received pieces are copied into it before the deadline only.
"""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Collection, Coroutine, Iterator, Sequence
from importlib.util import find_spec
from typing import Any, TypeVar

import obstore

from kvf_s3 import S3Options
from kvf_s3.failures import LATE, Failure, no_bucket, understood
from kvf_s3.loop_thread import LoopThread, ask_each, settled
from kvf_s3.settings import Settings, read_settings
from kvf_s3.sweep import Sweeper, first_page, pages
from kvframework.api.copying import copy_bytes
from kvframework.api.tier import Node, Outcome, PackedKey, Tier, TierEntry
from kvframework.errors import TierError

# About 10 MB. Two keys of the same hash would make a stale hint, which is none the worse.
MANY = 100_000


class Hints:
    """Keys, the oldest first. For one thread."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._until: OrderedDict[int, float] = OrderedDict()

    def note(self, key: PackedKey, now: float) -> None:
        if self._seconds:
            self._until[hash(key)] = now + self._seconds
            self._until.move_to_end(hash(key))
            if len(self._until) > MANY:
                self._until.popitem(last=False)

    def forget(self, key: PackedKey) -> None:
        self._until.pop(hash(key), None)

    def has(self, key: PackedKey, now: float) -> bool:
        return self._until.get(hash(key), now) > now


R = TypeVar("R")
T = TypeVar("T")


def open_tier(options: S3Options, *, where: str) -> S3Tier:
    """The tier, with quotas where they are installed; connects on first use. Raises `ConfigFieldError`."""
    kind = S3Tier
    if find_spec("kvf_quota") is not None:
        from kvf_quota.in_s3 import QuotaS3 as kind  # noqa: N813
    return kind(read_settings(options, where=where), options, where=where)


class S3Tier(Tier):
    """Values below a prefix of a bucket. Thread-safe; owns a thread and its connections until `close`."""

    name = "s3"

    def __init__(self, settings: Settings, options: S3Options, *, where: str) -> None:
        self._store = settings.store
        self._address = settings.address
        self._where = f"{where}: {settings.shown}"
        self._shown_as = settings.shown
        self._at_once = options.concurrency
        self._until_missing = options.ask == "until_missing"
        self._hints = Hints(options.remember_s)
        self._deleting: dict[PackedKey, asyncio.Event] = {}
        # Whether the bucket has shown itself: where it is missing, its keys look as if only they were.
        self._seen = False
        # Why a value of the last `put` was not stored, though the store answers.
        self._full: Failure | None = None
        every_s = options.sweep_s
        sweeper = Sweeper(self._store, self._address, options.capacity, self.kept, every_s=every_s, where=self._where)
        self._thread = LoopThread("kvf-s3", sweeper.run if options.capacity else None)

    def attach(self, node: Node) -> None:
        """Begin to keep the capacity. A command that lists values is no server, and must delete none."""
        self._thread.begin_background()

    async def kept(self) -> Collection[PackedKey]:
        """The keys of values that are not deleted for the capacity."""
        return ()

    def contains(self, keys: Sequence[PackedKey], *, deadline: float) -> list[Outcome]:
        return self._batch(lambda: self._found(keys, deadline), deadline)

    def get_into(
        self, keys: Sequence[PackedKey], parts: Sequence[Sequence[memoryview]], *, deadline: float
    ) -> list[int | Outcome]:

        async def get(index: int) -> int | Outcome | Failure:
            answer = await receive(self._store, self._address.name_of(keys[index]), parts[index], deadline)
            self._noted(keys[index], there=not isinstance(answer, Outcome))
            return answer

        return self._batch(lambda: self._ask(keys, get, deadline), deadline)

    def put(
        self, keys: Sequence[PackedKey], parts: Sequence[Sequence[memoryview]], *, deadline: float
    ) -> list[Outcome]:
        each = list(parts)

        async def put(index: int) -> Outcome | Failure:
            answer = await send(self._store, self._address.name_of(keys[index]), each[index])
            self._noted(keys[index], there=answer is Outcome.STORED)
            return answer

        answers = self._run(lambda: self._ask(keys, put, deadline), deadline)
        full = next((each for each in answers if isinstance(each, Failure) and each.full), None)
        if full is not None or Outcome.STORED in answers:
            self._full = full
        return settled(answers, self._where)

    def delete(self, keys: Sequence[PackedKey], *, deadline: float) -> list[Outcome]:
        """DELETED once, of several threads of this tier that delete a value; another server may say so as well."""

        async def delete(index: int) -> Outcome | Failure:
            key = keys[index]
            while (other := self._deleting.get(key)) is not None:
                await other.wait()
            done = self._deleting[key] = asyncio.Event()
            self._hints.forget(key)
            try:
                return await remove(self._store, self._address.name_of(key))
            finally:
                del self._deleting[key]
                done.set()

        return self._batch(lambda: self._ask(keys, delete, deadline), deadline)

    def scan(self, *, deadline: float) -> Iterator[TierEntry]:
        """Every value below the prefix, a page at a time. Its time of use is that of its last store."""
        self._check(deadline)
        return self._scan(deadline)

    def ping(self, *, deadline: float) -> None:
        async def ping() -> list[Failure | None]:
            return await ask_each([b""], lambda _: self._shown(), at_once=1, deadline=deadline)

        (answer,) = self._run(ping, deadline)
        if answer is not None:
            raise answer.error(self._where)

    def problems(self) -> list[str]:
        """What a full store said, until it stores a value again."""
        return [] if self._full is None else [f"{self._shown_as}: {self._full.fact}; {self._full.hint}"]

    def close(self) -> None:
        """End calls in flight, and the tier's thread; blocks for two seconds at most."""
        self._thread.close()

    def _batch(
        self, work: Callable[[], Coroutine[Any, Any, Sequence[R | Outcome | Failure]]], deadline: float
    ) -> list[R | Outcome]:
        return settled(self._run(work, deadline), self._where)

    def _run(self, work: Callable[[], Coroutine[Any, Any, T]], deadline: float) -> T:
        self._check(deadline)
        return self._thread.run(work, where=self._where)

    def _check(self, deadline: float) -> None:
        """Raise `TierError` where even a call without keys fails: after the deadline, and once closed."""
        if self._thread.closed:
            raise TierError("the tier is closed", where=self._where)
        if time.monotonic() >= deadline:
            raise LATE.error(self._where)

    async def _ask(
        self, keys: Sequence[PackedKey], ask: Callable[[int], Awaitable[R | Failure]], deadline: float
    ) -> list[R | Failure]:
        """The answers for all keys. Where nothing but missing keys and bare refusals came, and the bucket has never
        shown itself, it is asked for, and its failure is that of all keys."""
        answers = await ask_each(keys, ask, at_once=self._at_once, deadline=deadline)
        doubtful = [each for each in answers if each is Outcome.MISSING or (isinstance(each, Failure) and each.bare)]
        if len(doubtful) < len(answers):
            self._seen = self._seen or any(not isinstance(each, Failure) for each in answers)
        elif answers and not (self._seen and all(each is Outcome.MISSING for each in answers)):
            (shown,) = await ask_each([b""], lambda _: self._shown(), at_once=1, deadline=deadline)
            if shown is not None:
                return [shown] * len(answers)
        return answers

    async def _found(self, keys: Sequence[PackedKey], deadline: float) -> list[Outcome | Failure]:
        async def look(index: int) -> Outcome | Failure:
            key = keys[index]
            if self._hints.has(key, time.monotonic()):
                return Outcome.FOUND
            answer = await find(self._store, self._address.name_of(key))
            self._noted(key, there=answer is Outcome.FOUND)
            return answer

        if not self._until_missing:
            return await self._ask(keys, look, deadline)
        answers: list[Outcome | Failure] = []
        while len(answers) < len(keys):
            first = len(answers)
            some = keys[first : first + self._at_once]
            answers += await self._ask(some, lambda index, first=first: look(first + index), deadline)  # type: ignore[misc]
            if all(each is Outcome.MISSING for each in answers[first:]):
                break
        return answers + [Outcome.MISSING] * (len(keys) - len(answers))

    async def _shown(self) -> Failure | None:
        """None if the bucket can be listed."""
        try:
            await first_page(self._store, self._address, 1)
        except Exception as error:  # noqa: BLE001  whatever obstore raises
            return understood(error)
        self._seen = True
        return None

    def _noted(self, key: PackedKey, *, there: bool) -> None:
        if there:
            self._hints.note(key, time.monotonic())
        else:
            self._hints.forget(key)

    def _scan(self, deadline: float) -> Iterator[TierEntry]:
        listing = pages(self._store, self._address)

        async def page() -> list[list[TierEntry] | Failure | None]:
            return await ask_each([b""], lambda _: anext(listing, None), at_once=1, deadline=deadline)

        while True:
            (entries,) = self._run(page, deadline)
            if isinstance(entries, Failure):
                raise entries.error(self._where)
            if entries is None:
                return
            yield from entries


# Of a body, as it is received: larger pieces take more memory and no less time.
PIECE_BYTES = 512 << 10
# What one request may store, in S3 and its like.
MOST_BYTES = 5 << 30
_TRIES = 3
_RELEASE_EVERY_S = 0.0005


async def asked(request: Any) -> Any:
    """What an awaitable of obstore gives; its exception is returned, without frames: obstore's threads keep one for a
    moment, and the caller's memory would stay lent as long as it has the frames that it passed."""
    try:
        return await request
    except Exception as error:  # noqa: BLE001  whatever obstore raises
        return error.with_traceback(None)


async def find(store: Any, name: str) -> Outcome | Failure:
    """FOUND or MISSING."""
    answer = await asked(obstore.head_async(store, name))
    if isinstance(answer, FileNotFoundError):
        return Outcome.MISSING
    return understood(answer) if isinstance(answer, Exception) else Outcome.FOUND


async def receive(store: Any, name: str, parts: Sequence[memoryview], deadline: float) -> int | Outcome | Failure:
    """Bytes received into `parts`, MISSING, or DAMAGED for a value that is longer. A body that breaks off, as that of a
    value that is replaced meanwhile, is asked for again."""
    room = sum(part.nbytes for part in parts)
    received: int | Outcome | Failure = LATE
    for _ in range(_TRIES):
        answer = await asked(obstore.get_async(store, name))
        if isinstance(answer, FileNotFoundError) and not no_bucket(answer):
            return Outcome.MISSING
        if isinstance(answer, Exception):
            return understood(answer)
        if answer.meta["size"] > room:
            return Outcome.DAMAGED
        received = await _fill(answer, parts, deadline)
        if received is LATE or not isinstance(received, Failure):
            break
    return received


async def _fill(answer: Any, parts: Sequence[memoryview], deadline: float) -> int | Outcome | Failure:
    places = [part.cast("B") for part in parts if part.nbytes]
    stream = aiter(answer.stream(min_chunk_size=PIECE_BYTES))
    now, received = asyncio.get_running_loop().time, 0
    try:
        while not isinstance(piece := await asked(anext(stream)), Exception):
            with memoryview(piece) as source:
                at = 0
                while at < len(source):
                    if now() >= deadline:
                        return LATE
                    if not places:
                        return Outcome.DAMAGED
                    step = min(len(source) - at, len(places[0]), PIECE_BYTES)
                    copy_bytes(places[0][:step], source[at : at + step])
                    rest = places[0][step:]
                    places.pop(0).release()
                    if rest:
                        places.insert(0, rest)
                    at += step
                received += at
    finally:
        for place in places:
            place.release()
    return received if isinstance(piece, StopAsyncIteration) else understood(piece)


async def send(store: Any, name: str, parts: Sequence[memoryview]) -> Outcome | Failure:
    """STORED; the value replaces an older one."""
    if sum(part.nbytes for part in parts) > MOST_BYTES:
        return Failure("a value is larger than the store's limit for a request", full=True)
    lent = [memoryview(part).cast("B") for part in parts if part.nbytes]
    try:
        answer = await asked(obstore.put_async(store, name, lent or b"", use_multipart=False))
    finally:
        await _returned(lent)
    return understood(answer) if isinstance(answer, Exception) else Outcome.STORED


async def remove(store: Any, name: str) -> Outcome | Failure:
    """DELETED or MISSING. A store does not tell which, so it is asked first."""
    found = await find(store, name)
    if found is not Outcome.FOUND:
        return found
    answer = await asked(obstore.delete_async(store, name))
    if isinstance(answer, FileNotFoundError):
        return Outcome.MISSING
    return understood(answer) if isinstance(answer, Exception) else Outcome.DELETED


async def _returned(lent: Sequence[memoryview]) -> None:
    """Wait until obstore's threads have released the views: after a request, a cancelled one too, about a
    millisecond. A cancellation meanwhile waits as well."""
    cancelled = False
    for view in lent:
        while True:
            try:
                view.release()
                break
            except BufferError:
                try:
                    await asyncio.sleep(_RELEASE_EVERY_S)
                except asyncio.CancelledError:
                    cancelled = True
    if cancelled:
        raise asyncio.CancelledError

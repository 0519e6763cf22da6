"""The requests for one value. Run in the event loop; each ends with an answer, a `Failure` or an exception of obstore.

A value is sent from the caller's memory as it lies there, and no reference to it is left when a coroutine has ended,
cancelled or not. Received pieces are copied into it before the deadline only.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import obstore

from kvf_s3.failures import LATE, Failure, no_bucket, understood
from kvframework.api.copying import copy_bytes
from kvframework.api.tier import Outcome

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

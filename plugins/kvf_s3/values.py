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
from kvframework.api.tier import Outcome

# Of a body, as it is received: below 1 MiB each piece costs more than its copy.
PIECE_BYTES = 2 << 20
# What one request may store, in S3 and its like.
MOST_BYTES = 5 << 30
_TRIES = 3
_RELEASE_EVERY_S = 0.0005


async def find(store: Any, name: str) -> Outcome | Failure:
    """FOUND or MISSING."""
    try:
        await obstore.head_async(store, name)
    except FileNotFoundError:
        return Outcome.MISSING
    return Outcome.FOUND


async def receive(store: Any, name: str, parts: Sequence[memoryview], deadline: float) -> int | Outcome | Failure:
    """Bytes received into `parts`, MISSING, or DAMAGED for a value that is longer. A body that breaks off, as that of a
    value that is replaced meanwhile, is asked for again."""
    room = sum(part.nbytes for part in parts)
    for turn in range(_TRIES):
        try:
            answer = await obstore.get_async(store, name)
        except FileNotFoundError as error:
            return understood(error) if no_bucket(error) else Outcome.MISSING
        if answer.meta["size"] > room:
            return Outcome.DAMAGED
        try:
            return await _fill(answer, parts, deadline)
        except Exception:
            if turn == _TRIES - 1:
                raise
    raise AssertionError("the loop returns or raises")


async def _fill(answer: Any, parts: Sequence[memoryview], deadline: float) -> int | Outcome | Failure:
    places = [part.cast("B") for part in parts if part.nbytes]
    now, received = asyncio.get_running_loop().time, 0
    try:
        async for piece in answer.stream(min_chunk_size=PIECE_BYTES):
            with memoryview(piece) as source:
                at = 0
                while at < len(source):
                    if now() >= deadline:
                        return LATE
                    if not places:
                        return Outcome.DAMAGED
                    step = min(len(source) - at, len(places[0]), PIECE_BYTES)
                    places[0][:step] = source[at : at + step]
                    rest = places[0][step:]
                    places.pop(0).release()
                    if rest:
                        places.insert(0, rest)
                    at += step
                received += at
    finally:
        for place in places:
            place.release()
    return received


async def send(store: Any, name: str, parts: Sequence[memoryview]) -> Outcome | Failure:
    """STORED; the value replaces an older one."""
    if sum(part.nbytes for part in parts) > MOST_BYTES:
        return Failure("a value is larger than a request may be", full=True)
    lent = [memoryview(part).cast("B") for part in parts if part.nbytes]
    try:
        await obstore.put_async(store, name, lent or b"", use_multipart=False)
    except FileNotFoundError as error:
        return understood(error)
    finally:
        await _returned(lent)
    return Outcome.STORED


async def remove(store: Any, name: str) -> Outcome | Failure:
    """DELETED or MISSING. A store does not tell which, so it is asked first."""
    found = await find(store, name)
    if found is not Outcome.FOUND:
        return found
    try:
        await obstore.delete_async(store, name)
    except FileNotFoundError:
        return Outcome.MISSING
    return Outcome.DELETED


async def _returned(lent: Sequence[memoryview]) -> None:
    """Waits until obstore's threads have let go of the views: after a request, a cancelled one too, about a
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

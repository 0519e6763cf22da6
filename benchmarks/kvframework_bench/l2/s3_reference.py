"""The reference for the S3 tier: obstore itself, with as many requests under way, from the caller's memory and into it.
No tier, no envelope, no deadline."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Sequence
from types import TracebackType
from typing import Any

from kvframework_bench.errors import BenchUnavailable
from kvframework_bench.l2.s3_server import BUCKET

AT_ONCE = 16
PIECE_BYTES = 2 << 20


class BareStore:
    """A store with separate connections, and an event loop; a context manager. Calls block. For one thread."""

    def __init__(self, endpoint: str) -> None:
        try:
            import obstore
            from obstore.store import S3Store
        except ImportError:
            raise BenchUnavailable("obstore is not installed", hint="pip install obstore") from None
        self._obstore = obstore
        self._store = S3Store(
            BUCKET,
            endpoint=endpoint,
            region="us-east-1",
            skip_signature=True,
            client_options={"allow_http": True, "timeout": "120s"},
        )
        self._loop = asyncio.new_event_loop()

    def __enter__(self) -> BareStore:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._loop.close()

    def put(self, values: Sequence[memoryview]) -> None:
        """Store each value in one request."""
        self._carry([self._put(_name(at), each) for at, each in enumerate(values)])

    def get(self, targets: Sequence[memoryview], piece_bytes: int | None) -> None:
        """Read each value, exactly as long as its target: whole, or a piece after the other, and copied there."""
        self._carry([self._get(_name(at), each, piece_bytes) for at, each in enumerate(targets)])

    async def _put(self, name: str, value: memoryview) -> None:
        await self._obstore.put_async(self._store, name, [value], use_multipart=False)

    async def _get(self, name: str, target: memoryview, piece_bytes: int | None) -> None:
        answer = await self._obstore.get_async(self._store, name)
        if piece_bytes is None:
            target[:] = memoryview(await answer.bytes_async())
            return
        at = 0
        async for piece in answer.stream(min_chunk_size=piece_bytes):
            target[at : at + len(piece)] = memoryview(piece)
            at += len(piece)

    def _carry(self, requests: Sequence[Coroutine[Any, Any, object]]) -> None:
        async def all_of_them() -> None:
            turns = asyncio.Semaphore(AT_ONCE)

            async def one(request: Coroutine[Any, Any, object]) -> None:
                async with turns:
                    await request

            await asyncio.gather(*map(one, requests))

        self._loop.run_until_complete(all_of_them())


def _name(index: int) -> str:
    return f"bare/{index:02x}"

"""An engine instance on a GPU: stores of its source blocks, retrieves into its target blocks, both at once.

Through `WorkerAdapter`, as an engine integration does it. For the thread that opened the device; every call blocks
until the bytes are moved.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import NamedTuple

from kvframework.api.futures import Future
from kvframework.api.keys import DIGEST_BYTES
from kvframework.api.transport import LoadOutcome, StoreOutcome
from kvframework.client import KVClient, RequestHashes, WorkerAdapter
from kvframework.errors import DeviceError, DeviceLost
from kvframework_bench.cuda.memory import DeviceMemory
from kvframework_bench.cuda.workload import CHUNK_TOKENS
from kvframework_bench.errors import BenchFailed, BenchUnavailable
from kvframework_bench.rounds import Case
from kvframework_bench.server import emptied, running_server

TRANSPORT = "cuda_ipc"
_TIMEOUT_S = 60.0
_ARENA_SLACK = 32 << 20


class Timing(NamedTuple):
    """Seconds of one transfer: `submit` until the call returns to the engine's thread, `whole` until all bytes are
    moved."""

    submit: float
    whole: float


class DeviceInstance:
    """One instance, registered by the constructor. Raises `BenchUnavailable` if the server cannot copy this way here,
    and the errors of a registration.

    Every transfer is of the first `chunks` chunks of one request, whose digests are computed.
    """

    def __init__(self, client: KVClient, memory: DeviceMemory, chunks: int) -> None:
        shape = memory.shape
        self._client = client
        self._memory = memory
        self._worker = WorkerAdapter(
            client,
            instance_id=1,
            model_name=f"bench {shape.name}",
            transport=TRANSPORT,
            layout_options={"axes": shape.axes},
        )
        try:
            self._worker.register_kv_caches(memory.kv, block_size=shape.block_tokens)
        except DeviceLost:
            raise
        except DeviceError as error:
            # The copier names the cause: an old driver, no compiler for the kernel.
            raise BenchUnavailable(error.fact, where=TRANSPORT, hint=error.hint) from None
        self._request = RequestHashes(client.hasher, CHUNK_TOKENS, request_id="bench")
        self._request.extend(range(chunks * CHUNK_TOKENS))
        self._stored = 0

    def __enter__(self) -> DeviceInstance:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._worker.close()

    def store(self, chunks: int) -> Timing:
        """Store into an empty L1. Raises `BenchFailed` unless all is stored."""
        self._clear()
        took = self._store(self._request, chunks)
        self._stored = chunks
        return took

    def retrieve(self, chunks: int) -> Timing:
        """Retrieve the stored chunks. Raises `BenchFailed` if it was a miss."""
        self._need(chunks)
        blocks = self._blocks(self._memory.target, chunks)
        started = time.perf_counter()
        future = self._submit_retrieve(blocks, chunks)
        submitted = time.perf_counter()
        self._await_retrieved(future)
        return Timing(submitted - started, time.perf_counter() - started)

    def cases(self, chunks: int) -> dict[str, Case]:
        """Return `store` and `retrieve`, each giving the seconds of the whole."""
        return {"store": lambda: self.store(chunks).whole, "retrieve": lambda: self.retrieve(chunks).whole}

    def both(self, chunks: int) -> float:
        """Return the seconds of a retrieve of the stored chunks and a store of another prompt, both at once, until both
        are done. Raises as they do."""
        self._clear()
        self._store(self._request, chunks)
        self._stored = chunks
        unseen = self._unseen(chunks)
        source, target = (self._blocks(ids, chunks) for ids in (self._memory.source, self._memory.target))
        started = time.perf_counter()
        loading = self._submit_retrieve(target, chunks)
        storing = self._submit_store(unseen, source, chunks)
        self._await_retrieved(loading)
        self._await_stored(storing, chunks)
        return time.perf_counter() - started

    def verify(self, chunks: int) -> None:
        """Retrieve into poisoned blocks. Raises `WrongBytes` unless they equal the source."""
        self._memory.poison(chunks)
        self.retrieve(chunks)
        self._memory.verify(chunks)

    def _need(self, chunks: int) -> None:
        if self._stored < chunks:
            self.store(chunks)

    def _clear(self) -> None:
        cleared = emptied(self._client)
        if cleared.in_use:
            raise BenchFailed(f"L1 could not be emptied before a store: {cleared.in_use} objects are in use")
        self._stored = 0

    def _unseen(self, chunks: int) -> RequestHashes:
        # Digests of another prompt: no time is spent on hashing.
        digests = os.urandom(DIGEST_BYTES * chunks)
        return RequestHashes(self._client.hasher, CHUNK_TOKENS, request_id="unseen", digests=digests)

    def _store(self, request: RequestHashes, chunks: int) -> Timing:
        blocks = self._blocks(self._memory.source, chunks)
        started = time.perf_counter()
        future = self._submit_store(request, blocks, chunks)
        submitted = time.perf_counter()
        self._await_stored(future, chunks)
        return Timing(submitted - started, time.perf_counter() - started)

    def _submit_store(self, request: RequestHashes, blocks: list[list[int]], chunks: int) -> Future[StoreOutcome]:
        return self._worker.submit_store(request, 0, chunks * CHUNK_TOKENS, blocks)

    def _submit_retrieve(self, blocks: list[list[int]], chunks: int) -> Future[LoadOutcome]:
        return self._worker.submit_retrieve(self._request, 0, chunks * CHUNK_TOKENS, blocks)

    def _await_stored(self, future: Future[StoreOutcome], chunks: int) -> None:
        outcome = future.result(_TIMEOUT_S)
        self._worker.get_finished()
        if not outcome.ok or outcome.stored != chunks:
            raise BenchFailed(f"a store of {chunks} chunks ended with {outcome}")

    def _await_retrieved(self, future: Future[LoadOutcome]) -> None:
        outcome = future.result(_TIMEOUT_S)
        self._worker.get_finished()
        if not outcome.ok:
            raise BenchFailed("a retrieve of stored chunks is a miss", hint="the log above says why")

    def _blocks(self, ids: Sequence[int], chunks: int) -> list[list[int]]:
        return [list(ids[: self._memory.shape.blocks(chunks)])]


@contextmanager
def running_client(directory: Path, engine: str, largest: int) -> Iterator[KVClient]:
    """Yield a client of a new server whose `engine` copies, with room in L1 for two requests of `largest` bytes. Raises
    `BenchFailed`."""
    settings = [
        f"server.chunk_size={CHUNK_TOKENS}",
        f"transport.0.use={TRANSPORT}",
        f"transport.0.engine={engine}",
    ]
    with running_server(directory, 2 * largest + _ARENA_SLACK, settings) as server, server.client() as client:
        yield client

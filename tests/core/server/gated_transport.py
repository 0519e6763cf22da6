"""A server-driven transport for tests: the engine's memory is a file, and every fragment's copy waits at a gate."""

from __future__ import annotations

import threading
from collections.abc import Sequence

from kvframework.api import transport
from kvframework.api.futures import Future, Promise
from kvframework.api.layout import KVLayout, MemoryLayoutDesc
from kvframework.api.plugin import NoOptions
from kvframework.api.requests import ClientInfo
from kvframework.errors import RequestError


class GatedTransport(transport.ServerTransport):
    """`gate` lets one fragment through per release; `fail` makes the next one fail; `copies` counts."""

    def __init__(self) -> None:
        self.gate = threading.Semaphore(0)
        self.waiting = threading.Event()
        self.fail = False
        self.copies = 0

    def open(
        self, client: ClientInfo, layout: KVLayout, desc: MemoryLayoutDesc, handles: Sequence[bytes]
    ) -> transport.ServerContext:
        if len(handles) != 1:
            raise RequestError(f"{len(handles)} handles", available="one path")
        return _FileContext(self, handles[0].decode(), desc.groups[0].nbytes)

    def close(self) -> None:
        self.gate.release(1000)


class _FileContext(transport.ServerContext):
    def __init__(self, owner: GatedTransport, path: str, object_bytes: int) -> None:
        self._owner = owner
        self._path = path
        self._object_bytes = object_bytes
        self._threads: list[threading.Thread] = []

    def copy(self, job: transport.CopyJob) -> Future[bool]:
        future: Promise[bool] = Promise()
        thread = threading.Thread(target=self._work, args=(job, future))
        self._threads.append(thread)
        thread.start()
        return future

    def close(self) -> None:
        """Copies in flight see their cancel flag at the next fragment."""
        self._threads.clear()

    def _work(self, job: transport.CopyJob, future: Promise[bool]) -> None:
        try:
            future.set_result(self._fragments(job))
        except RuntimeError as error:
            future.set_exception(error)

    def _fragments(self, job: transport.CopyJob) -> bool:
        per_chunk = job.blocks[0].per_object
        block_bytes = self._object_bytes // per_chunk
        with open(self._path, "r+b") as memory:
            for place in job.ranges:
                for index in range(per_chunk):
                    self._owner.waiting.set()
                    self._owner.gate.acquire()
                    if job.cancelled.is_set():
                        return False
                    if self._owner.fail:
                        raise RuntimeError("the copy engine failed")
                    block = job.blocks[0].ids[place.chunk * per_chunk + index]
                    at = place.offset + index * block_bytes
                    memory.seek(block * block_bytes)
                    if job.is_store:
                        job.arena[at : at + block_bytes] = memory.read(block_bytes)
                    else:
                        memory.write(job.arena[at : at + block_bytes])
                    self._owner.copies += 1
        return True


def _no_engine_side(_options: NoOptions, _link: transport.EngineLink) -> transport.TransferContext:
    raise NotImplementedError("the tests speak the wire themselves")


class GatedPlugin:
    """The plugin object; `transport` is the server half that it made."""

    def __init__(self) -> None:
        self.transport = GatedTransport()

    @transport.hookimpl
    def kvf_transports(self) -> list[transport.TransportProvider[NoOptions]]:
        return [
            transport.TransportProvider(
                name="gated",
                summary="copies through a file, fragment by fragment",
                create=_no_engine_side,
                create_server=lambda _options, _arena_fd: self.transport,
                is_gpu=True,
            )
        ]

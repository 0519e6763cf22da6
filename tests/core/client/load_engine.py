"""An engine whose loads are watched: what its worker asks the server, and what is pinned meanwhile."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from kvframework.api.transport import LoadGrant, LoadPlan, Transfer
from kvframework.client import KVClient, LookupResult, RequestHashes, SchedulerAdapter
from kvframework.wire import messages as m
from tests.support.server_process import ServerProcess
from tests.support.waiting import wait_until
from tests.support.wire_client import key_for, register_tiny

TOKENS = list(range(512))


class Engine:
    """A scheduler and a worker, each with a client of its own; 512 tokens are stored. `asked` has what the worker asks
    the server from `load` on."""

    def __init__(
        self,
        server: ServerProcess,
        clients: list[KVClient],
        monkeypatch: pytest.MonkeyPatch,
        instances: tuple[int, ...] = (7, 8),
    ) -> None:
        self.server, self.client, self.worker = server, clients[0], clients[-1]
        instance = register_tiny(self.worker, 7, "tiny")
        registered = m.Registered(instance.namespace, instance.registration.desc)
        self.scheduler = SchedulerAdapter(
            self.client, model_name="tiny", namespace=instance.namespace, chunk_tokens=256, instances=instances
        )
        assert self.client.wait_up(5)
        self.request = RequestHashes(self.client.hasher, 256, request_id="r")
        self.request.extend(TOKENS)
        self.key = key_for(registered, TOKENS)
        self._transfer = instance.transfer
        with self.worker.prepare_store(self.transfer()).result() as plan:
            for place in plan.ranges:
                plan.arena[place.offset : place.offset + place.length] = b"k" * place.length
            assert plan.commit().result().stored == 2
        self.asked: list[str] = []
        for name in ("begin", "post"):
            monkeypatch.setattr(self.worker._connection, name, self._counted(name))

    def _counted(self, method: str) -> Any:
        call = getattr(self.worker._connection, method)

        def counted(name: str, *arguments: Any, **options: Any) -> Any:
            self.asked.append(f"{name} unanswered" if method == "post" else name)
            return call(name, *arguments, **options)

        return counted

    def transfer(self, grant: LoadGrant | None = None, end: int = 512, *, in_pieces: bool = False) -> Transfer:
        key = msgspec.structs.replace(self.key, end=end, tokens=b"", digests=self.request.digests(end))
        transfer: Transfer = self._transfer(key)
        return Transfer(key, transfer.registration, {}, (), transfer.blocks, grant=grant, in_pieces=in_pieces)

    def look_up(self) -> LookupResult:
        found = self.scheduler.lookup(self.request)
        assert found.hit_tokens == 512
        return found

    def load(self, grant: LoadGrant | None, end: int = 512, *, in_pieces: bool = False) -> LoadPlan:
        self.asked.clear()
        return self.worker.prepare_load(self.transfer(grant, end, in_pieces=in_pieces)).result()

    def pins(self) -> int:
        return int(self.server.status()["l1"]["pins"])

    def settle(self, pins: int) -> None:
        wait_until(lambda: self.pins() == pins, what=f"{pins} pins")

"""A replay of requests through the server's own object table: LOOKUP, RETRIEVE of the hit, STORE of all, and the end of
the ticket, as an engine does. No bytes move."""

from __future__ import annotations

from collections.abc import Iterable

from kvframework.api.eviction import EvictionPolicy
from kvframework.api.keys import DIGEST_BYTES, PACKED_KEY_BYTES
from kvframework.storage.l1.entries import ALIGNMENT, StoredObject
from kvframework.storage.l1.leases import PromptPart
from kvframework.storage.l1.objects import ObjectTable
from kvframework_bench.policy.requests import Request

_PREFIX = bytes(PACKED_KEY_BYTES - DIGEST_BYTES)
_OWNER = 1
_CHUNK_TOKENS = 512


class Replay:
    """An L1 of `objects` objects of one size. `blocks` have been asked for, `hits` of them were found, as prefixes."""

    def __init__(self, policy: EvictionPolicy, objects: int) -> None:
        self._at = 0.0
        self._table = ObjectTable(policy, nbytes=objects * ALIGNMENT, clock=lambda: self._at)
        self.blocks = self.hits = self._requests = 0

    def run(self, requests: Iterable[Request]) -> None:
        for at, digests in requests:
            self._requests += 1
            self.blocks += len(digests)
            self.hits += self._one(at, digests, f"r{self._requests}")

    def _one(self, at: float, digests: list[bytes], request_id: str) -> int:
        table, self._at = self._table, at
        table.expire()
        row = table.row(_PREFIX, digests)
        hit = row.index(None) if None in row else len(row)
        found: list[StoredObject] = [stored for stored in row[:hit] if stored is not None]
        ticket = None
        if found:
            ticket = table.pin_objects(found, owner=_OWNER, request_id=request_id)
            read = table.pin_objects(found[:], owner=_OWNER, request_id=request_id, use="retrieve")
            table.unpin(read.id, owner=_OWNER)
        items = [(_PREFIX + digest, ALIGNMENT) for digest in digests]
        prompt = PromptPart(range(len(digests)), _CHUNK_TOKENS)
        lease = table.reserve(items, owner=_OWNER, request_id=request_id, prompt=prompt).lease
        if lease is not None:
            table.commit(lease.id, owner=_OWNER)
        if ticket is not None:
            table.unpin(ticket.id, owner=_OWNER)
        return hit

"""A plain client of blend's requests: an engine without tensors, whose objects hold the tokens that they stand for."""

from __future__ import annotations

import struct
from array import array
from collections.abc import Sequence
from typing import Any

import msgspec

from kvf_blend import messages as b
from kvf_blend.rotary import Rotary
from kvframework.api.keys import DIGEST_BYTES, CacheKey
from kvframework.wire import messages as m
from tests.support.wire_client import WireClient, key_for

CHUNK = 16
ROTARY = Rotary(style="half", theta=10000.0, head_dim=4, rotary_dim=4)
SETTINGS = ("requests.0.use=blend", f"server.chunk_size={CHUNK}")


def packed(tokens: Sequence[int]) -> bytes:
    return array("I", tokens).tobytes()


def pairs(*ranges: tuple[int, int]) -> bytes:
    return b"".join(struct.pack("<2I", *each) for each in ranges)


class BlendWire(WireClient):
    """One rank of the model that `WireClient.register` registers, or a scheduler if it does not register."""

    def __init__(self, endpoint: str, **named: Any) -> None:
        super().__init__(endpoint, requests=b.REQUESTS, **named)
        self.registered: m.Registered | None = None
        self.world_size = 1

    def __enter__(self) -> BlendWire:
        return self

    def begin(
        self, instance_id: int = 1, rotary: Rotary = ROTARY, before: Sequence[int] = (), **fields: Any
    ) -> b.BlendRegistered:
        self.registered = self.register(instance_id, **fields)
        self.world_size = fields.get("world_size", 1)
        payload = b.RegisterBlend(instance_id, "tiny", self.world_size, rotary, packed(before))
        return self.call(b.CB_REGISTER_KV_CACHE.name, payload)

    def names(self, tokens: Sequence[int], instance_id: int = 1, **marks: Any) -> tuple[b.Segment, ...]:
        payload = b.StorePreComputed(instance_id, "r", packed(tokens), **marks)
        answer: b.SegmentNames = self.call(b.CB_STORE_PRE_COMPUTED.name, payload)
        return answer.segments

    def pre_compute(self, tokens: Sequence[int], instance_id: int = 1, **marks: Any) -> tuple[b.Segment, ...]:
        segments = self.names(tokens, instance_id, **marks)
        for each in segments:
            if not each.held:
                self.put(each.digests, marks.get("cache_salt", ""), instance_id)
        return segments

    def look(self, tokens: Sequence[int], instance_id: int = 1, request_id: str = "r", **marks: Any) -> b.Hits:
        payload = b.LookupPreComputed(instance_id, request_id, packed(tokens), **marks)
        return self.call(b.CB_LOOKUP_PRE_COMPUTED.name, payload)

    def plan(self, hits: b.Hits, instance_id: int = 1, cache_salt: str = "") -> b.LoadPlan:
        payload = b.RetrievePreComputed(
            instance_id, "r", hits.prefix_tokens, hits.prefix_digests, hits.segments, cache_salt
        )
        return self.call(b.CB_RETRIEVE_PRE_COMPUTED.name, payload)

    def final(self, tokens: Sequence[int], instance_id: int = 1) -> bytes:
        answer: b.FinalNames = self.call(b.CB_STORE_FINAL.name, b.StoreFinal(instance_id, "r", packed(tokens)))
        return answer.digests

    def free(self, ticket: str) -> int:
        freed: m.Freed = self.call("FREE_LOOKUP_LOCKS", m.TicketRef(ticket))
        return freed.pins

    def put(self, digests: bytes, cache_salt: str = "", instance_id: int = 1) -> None:
        """Stores all by ONE store of each rank; each object holds its digest over and over."""
        for rank in range(self.world_size):
            plan = self.prepare_store(self.digest_key(digests, rank, cache_salt), instance_id)
            if plan.lease:
                for place in plan.ranges:
                    digest = digests[place.chunk * DIGEST_BYTES : (place.chunk + 1) * DIGEST_BYTES]
                    self.write(msgspec.structs.replace(plan, ranges=(place,)), digest)
                self.call("COMMIT_STORE", m.LeaseRef(plan.lease))

    def get(self, plan: b.LoadPlan, instance_id: int = 1) -> list[bytes] | None:
        """The digest that each object of the plan holds, by ONE retrieve."""
        if not plan.digests:
            return []
        found = self.retrieve(self.digest_key(plan.digests, 0, ""), instance_id)
        if found is None:
            return None
        nbytes = len(found) * DIGEST_BYTES // len(plan.digests)
        return [found[at : at + DIGEST_BYTES] for at in range(0, len(found), nbytes)]

    def digest_key(self, digests: bytes, rank: int, cache_salt: str) -> CacheKey:
        end = len(digests) // DIGEST_BYTES * self.registered.desc.chunk_tokens
        return CacheKey(
            "tiny",
            self.world_size,
            rank,
            self.registered.namespace,
            0,
            end,
            "r",
            digests=digests,
            cache_salt=cache_salt,
        )

    def put_prompt(self, tokens: Sequence[int]) -> None:
        """Stores a prompt's whole chunks as any engine does: exact."""
        self.store(key_for(self.registered, tokens[: len(tokens) // CHUNK * CHUNK]), b"exact")

    def pins(self) -> int:
        return self.status()["l1"]["pins"]


def spans(segments: Sequence[b.Segment]) -> list[tuple[int, int]]:
    return [(each.start, each.start + each.tokens) for each in segments]

"""An engine that knows what every chunk must hold: it checks each byte that it loads. One thread, blocking."""

from __future__ import annotations

import time

from kvframework.api.keys import CacheKey
from kvframework.api.transport import StoreOutcome
from kvframework.wire import messages as m
from tests.core.tiers.prompts import CHUNK_TOKENS, Prompt, content
from tests.support.wire_client import WireClient

_PATIENCE_S = 60.0
# A model of two layers of K and V: objects of 32 KiB.
HIDDEN = 8
OBJECT_BYTES = 32 << 10


class Engine:
    """Registered when it is made. `slowest_lookup_s` is the longest that a LOOKUP kept it waiting."""

    def __init__(
        self, endpoint: str, *, instance_id: int = 1, hidden: int = HIDDEN, answer_s: float = 20.0, name: str = ""
    ) -> None:
        self.client = WireClient(endpoint, timeout=answer_s)
        try:
            self.registered = self.client.register(instance_id, hidden_dim_size=hidden)
        except BaseException:
            self.client.close()
            raise
        self.instance_id = instance_id
        self.slowest_lookup_s = 0.0
        self._name = name or f"engine {instance_id}"
        self._requests = 0

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *_exc: object) -> None:
        self.client.close()

    @property
    def namespace(self) -> bytes:
        return self.registered.namespace

    def key(self, prompt: Prompt, end: int | None = None) -> CacheKey:
        """`end` in chunks."""
        end = len(prompt) if end is None else end
        return CacheKey(
            "tiny",
            1,
            0,
            self.namespace,
            0,
            end * CHUNK_TOKENS,
            f"{self._name}/{self._requests}",
            digests=b"".join(prompt.digests[:end]),
        )

    # whole turns

    def load(self, prompt: Prompt) -> int:
        """Looks the prompt up, waits for L2, and loads the hit; the chunks, every byte of which was right."""
        reply = self.settled(self.look_up(prompt))
        chunks = reply.hit_tokens // CHUNK_TOKENS
        if chunks:
            assert self.retrieve(prompt, chunks), f"{self._name}: what a ticket pins cannot be retrieved"
        self.free(reply)
        return chunks

    def store(self, prompt: Prompt) -> StoreOutcome:
        """Computes and stores what is not there; what became of each chunk."""
        return self.finish(prompt, self.client.prepare_store(self.key(prompt), self.instance_id))

    def finish(self, prompt: Prompt, plan: m.StorePlan) -> StoreOutcome:
        self._write(plan, prompt)
        if not plan.lease:
            return plan.outcome
        committed: StoreOutcome = self.client.call("COMMIT_STORE", m.LeaseRef(plan.lease)).outcome
        return StoreOutcome(
            committed.stored, plan.outcome.present, plan.outcome.in_flight, committed.dropped + plan.outcome.dropped
        )

    # the steps

    def look_up(self, prompt: Prompt) -> m.LookupReply:
        self._requests += 1
        began = time.monotonic()
        reply = self.client.lookup(self.key(prompt))
        self.slowest_lookup_s = max(self.slowest_lookup_s, time.monotonic() - began)
        return reply

    def settled(self, reply: m.LookupReply) -> m.LookupReply:
        """The reply once L2 was asked."""
        return self.client.settled(reply)

    def retrieve(self, prompt: Prompt, chunks: int) -> bool:
        """Compares every byte of the first chunks; False if one is not in L1."""
        plan = self.client.prepare_retrieve(self.key(prompt, chunks), self.instance_id)
        if not plan.hit:
            return False
        assert self.client.arena is not None
        assert [place.chunk for place in plan.ranges] == list(range(chunks))
        for place in plan.ranges:
            found = self.client.arena[place.offset : place.offset + place.length]
            expected = self.content(prompt.digests[place.chunk], place.length)
            if found != expected:
                raise AssertionError(f"{self._name}: WRONG BYTES, {_difference(found, expected, place.chunk)}")
        held = self.client.call("COMMIT_RETRIEVE", m.LeaseRef(plan.lease)).held
        assert held, f"{self._name}: a pin did not hold"
        return True

    def free(self, reply: m.LookupReply) -> None:
        if reply.ticket:
            self.client.call("FREE_LOOKUP_LOCKS", m.TicketRef(reply.ticket))

    def abandon_lookup(self, prompt: Prompt) -> None:
        """Asks, and cancels the load."""
        reply = self.look_up(prompt)
        if reply.ticket:
            self.client.call("CANCEL", m.Cancel(ticket=reply.ticket))

    def abandon_store(self, prompt: Prompt) -> None:
        """Writes what is wrong, and takes it back: it must never be seen."""
        plan = self.client.prepare_store(self.key(prompt), self.instance_id)
        if plan.lease:
            self.client.write(plan, b"never published")
            self.client.call("ABORT", m.LeaseRef(plan.lease))

    def clear(self) -> None:
        self.client.call("CLEAR", m.Clear())

    def content(self, digest: bytes, nbytes: int) -> bytes:
        return content(digest, nbytes)

    def _write(self, plan: m.StorePlan, prompt: Prompt) -> None:
        assert self.client.arena is not None
        for place in plan.ranges:
            kv = self.content(prompt.digests[place.chunk], place.length)
            self.client.arena[place.offset : place.offset + place.length] = kv


def _difference(found: bytes, expected: bytes, chunk: int) -> str:
    at = next(index for index, pair in enumerate(zip(found, expected, strict=True)) if pair[0] != pair[1])
    count = sum(a != b for a, b in zip(found, expected, strict=True))
    return f"chunk {chunk}: {count} of {len(found)}, the first at {at}"

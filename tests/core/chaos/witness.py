"""A check that a STORE's objects can be found at once from another process. Runs in the harness, by its own thread and
client."""

from __future__ import annotations

import queue
import threading
import time

from kvframework.api.keys import DIGEST_BYTES, CacheKey
from kvframework.errors import KVFrameworkError
from kvframework.wire import messages as m
from tests.core.chaos.events import Claim
from tests.core.chaos.ledger import Ledger
from tests.core.tiers.prompts import CHUNK_TOKENS
from tests.support.wire_client import WireClient

_ANSWER_S = 2.0
_AT_ONCE_S = 1.0
# Under LRU the newest object is evicted last: after fewer evictions than this it must still be there.
FEW_EVICTIONS = 16


class Witness:
    """A thread that checks one claim after the other. Claims that it cannot check in time are counted and skipped."""

    def __init__(self, endpoint: str, ledger: Ledger) -> None:
        self._endpoint = endpoint
        self._ledger = ledger
        self._claims: queue.SimpleQueue[Claim | None] = queue.SimpleQueue()
        self._client: WireClient | None = None
        self._thread = threading.Thread(target=self._run, name="witness")
        self._thread.start()

    def ask(self, claim: Claim) -> None:
        self._claims.put(claim)

    def close(self) -> None:
        self._claims.put(None)
        self._thread.join()

    def _run(self) -> None:
        for claim in iter(self._claims.get, None):
            if time.monotonic() > claim.began + _AT_ONCE_S:
                self._ledger.count(claims_left=1)
                continue
            try:
                self._judge(claim)
            except (KVFrameworkError, OSError):  # the server is down, or a new one has started
                self._ledger.count(claims_left=1)
                self._forget()
        self._forget()

    def _judge(self, claim: Claim) -> None:
        client = self._client = self._client or WireClient(self._endpoint, timeout=_ANSWER_S)
        last = len(claim.digests) // DIGEST_BYTES * CHUNK_TOKENS
        first = claim.first * CHUNK_TOKENS
        key = CacheKey(claim.model, 1, None, claim.namespace, first, last, "witness", digests=claim.digests)
        reply = client.call("LOOKUP", m.Lookup(key))
        answered = time.monotonic()
        if reply.ticket:
            client.call("FREE_LOOKUP_LOCKS", m.TicketRef(reply.ticket))
        if reply.hit_tokens == last - first:
            self._ledger.count(claims_held=1)
            return
        status = client.status()
        evictions = status["l1"]["evictions"] - claim.evictions
        another = status["server"]["boot_id"] != claim.boot_id
        if another or evictions >= FEW_EVICTIONS or self._ledger.explained(("clear",), claim.began, answered):
            self._ledger.count(claims_excused=1)
            return
        self._ledger.violate(
            f"of {last - first} tokens that a STORE said are stored, a LOOKUP {answered - claim.began:.3f} s later "
            f"from another process finds {reply.hit_tokens}; {evictions} evictions in between; L1 is now {status['l1']}"
        )

    def _forget(self) -> None:
        if self._client is not None:
            self._client.close()
            self._client = None

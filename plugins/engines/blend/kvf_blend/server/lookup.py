"""One CB_LOOKUP_PRE_COMPUTED in progress: answered at once if L1 suffices, else after one load from L2. Begins in a
worker thread of the server, ends there or in a storage thread."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Sequence

from kvf_blend.messages import CB_LOOKUP_PRE_COMPUTED, Hits
from kvf_blend.server.instances import Objects
from kvf_blend.server.segments import Choice, Question
from kvframework.api.futures import Promise
from kvframework.api.layout import MemoryLayoutDesc
from kvframework.api.requests import CacheServices, ClientInfo, HandlerResult, Message
from kvframework.errors import Cancelled, DeadlineExceeded

# Objects may leave L1 between the check and the pin.
TRIES = 3
# Loads of one client in progress, as for the core's LOOKUP; further requests are answered from L1 alone.
MAX_LOADS = 128


class Loads:
    """The number of loads in progress of each client, so that one does not keep the others from L2. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._of: Counter[int] = Counter()

    def begin(self, client: ClientInfo) -> bool:
        with self._lock:
            if self._of[client.session_id] >= MAX_LOADS:
                return False
            self._of[client.session_id] += 1
            return True

    def end(self, client: ClientInfo) -> None:
        with self._lock:
            self._of[client.session_id] -= 1
            if not self._of[client.session_id]:
                del self._of[client.session_id]


def pinned(
    services: CacheServices, client: ClientInfo, question: Question, objects: Objects, request_id: str
) -> tuple[Choice, str]:
    """The best choice from the objects in L1 now, pinned, and its ticket; nothing and "" if there is none."""
    for _ in range(TRIES):
        choice = question.choose(objects.whole(question.digests, services.present(objects.keys(question.digests))))
        needed = choice.digests()
        if not needed:
            break
        ticket = services.pin(client, objects.keys(needed), request_id)
        if ticket:
            return choice, ticket
    return Choice(), ""


class Lookup:
    """One lookup with one answer. A client that disconnected, cancelled, or waited for longer than the request's
    deadline gets no ticket, so that no pin stays without an owner."""

    def __init__(
        self,
        services: CacheServices,
        client: ClientInfo,
        question: Question,
        objects: Objects,
        request_id: str,
        *,
        chunk_tokens: int,
        loads: Loads,
    ) -> None:
        self._loads = loads
        self._services = services
        self._client = client
        self._question = question
        self._objects = objects
        self._request_id = request_id
        self._chunk_tokens = chunk_tokens
        self._deadline = time.monotonic() + CB_LOOKUP_PRE_COMPUTED.deadline_s
        self._cancelled = False

    def start(self, desc: MemoryLayoutDesc) -> HandlerResult:
        digests = self._question.digests
        keys = self._objects.keys(digests)
        here = self._objects.whole(digests, self._services.present(keys))
        if self._question.choose(here) == self._question.choose(set(digests)):
            return self._answer()
        if not self._loads.begin(self._client):
            return self._answer()
        task = self._services.submit_prefetch_task(keys, desc, select=self._worth)
        if task is None:
            self._loads.end(self._client)
            return self._answer()

        def cancel() -> None:
            self._cancelled = True
            task.cancel()

        future: Promise[Message] = Promise(cancel)
        task.add_done_callback(lambda: self._loaded(future))
        return future

    def _worth(self, available: Sequence[bool]) -> Sequence[int]:
        digests = self._question.digests
        chosen = set(self._question.choose(self._objects.whole(digests, available)).digests())
        return self._objects.indices(index for index, digest in enumerate(digests) if digest in chosen)

    def _loaded(self, future: Promise[Message]) -> None:
        """Answers after the load has ended, while the load still pins its objects."""
        self._loads.end(self._client)
        try:
            if self._cancelled:
                raise Cancelled("the lookup was cancelled")
            if time.monotonic() > self._deadline:
                raise DeadlineExceeded("L2 tiers did not answer in time", where=CB_LOOKUP_PRE_COMPUTED.name)
            answer = self._answer()
        except Exception as error:  # noqa: BLE001  the future carries it to the client
            future.set_exception(error)
        else:
            future.set_result(answer)

    def _answer(self) -> Hits:
        choice, ticket = pinned(self._services, self._client, self._question, self._objects, self._request_id)
        prefix = len(choice.prefix) * self._chunk_tokens
        return Hits(prefix, b"".join(choice.prefix), choice.exact, choice.segments, ticket)

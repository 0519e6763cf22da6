"""The engine's side of blend's requests, for any engine: no tensors, no torch.

Called from the engine's thread. Every wait has a deadline, and any failure is a miss with one line in the log. After a
restart of the server the instance registers again by itself (see `WorkerAdapter`), and blend with its next request.
"""

from __future__ import annotations

import array
import contextlib
import logging
import sys
import uuid
from collections.abc import Iterable, Sequence
from itertools import chain
from typing import TypeVar

from kvf_blend import messages as m
from kvf_blend.errors import BadSegments
from kvf_blend.rotary import Rotary, fingerprint
from kvframework.api.requests import Message, RequestSpec
from kvframework.api.transport import error_code
from kvframework.client import KVClient, SchedulerAdapter, WorkerAdapter
from kvframework.errors import KVFrameworkError, NotRegistered, VersionMismatch

log = logging.getLogger(__name__)

M = TypeVar("M", bound=Message)
Ranges = Iterable[tuple[int, int]]


class BlendClient:
    """Blend for one registered instance. Borrows the client, which knows `kvf_blend.messages.REQUESTS`, and the
    adapters. For one thread.

    The engine computes every segment behind `before` and nothing else. `timeout_s` bounds requests that may wait for L2
    or hash many tokens; the others have the client's deadlines. Arguments that mark no segments of a prompt are the
    caller's mistake: `BadSegments` is raised, not logged.
    """

    def __init__(
        self,
        client: KVClient,
        worker: WorkerAdapter,
        scheduler: SchedulerAdapter,
        rotary: Rotary,
        *,
        before: Sequence[int] = (),
        cache_salt: str = "",
        timeout_s: float = 10.0,
    ) -> None:
        self._client = client
        self._worker = worker
        self._scheduler = scheduler
        self._rotary = rotary
        self._before = packed(before)
        self._salt = cache_salt
        self._timeout_s = timeout_s

    def register(self) -> m.BlendRegistered:
        """Register the rotary parameters with the server. Blocks for the client's `setup_s` at most.

        Raises `BadRotary` and `BlendRefused` for a model or layout that cannot be blended, `UnknownRequest` from a
        server without this plugin, `VersionMismatch` from one that is too old for `before`, `ServerGone`,
        `DeadlineExceeded`.
        """
        worker, registration = self._worker, self._worker.registration
        world_size = registration.world_size if registration is not None else worker.world_size
        payload = m.RegisterBlend(worker.instance_id, worker.model_name, world_size, self._rotary, self._before)
        answer = self._client.request(m.CB_REGISTER_KV_CACHE.name, payload, m.BlendRegistered)
        if answer.fingerprint != fingerprint(self._rotary, self._before):
            # It would name segments as if they were computed alone.
            self.unregister()
            raise VersionMismatch(
                "the server's release of kvf_blend does not support tokens before segments",
                where="before",
                hint="update the server, or leave out `before`",
            )
        return answer

    def unregister(self) -> None:
        """End blend for the instance, if the server runs. Stored objects stay."""
        if self._client.usable:
            payload = m.UnregisterBlend(self._instance_id)
            with contextlib.suppress(KVFrameworkError):
                self._client.request(m.CB_UNREGISTER_KV_CACHE.name, payload, m.BlendUnregistered)

    def name_segments(self, tokens: Sequence[int], separator: Sequence[int], ranges: Ranges) -> tuple[m.Segment, ...]:
        """The marked segments of a prompt, which the server adds to its known segments; () after a failure."""
        payload = m.StorePreComputed(
            self._instance_id, uuid.uuid4().hex, *_marked(tokens, separator, ranges), self._salt
        )
        return self._ask(m.CB_STORE_PRE_COMPUTED, payload, m.SegmentNames(()), timeout=self._timeout_s).segments

    def look_up(self, request_id: str, tokens: Sequence[int], separator: Sequence[int], ranges: Ranges) -> m.Hits:
        """The parts of a prompt that all ranks have in any tier; pinned until `end`. Waits for L2."""
        payload = m.LookupPreComputed(self._instance_id, request_id, *_marked(tokens, separator, ranges), self._salt)
        return self._ask(m.CB_LOOKUP_PRE_COMPUTED, payload, m.Hits(), timeout=self._timeout_s)

    def plan(self, request_id: str, hits: m.Hits) -> m.LoadPlan:
        """The load plan of this rank for `hits`: digests, pinned until `end`, and their positions in the prompt."""
        if not hits.prefix_tokens and not hits.segments:
            return m.LoadPlan()
        payload = m.RetrievePreComputed(
            self._instance_id, request_id, hits.prefix_tokens, hits.prefix_digests, hits.segments, self._salt
        )
        return self._ask(m.CB_RETRIEVE_PRE_COMPUTED, payload, m.LoadPlan(), timeout=self._client.deadlines.load_s)

    def end(self, request_id: str) -> None:
        self._scheduler.end_request(request_id)

    def name_final(self, tokens: Sequence[int]) -> bytes:
        """Digests of the whole chunks of a blended prompt; b"" after a failure."""
        payload = m.StoreFinal(self._instance_id, uuid.uuid4().hex, packed(tokens), self._salt)
        return self._ask(m.CB_STORE_FINAL, payload, m.FinalNames(b""), timeout=self._timeout_s).digests

    @property
    def _instance_id(self) -> int:
        return self._worker.instance_id

    def _ask(self, spec: RequestSpec, payload: Message, miss: M, *, timeout: float) -> M:
        failed: KVFrameworkError
        for again in (False, True):
            try:
                if again:
                    self.register()
                return self._client.request(spec.name, payload, type(miss), timeout=timeout, on_late=self._release)
            except BadSegments:
                raise
            except NotRegistered as error:
                failed = error
            except KVFrameworkError as error:
                failed = error
                break
        self._client.lost("lookups", error_code(failed))
        log.warning("%s failed and counts as a miss: %s", spec.name, failed)
        return miss

    def _release(self, answer: Message) -> None:
        """Release the pins of an answer that came after its timeout: no caller knows its ticket."""
        if isinstance(answer, (m.Hits, m.LoadPlan)):
            self._scheduler.release_ticket(answer.ticket)


def _marked(tokens: Sequence[int], separator: Sequence[int], ranges: Ranges) -> tuple[bytes, bytes, bytes]:
    return packed(tokens), packed(separator), packed(chain.from_iterable(ranges))


def packed(numbers: Iterable[int]) -> bytes:
    """Little-endian u32. Raises `OverflowError` for a number outside that range."""
    words = array.array("I", numbers)
    if sys.byteorder == "big":
        words.byteswap()
    return words.tobytes()

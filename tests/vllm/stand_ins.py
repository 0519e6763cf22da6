"""A vLLM request and a lookup service for tests of the state machines, without vLLM and without a server."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from kvf_hashers.sha256 import Sha256
from kvf_vllm.layouts import GroupFacts
from kvf_vllm.options import VllmOptions
from kvf_vllm.registration import CONNECTORS
from kvf_vllm.scheduler import SchedulerSide
from kvf_vllm.step_messages import Served, StepPlan, StepReport, TransferOp
from kvframework.api.futures import Future
from kvframework.api.keys import DIGEST_BYTES, Retain
from kvframework.api.transport import LoadOutcome
from kvframework.client import EngineSpeed, LookupResult, RequestHashes

BLOCK = 4
CHUNK = 8
SERVED = Served("m", b"n" * 16, CHUNK, 1)
ONE_GROUP = (GroupFacts(("layer",), BLOCK),)
# vLLM gives all groups of a hybrid model blocks of one size.
RECURRENT = (GroupFacts(("full",), CHUNK), *(GroupFacts((name,), CHUNK, state=True) for name in ("conv", "ssm")))
WINDOWED = (GroupFacts(("full",), BLOCK), GroupFacts(("window",), BLOCK, window=6))


@dataclass
class FakeRequest:
    request_id: str
    all_token_ids: list[int]
    num_computed_tokens: int = 0
    cache_salt: str | None = None
    kv_transfer_params: object = None
    lora_request: object | None = None
    mm_features: list[Any] = field(default_factory=list)
    prompt_embeds: object | None = None
    pooling_params: object | None = None
    resumable: bool = False
    skip_reading_prefix_cache: bool = False
    trace_headers: dict[str, str] | None = None
    kv_hints: object | None = None

    @property
    def num_tokens(self) -> int:
        return len(self.all_token_ids)

    @property
    def block_hashes(self) -> list[bytes]:
        """One for each whole block, for what lies before its end and the salt."""
        salt = self.cache_salt or ""
        return [
            bytes(salt + str(self.all_token_ids[:end]), "ascii") for end in range(BLOCK, self.num_tokens + 1, BLOCK)
        ]


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


class FakeServer:
    """Knows digests by salt. `pending` answers come before a lookup is settled; `tickets` are not freed yet."""

    def __init__(self) -> None:
        self.served: Sequence[Served] = ()
        self.known: set[tuple[str, bytes]] = set()
        self.pending = 0
        self.tickets: set[str] = set()
        self.asked: list[tuple[int, int]] = []
        # How long each lookup would have waited for L2.
        self.waits: list[float] = []
        self.speeds: list[EngineSpeed | None] = []
        self.requests: list[RequestHashes] = []
        self.polls = 0
        self.reachable = True
        # Lookups run into their deadline.
        self.silent = False
        self.telling = False
        self._waiting: dict[str, int] = {}

    def serve(self, served: Sequence[Served]) -> None:
        self.served = served

    def hashes(
        self, request_id: str, salt: str, trace: str = "", retain: Sequence[Retain] = (), conversation: str = ""
    ) -> RequestHashes | None:
        if not self.reachable:
            return None
        hashes = RequestHashes(Sha256(), CHUNK, request_id=request_id, cache_salt=salt, trace=trace, retain=retain)
        hashes.conversation = conversation
        return hashes

    def tells(self, salt: str) -> bool:
        return self.telling and not salt

    def lookup(
        self, request: RequestHashes, start: int, end: int, wait_s: float = 0.0, speed: EngineSpeed | None = None
    ) -> LookupResult:
        self.speeds.append(speed)
        self.asked.append((start, end))
        self.waits.append(wait_s)
        self.requests.append(request)
        if self.silent:
            return LookupResult(0, unanswered=True)
        hit = 0
        while start + hit < end and (request.cache_salt, digest(request.digests(end), start + hit)) in self.known:
            hit += CHUNK
        if not hit and not self.pending:
            return LookupResult(0)
        ticket = f"t{len(self.asked)}"
        self.tickets.add(ticket)
        self._waiting[ticket] = hit
        return LookupResult(0 if self.pending else hit, ticket, self.pending > 0)

    def poll(self, result: LookupResult) -> LookupResult:
        self.polls += 1
        self.pending = max(self.pending - 1, 0)
        return result if self.pending else LookupResult(self._waiting[result.ticket], result.ticket)

    def free(self, result: LookupResult) -> None:
        self.tickets.remove(result.ticket)

    def stored(self, op: TransferOp) -> None:
        for at in range(op.start, op.end, CHUNK):
            self.known.add((op.salt, digest(op.digests, at)))


def digest(digests: bytes, token: int) -> bytes:
    at = token // CHUNK * DIGEST_BYTES
    return digests[at : at + DIGEST_BYTES]


def scheduler(
    server: FakeServer, *, groups: tuple[GroupFacts, ...] = ONE_GROUP, clock: Clock | None = None, **options: Any
) -> SchedulerSide:
    """With one worker that the server has accepted."""
    roles = {
        name: options.pop(name)
        for name in ("loads", "stores", "unread", "workers", "event_block_size")
        if name in options
    }
    side = SchedulerSide(server, groups, VllmOptions(**options), clock=clock or Clock(), **roles)
    side.heard(StepReport(served=dict.fromkeys(range(roles.get("workers", 1)), SERVED)))
    return side


def table(tokens: int, first: int = 100) -> list[list[int]]:
    return [list(range(first, first + -(-tokens // BLOCK)))]


def computed(side: SchedulerSide, request: FakeRequest, tokens: int, blocks: list[list[int]] | None = None) -> StepPlan:
    held = blocks if blocks is not None else table(request.num_computed_tokens + tokens)
    plan = side.plan_step({request.request_id: tokens}, lambda _request_id: held)
    request.num_computed_tokens += tokens
    return plan


def filled(server: FakeServer, tokens: list[int], **fields: Any) -> None:
    side = scheduler(server)
    request = FakeRequest("other", tokens, **fields)
    side.matched_tokens(request, 0)
    for op in computed(side, request, len(tokens)).stores:
        server.stored(op)
    side.finished(request)
    server.asked.clear()
    server.requests.clear()


class FakeInstance:
    """A worker's registration; `answer` makes the future of each transfer."""

    def __init__(self, answer: Callable[[], Future[Any]] = lambda: Future.resolved(LoadOutcome(True))) -> None:
        self.served: Served | None = SERVED
        self.answer = answer
        self.loads: list[TransferOp] = []
        self.stores: list[TransferOp] = []

    def load(self, ops: Sequence[TransferOp], *, in_pieces: bool = False) -> list[Future[Any]]:
        self.loads += ops
        return [self.answer() for _ in ops]

    def store(self, ops: Sequence[TransferOp]) -> list[Future[Any]]:
        self.stores += ops
        return [self.answer() for _ in ops]

    def nbytes(self, op: TransferOp) -> int:
        return op.end - op.start - op.skip


def scene(
    tokens: int, held: int = 0, asked: dict[str, Any] | None = None, **options: Any
) -> tuple[FakeServer, SchedulerSide, FakeRequest]:
    """A server that holds the tokens from 0 to `held`, the scheduler's side, and a request of the first `tokens`, of
    which `asked` are further fields."""
    server = FakeServer()
    if held:
        filled(server, list(range(held)))
    return server, scheduler(server, **options), FakeRequest("a", list(range(tokens)), **(asked or {}))


def connector_class(name: str) -> Any:
    return getattr(importlib.import_module(CONNECTORS[name]), name)

"""The orders under way: one connection to the server, whose lookups load, pin and hint, and a thread that follows them.

A pin is a lookup that is made again before the server lets it lapse, also after the server was replaced: so it outlasts
a takeover and a restart, for as long as this process lives."""

from __future__ import annotations

import itertools
import logging
import threading
import time
from bisect import bisect_left
from collections import Counter, OrderedDict, deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import msgspec

from kvf_control.orders import Deletion, Directive, Pin, Prefetch
from kvframework.api.hasher import KeyHasher
from kvframework.api.keys import DIGEST_BYTES, Retain
from kvframework.client import Forgotten, KVClient, LookupResult, RequestHashes, SchedulerAdapter, StatusSource
from kvframework.errors import RequestError, ServerGone

log = logging.getLogger(__name__)

# Orders under way at once, and ended ones that are remembered.
MOST_LOADS, MOST_PINS, MOST_PAST = 16, 256, 64
# The parts of L1 that pins may take in all and for each tenant, and that one prefetch may.
PINNED, PINNED_OF_TENANT, LOADED = 0.5, 0.25, 0.25
# The server lets a pin lapse after its ticket_s, 60 s unless configured.
AGAIN_S = 15.0
TICK_S = 0.1
STATUS_S = 1.0
ANSWER_S = 5.0
MOST_CONVERSATIONS, MOST_DIGEST_BYTES = 4096, 64 << 20


class Busy(RequestError):
    """Too much is under way, or pinned."""


@dataclass(eq=False)
class Run:
    """Chunks of one namespace, under one salt."""

    adapter: SchedulerAdapter
    hasher: KeyHasher
    hashes: RequestHashes
    scope: tuple[str, str]
    nbytes: int
    result: LookupResult = field(default_factory=lambda: LookupResult(0))

    @cached_property
    def digests(self) -> bytes:
        return self.hashes.digests(self.hashes.hashed_tokens)

    def ask(self) -> None:
        """Look up once more, and then free what the lookup before has pinned."""
        before, self.result = self.result, self.adapter.lookup(self.hashes, ahead=True)
        self.adapter.free(before)

    def free(self) -> None:
        self.adapter.free(self.result)

    def again(self, retain: Retain | None = None) -> Run:
        """Return the same chunks with what is to be expected of them."""
        hashes = RequestHashes(
            self.hasher,
            self.adapter.chunk_tokens,
            request_id="control",
            cache_salt=self.scope[1],
            digests=self.digests,
            retain=(retain,) if retain else (),
        )
        return Run(self.adapter, self.hasher, hashes, self.scope, self.nbytes)


@dataclass(eq=False)
class Held:
    """An order under way. `until` of a pin is of the monotonic clock, 0 for none."""

    id: str
    do: str
    order: Prefetch
    runs: list[Run]
    until: float = 0.0
    state: str = "loading"
    at: float = field(default_factory=time.time)
    asked_at: float = field(default_factory=time.monotonic)

    @property
    def nbytes(self) -> int:
        return sum(run.nbytes for run in self.runs)

    def told(self) -> Directive:
        return Directive(
            id=self.id,
            do=self.do,
            state=self.state,
            asked_tokens=sum(run.hashes.hashed_tokens for run in self.runs),
            l1_tokens=sum(run.result.hit_tokens for run in self.runs),
            nbytes=self.nbytes,
            tenant=self.order.tenant,
            at=round(self.at, 3),
            until=round(time.time() + self.until - time.monotonic(), 3) if self.until else 0.0,
        )


class Holder:
    """Carries out orders at the server at `endpoint`. Thread-safe; orders block for some answers of the server. They
    raise `RequestError` for what no engine has registered or no order has named, `Busy` beyond a bound, and the errors
    of `StatusSource`."""

    def __init__(self, endpoint: str) -> None:
        self._client = KVClient(endpoint, name="control")
        self._source = StatusSource(endpoint, ANSWER_S, name="control")
        self._lock = threading.RLock()
        self._held: dict[str, Held] = {}
        self._past: deque[Directive] = deque(maxlen=MOST_PAST)
        # By tenant and conversation, the one that was named last at the end.
        self._conversations: OrderedDict[tuple[str, str], list[Run]] = OrderedDict()
        self._numbers = itertools.count(1)
        self._orders: Counter[str] = Counter()
        self._status: tuple[float, Mapping[str, Any]] = (-STATUS_S, {})
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._follow, name="kvf-control", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End all orders, and the connection."""
        self._ended.set()
        self._thread.join(ANSWER_S)
        for held in list(self._held.values()):
            self._end(held, "ended")
        self._client.close()
        self._source.close()

    def prefetch(self, order: Prefetch, do: str = "prefetch", retain: Retain | None = None) -> Directive:
        with self._lock:
            runs = self._runs(order)
            if order.conversation:
                self._remember(order, runs)
            if sum(held.state == "loading" for held in self._held.values()) >= MOST_LOADS:
                raise Busy(f"{MOST_LOADS} prefetches are under way", hint="retry when a prefetch has ended")
            self._bound(runs, LOADED, "prefetched at once")
            runs = [run.again(retain) for run in runs] if retain else runs
            return self._begin(Held(self._name(), do, order, runs))

    def pin(self, order: Pin) -> Directive:
        with self._lock:
            runs = self._runs(order)
            pins = [held for held in self._held.values() if held.do == "pin"]
            # The same run again: the latest order counts.
            digests = [run.digests for run in runs]
            before = [held for held in pins if [run.digests for run in held.runs] == digests]
            others = [held for held in pins if held not in before]
            if len(others) >= MOST_PINS:
                raise Busy(f"{MOST_PINS} pins are held", hint="end a pin, or wait until a pin ends")
            tenants = [run for held in others if held.order.tenant == order.tenant for run in held.runs]
            self._bound([*runs, *tenants], PINNED_OF_TENANT, "pinned for a tenant")
            self._bound([*runs, *(run for held in others for run in held.runs)], PINNED, "pinned")
            if order.conversation:
                self._remember(order, runs)
            told = self._begin(Held(self._name(), "pin", order, runs, time.monotonic() + order.seconds))
            for held in before:
                self._end(held, "ended")
            return told

    def turn(self, order: Prefetch, seconds: float) -> Directive:
        """Say that a conversation goes on within so many seconds."""
        return self.prefetch(order, "turn", Retain("keep", seconds, start=0))

    def end_conversation(self, conversation: str, tenant: str) -> Directive:
        """End its orders, and let what no other conversation shares leave first. Raises `RequestError`."""
        with self._lock:
            runs = self._conversations.pop((tenant, conversation), None)
            if runs is None:
                raise RequestError("no order has named this conversation", hint="first announce a turn")
            for held in list(self._held.values()):
                if (held.order.tenant, held.order.conversation) == (tenant, conversation):
                    self._end(held, "ended")
            others = [run for each in self._conversations.values() for run in each]
            ending = []
            for run in runs:
                shared = max((_shared(run, other) for other in others), default=0)
                start = shared * run.adapter.chunk_tokens
                if start < run.hashes.hashed_tokens:
                    ending.append(run.again(Retain("done", start=start)))
            order = Prefetch(conversation=conversation, tenant=tenant)
            held = Held(self._name(), "end", order, ending)
            self._orders["end"] += 1
            for run in held.runs:
                run.ask()
            return self._end(held, "done")

    def cancel(self, name: str) -> Directive:
        with self._lock:
            if name not in self._held:
                raise RequestError("no running order has this id", available="an id of GET /v1/directives")
            return self._end(self._held[name], "ended")

    def forget(self, order: Deletion) -> Forgotten:
        """Delete; the pins of what may be meant end before. Blocks for `wait_s` and longer."""
        with self._lock:
            for held in list(self._held.values()):
                if _may_mean(order, held):
                    self._end(held, "ended")
            self._orders["forget"] += 1
            source = StatusSource(self._source.endpoint, ANSWER_S, name="control")
        try:
            return source.forget(order.forget(), timeout=order.wait_s + 240.0)
        finally:
            source.close()

    def directives(self) -> list[Directive]:
        with self._lock:
            return [*self._past, *(held.told() for held in self._held.values())]

    def document(self) -> dict[str, Any]:
        """Return the numbers of orders since the start and under way, for metrics."""
        with self._lock:
            pins = [held for held in self._held.values() if held.do == "pin"]
            return {
                "orders": dict(self._orders),
                "pins": len(pins),
                "pinned_bytes": sum(held.nbytes for held in pins),
                "loading": sum(held.state == "loading" for held in self._held.values()),
                "conversations": len(self._conversations),
            }

    def wait(self, name: str, timeout: float) -> Directive | None:
        """Wait until an order is no longer loading; return what is known of it, None if that is forgotten."""
        deadline = time.monotonic() + timeout
        while True:
            found = next((each for each in self.directives() if each.id == name), None)
            if found is None or found.state not in ("loading", "waiting") or time.monotonic() >= deadline:
                return found
            time.sleep(TICK_S)

    # inside

    def _name(self) -> str:
        return f"{int(time.time()):x}-{next(self._numbers)}"

    def _begin(self, held: Held) -> Directive:
        self._orders[held.do] += 1
        for run in held.runs:
            run.ask()
        self._held[held.id] = held
        self._settle(held)
        log.info(
            "order %s of tenant %r: %s of %d tokens", held.id, held.order.tenant, held.do, held.told().asked_tokens
        )
        return held.told()

    def _settle(self, held: Held) -> None:
        """Note whether an order still loads; one that pins nothing ends once it does not."""
        if held.until and any(run.result.unanswered for run in held.runs):
            held.state = "waiting"
        elif any(run.result.pending for run in held.runs):
            held.state = "loading"
        elif held.until:
            held.state = "held"
        else:
            self._end(held, "done")

    def _end(self, held: Held, state: str) -> Directive:
        held.state = state
        told = held.told()
        for run in held.runs:
            run.free()
        self._held.pop(held.id, None)
        self._past.append(told)
        if state == "ended":
            log.info("order %s of tenant %r has ended", held.id, held.order.tenant)
        return told

    def _follow(self) -> None:
        boot_id: bytes | None = None
        while not self._ended.wait(TICK_S):
            with self._lock:
                if self._client.usable and boot_id != self._client.boot_id:  # another server has none of the pins
                    boot_id = self._client.boot_id
                    for held in self._held.values():
                        held.asked_at = -AGAIN_S
                for held in list(self._held.values()):
                    try:
                        self._tick(held, time.monotonic())
                    except Exception:
                        log.exception("an order failed")
                        self._end(held, "ended")

    def _tick(self, held: Held, now: float) -> None:
        if held.until and now >= held.until:
            self._end(held, "ended")
        elif held.state == "waiting" or (held.state == "held" and now >= held.asked_at + AGAIN_S):
            if held.state == "held" or now >= held.asked_at + STATUS_S:
                held.asked_at = now
                for run in held.runs:
                    run.ask()
                self._settle(held)
        elif held.state == "loading":
            for run in held.runs:
                run.result = run.adapter.poll(run.result)
            self._settle(held)

    def _document(self) -> Mapping[str, Any]:
        at, document = self._status
        if time.monotonic() >= at + STATUS_S:
            document = msgspec.json.decode(self._source.ask())
            self._status = time.monotonic(), document
        return document

    def _runs(self, order: Prefetch) -> list[Run]:
        """Return the chunks that an order names."""
        if order.tokens and order.digests:
            raise RequestError("the order has tokens and digests", available="either")
        if not (order.tokens or order.digests):
            known = self._conversations.get((order.tenant, order.conversation))
            if not order.conversation or known is None:
                raise RequestError("the order names no KV", available="tokens, digests, or a known conversation")
            return [run.again() for run in known]
        runs = [run for instance in self._instances(order) if (run := self._run(order, instance)).nbytes]
        if not runs:
            raise RequestError("the order has no whole chunk", hint="name more tokens")
        return runs

    def _instances(self, order: Prefetch) -> Iterator[Mapping[str, Any]]:
        """Yield one registered instance of each namespace that an order may mean."""
        found = {each["namespace"]: each for each in self._document()["instances"]}
        meant = [
            each
            for namespace, each in found.items()
            if order.model in ("", each["model"]) and order.namespace in ("", namespace)
        ]
        if not meant:
            models = sorted({each["model"] for each in found.values()})
            fact = "no engine of this model or namespace is registered"
            raise RequestError(fact, available=", ".join(models) or "no engine")
        yield from meant

    def _run(self, order: Prefetch, instance: Mapping[str, Any]) -> Run:
        if not self._client.usable and not self._client.wait_up(ANSWER_S):
            raise ServerGone("the server does not answer")
        adapter = SchedulerAdapter(
            self._client,
            model_name=instance["model"],
            namespace=bytes.fromhex(instance["namespace"]),
            chunk_tokens=instance["chunk_tokens"],
            world_size=instance["world_size"],
        )
        hasher = self._client.hasher
        hashes = RequestHashes(
            hasher,
            adapter.chunk_tokens,
            request_id="control",
            cache_salt=order.salt,
            digests=bytes.fromhex("".join(order.digests)),
        )
        hashes.extend(order.tokens)
        nbytes = int(hashes.hashed_tokens * instance["bytes_per_token"] * instance["world_size"])
        return Run(adapter, hasher, hashes, (instance["namespace"], order.salt), nbytes)

    def _bound(self, runs: list[Run], part: float, what: str) -> None:
        capacity = self._document()["l1"]["capacity_bytes"]
        nbytes = sum(run.nbytes for run in runs)
        if nbytes > part * capacity:
            raise Busy(f"{nbytes} bytes would be {what}", available=f"{int(part * capacity)}, {part:.0%} of L1")

    def _remember(self, order: Prefetch, runs: list[Run]) -> None:
        name = order.tenant, order.conversation
        before = self._conversations.get(name, [])
        # A turn that continues a run takes its place.
        kept = [
            run
            for run in before
            if not any(run.scope == new.scope and new.digests.startswith(run.digests) for new in runs)
        ]
        self._conversations[name] = [*kept, *runs][-MOST_LOADS:]
        self._conversations.move_to_end(name)
        nbytes = sum(len(run.digests) for each in self._conversations.values() for run in each)
        while len(self._conversations) > MOST_CONVERSATIONS or nbytes > MOST_DIGEST_BYTES:
            nbytes -= sum(len(run.digests) for run in self._conversations.popitem(last=False)[1])


def _shared(one: Run, other: Run) -> int:
    """Return with how many chunks both begin: a digest stands for all before it, too."""
    mine, theirs = one.digests, other.digests
    if one.scope != other.scope or mine[:DIGEST_BYTES] != theirs[:DIGEST_BYTES]:
        return 0
    ends = range(DIGEST_BYTES, min(len(mine), len(theirs)) + 1, DIGEST_BYTES)
    return bisect_left(ends, True, key=lambda end: mine[end - DIGEST_BYTES : end] != theirs[end - DIGEST_BYTES : end])


def _may_mean(order: Deletion, held: Held) -> bool:
    """Whether a deletion may be about what is held, which would keep it in L1."""
    for given, own in ((order.tenant, held.order.tenant), (order.conversation, held.order.conversation)):
        if given and own and given != own:
            return False
    return any(_may_mean_run(order, run) for run in held.runs)


def _may_mean_run(order: Deletion, run: Run) -> bool:
    namespace, salt = run.scope
    if order.namespace not in ("", namespace) or (order.salts and salt not in order.salts):
        return False
    first, digests = run.digests[:DIGEST_BYTES], bytes.fromhex("".join(order.digests[:1]))
    if order.tokens:
        hashes = RequestHashes(run.hasher, run.adapter.chunk_tokens, request_id="control")
        hashes.extend(order.tokens[: run.adapter.chunk_tokens])
        digests = hashes.digests(hashes.hashed_tokens)
    return digests in (b"", first)

"""The orders under way: one connection to the server, whose lookups load, pin and hint, and a thread that follows them.

A pin is a lookup that is made again before the server lets it lapse, also after the server was replaced: so it outlasts
a takeover and a restart, for as long as this process lives."""

from __future__ import annotations

import itertools
import logging
import threading
import time
from collections import Counter, OrderedDict, deque
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from kvf_control.orders import MOST_PINS, Deletion, Directive, Pin, Prefetch
from kvf_control.runs import Held, Place, Run, may_mean, new_run, shared
from kvf_control.state import StateFile
from kvframework.api.keys import Retain
from kvframework.client import Forgotten, KVClient, StatusSource
from kvframework.errors import RequestError, ServerGone

log = logging.getLogger(__name__)

# Orders under way at once, and ended ones that are remembered.
MOST_LOADS, MOST_PAST = 16, 64
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


class Holder:
    """Carries out orders at the server at `endpoint`. Thread-safe; orders block for some answers of the server. They
    raise `RequestError` for what no engine has registered or no order has named, `Busy` beyond a bound, and the errors
    of `StatusSource`."""

    def __init__(self, endpoint: str, state: Path | None = None) -> None:
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
        self._state = StateFile(state) if state else None
        self._changed = False
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._follow, name="kvf-control", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End all orders, and the connection; the file of the state keeps pins and conversations."""
        self._ended.set()
        self._thread.join(ANSWER_S)
        with self._lock:
            self._save()
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
            runs, self._changed = self._conversations.pop((tenant, conversation), None), True
            if runs is None:
                raise RequestError("no order has named this conversation", hint="first announce a turn")
            for held in list(self._held.values()):
                if (held.order.tenant, held.order.conversation) == (tenant, conversation):
                    self._end(held, "ended")
            others = [run for each in self._conversations.values() for run in each]
            ending = []
            for run in runs:
                start = max((shared(run, other) for other in others), default=0) * run.adapter.chunk_tokens
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
                if may_mean(order, held):
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
        self._held[held.id], self._changed = held, True
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
        self._changed |= self._held.pop(held.id, None) is not None
        self._past.append(told)
        if state == "ended":
            log.info("order %s of tenant %r has ended", held.id, held.order.tenant)
        return told

    def _follow(self) -> None:
        boot_id: bytes | None = None
        while not self._ended.wait(TICK_S):
            with self._lock:
                if self._client.usable and boot_id != self._client.boot_id:  # another server has none of the pins
                    if boot_id is None:
                        self._restore()
                    boot_id = self._client.boot_id
                    for held in self._held.values():
                        held.asked_at = -AGAIN_S
                for held in list(self._held.values()):
                    try:
                        self._tick(held, time.monotonic())
                    except Exception:
                        log.exception("an order failed")
                        self._end(held, "ended")
                if boot_id is not None:  # not before what was saved has been read
                    self._save()

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

    def _restore(self) -> None:
        if self._state is None:
            return
        pins, conversations = self._state.read(partial(new_run, self._client))
        self._held |= {held.id: held for held in pins}
        for name, runs in conversations.items():
            self._conversations.setdefault(name, runs)
        if pins or conversations:
            log.info("%d pins and %d conversations go on", len(pins), len(conversations))

    def _save(self) -> None:
        if self._state is not None and self._changed and (self._ended.is_set() or self._state.is_due):
            self._changed = False
            pins = [held for held in self._held.values() if held.until]
            self._state.write(pins, self._conversations)

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
        place = Place(instance["namespace"], instance["model"], instance["chunk_tokens"], instance["world_size"])
        digests = bytes.fromhex("".join(order.digests))
        run = new_run(self._client, place, order.salt, tokens=order.tokens, digests=digests)
        run.nbytes = int(run.hashes.hashed_tokens * instance["bytes_per_token"] * place.world_size)
        return run

    def _bound(self, runs: list[Run], part: float, what: str) -> None:
        capacity = self._document()["l1"]["capacity_bytes"]
        nbytes = sum(run.nbytes for run in runs)
        if nbytes > part * capacity:
            raise Busy(f"{nbytes} bytes would be {what}", available=f"{int(part * capacity)}, {part:.0%} of L1")

    def _remember(self, order: Prefetch, runs: list[Run]) -> None:
        name, self._changed = (order.tenant, order.conversation), True
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

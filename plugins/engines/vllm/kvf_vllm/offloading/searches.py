"""What the server has of a request: one question a prompt, whose answer is kept until it is used."""

from __future__ import annotations

import sys
import time
from concurrent.futures import TimeoutError as NotYet
from typing import TYPE_CHECKING

from vllm.v1.kv_offload.base import OffloadKey, make_offload_key

from kvf_vllm.offloading.tracked import Search
from kvframework.client import granted_objects
from kvframework.errors import DeadlineExceeded

if TYPE_CHECKING:
    from kvf_vllm.offloading.tracked import Engine, Tracked
    from kvframework.api.futures import Future
    from kvframework.client import LookupReply

# The engine's thread waits so long for the answer to a lookup; later the request is asked about again.
ANSWER_S = 0.05
# How long an idle engine waits for L2 to say whether it has more than L1.
DECIDED_S = 0.002
# The time that a grant must have left for its load to be begun.
SPARE_S = 5.0


class Searches:
    """For the scheduler's thread."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        # The last lookup had no answer in time: until one comes, no other is waited for.
        self._is_silent = False

    def ask(self, tracked: Tracked, start: int) -> bool:
        """Ask for what is behind `start`, or hear the answer; returns False if it is still to come."""
        engine, now, search = self._engine, time.monotonic(), tracked.search
        options = engine.options
        if search is not None and (search.start != start or (search.decided and search.until and now > search.until)):
            self.release(tracked)
            search = None
        if search is None:
            search = self._begin(tracked, start, now)
            if search is None:
                tracked.miss = "held_locally" if tracked.computed else "too_short"
                return True
            tracked.search = search
        if not search.decided:
            self._hear(tracked, search, is_late=now - search.began >= options.lookup_deadline_s)
            search = tracked.search or search
            if not search.decided:
                return False
            tracked.found_s = time.monotonic() - search.began
        if engine.tail and not (search.unanswered or search.tail):
            search.tail = self._begin_tail(tracked, search, now)
        if (tail := search.tail) is not None and not tail.decided:
            self._hear(tracked, tail, is_late=now - search.began >= options.lookup_deadline_s)
            if not tail.decided:
                return False
            if tail.found:
                search.found.update(tail.found)
                search.hit_end, search.until = tail.hit_end, min(search.until or tail.until, tail.until)
        external = search.hit_end - tracked.computed
        if search.unanswered:
            tracked.miss = "no_answer"
        else:
            engine.events.looked_up(tracked.request, tracked.wish, max(search.hit_end, start), search.end)
        if external < max(options.min_hit_tokens, 1):
            tracked.miss = tracked.miss or ("not_stored" if external < 1 else "too_few")
            search.found.clear()
        return True

    def release(self, tracked: Tracked) -> None:
        search, tracked.search = tracked.search, None
        if search is not None:
            self._free(search)

    def _begin(self, tracked: Tracked, start: int, now: float, most: int = sys.maxsize) -> Search | None:
        engine, request = self._engine, tracked.request
        end = min(request.num_tokens, most)
        if end < most and any(group.window for group in engine.groups):
            # vLLM computes the last token of a prompt, whose window then needs the state before it.
            end -= 1
        unit = engine.align or engine.unit
        end = end // unit * unit
        if end - start < engine.unit or end <= tracked.computed:
            return None
        keys, names = [], []
        for group in engine.groups:
            first, last = start // group.tokens, -(-end // group.tokens)
            hashes = request.block_hashes[(first + 1) * group.hashes - 1 : last * group.hashes : group.hashes]
            if not hashes:
                return None
            ends = range((first + 1) * group.tokens, (first + len(hashes) + 1) * group.tokens, group.tokens)
            keys.append(engine.keys(tracked, group, hashes, ends))
            suffix = make_offload_key(b"", group.index)
            names.append([OffloadKey(each + suffix) for each in hashes])
        instance = engine.instance
        assert instance is not None
        prompt, wait_s = engine.prompt(tracked, start, end), 0.0 if engine.prefill else DECIDED_S
        sent = instance.lookup(prompt, keys, wait_s=wait_s, speed=engine.prefill.speed())
        ticket = instance.ticket
        return Search(start, end, now, keys, names, sent, session=ticket.session if ticket is not None else b"")

    def _begin_tail(self, tracked: Tracked, found: Search, now: float) -> Search | None:
        """Ask for a part of the block behind what is `found`: vLLM loads one that all groups have stored."""
        engine, hashes, unit = self._engine, tracked.request.block_hashes, self._engine.tail
        start = max(found.hit_end, found.start)
        end = min(tracked.request.num_tokens - 1, start + engine.groups[0].tokens - 1) // unit * unit
        if end <= start or engine.instance is None:
            return None
        mine, ends = hashes[start // unit : end // unit], range(start + unit, end + unit, unit)
        keys = [engine.keys(tracked, group, mine, ends) for group in engine.groups]
        names = [[make_offload_key(each, group.index) for each in mine] for group in engine.groups]
        sent = engine.instance.lookup(engine.prompt(tracked, start, end), keys)
        return Search(start, end, now, keys, names, sent, session=found.session)

    def _hear(self, tracked: Tracked, search: Search, *, is_late: bool) -> None:
        """Take the answer that is there, or comes within a moment. A load from L2 is waited for until it is late; then
        what is in L1 has to do, and is asked for alone."""
        instance = self._engine.instance
        assert instance is not None
        try:
            reply = search.sent.result(0.0 if search.ticket or self._is_silent else ANSWER_S)
            self._is_silent = False
        except (TimeoutError, NotYet):
            self._is_silent |= not search.ticket
            if is_late:
                self._give_up(search)
            return
        except Exception as error:  # noqa: BLE001 - of whatever kind, it is a miss
            self._engine.failed("a lookup", error)
            search.decided = True
            search.unanswered = isinstance(error, (DeadlineExceeded, TimeoutError, NotYet))
            return
        search.ticket = reply.ticket
        if reply.pending:
            end = search.start + reply.hit_tokens
            if not is_late:
                search.sent = instance.ask_again(reply.ticket)
            elif (
                search is tracked.search
                and search.start < end < search.end
                and (shorter := self._begin(tracked, search.start, search.began, end))
            ):
                tracked.search = shorter
                self._free(search)
                self._hear(tracked, shorter, is_late=True)
            else:
                self._give_up(search)
            return
        search.decided = True
        if not reply.grants or not search.session:
            return
        grant = reply.grants[0]
        search.lease, search.until = grant.lease, search.began + reply.lease_s - SPARE_S
        search.hit_end = search.start + reply.hit_tokens
        names, found = search.names, search.found
        for group, index, offset in granted_objects(reply, search.keys):
            found[names[group][index]] = offset

    def _give_up(self, search: Search) -> None:
        self._free(search)
        search.decided, search.unanswered, search.ticket = True, True, ""

    def _free(self, search: Search) -> None:
        """Give back what a search has, and what an answer that is still to come will have."""
        instance = self._engine.instance
        if instance is None:
            return

        def answered(sent: Future[LookupReply]) -> None:
            if sent.exception() is None:
                reply = sent.result(0)
                instance.release(reply.ticket, *[grant.lease for grant in reply.grants])

        instance.release(search.ticket, search.lease)
        if search.tail is not None:
            self._free(search.tail)
        if not search.decided:
            search.sent.add_done_callback(answered)

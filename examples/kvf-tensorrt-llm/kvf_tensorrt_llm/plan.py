"""Which chunks of which requests are loaded and stored in a step: the scheduler's half. Pure but for the lookups.

What goes to the ranks is `Plan`: plain data, which TensorRT-LLM sends by MPI.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from kvframework.client import LookupResult, RequestHashes, SchedulerAdapter


@dataclass(frozen=True)
class Op:
    """Tokens `[start, end)` of a request, whole chunks, in these blocks. A load skips the first `skip` tokens."""

    request_id: str
    digests: bytes
    cache_salt: str
    start: int
    end: int
    block_ids: tuple[int, ...]
    skip: int = 0


@dataclass
class Plan:
    loads: list[Op] = field(default_factory=list)
    stores: list[Op] = field(default_factory=list)


@dataclass
class _Course:
    """One request: its tokens and blocks so far, and up to where it is stored."""

    hashes: RequestHashes
    found: LookupResult | None = None
    own: int = 0
    loaded: int = 0
    planned: bool = False
    begun: bool = False
    blocks: list[int] = field(default_factory=list)
    stored: int = 0


class Planner:
    """The requests of one engine. `tokens_per_block` is the engine's."""

    def __init__(self, scheduler: SchedulerAdapter, tokens_per_block: int) -> None:
        self._scheduler = scheduler
        self._block = tokens_per_block
        self._courses: dict[int, _Course] = {}

    def begin(self, request_id: int, hashes: RequestHashes, own: int, tokens: int, wait_s: float) -> int:
        """Look a prompt up that has `own` tokens on the device; return how many more can be loaded."""
        self.end(request_id)
        course = self._courses[request_id] = _Course(hashes, own=own)
        chunk = hashes.chunk_tokens
        course.stored = start = own // chunk * chunk
        if own % self._block or tokens - 1 <= start:
            return 0
        found = self._scheduler.lookup(hashes, start, tokens - 1)
        course.found = found = self._scheduler.wait(found, wait_s)
        end = start + found.hit_tokens
        if end <= own:
            self._free(course)
            return 0
        course.loaded, course.stored = end - own, end
        return course.loaded

    def step(self, request_id: int, new_tokens: Sequence[int], new_blocks: Sequence[int], computed_end: int) -> Plan:
        """Return what a step does for one request, whose first `computed_end` tokens are there when it ends."""
        course = self._courses.get(request_id)
        if course is None:
            return Plan()
        course.blocks += new_blocks
        if course.begun:
            course.hashes.extend(new_tokens)
        course.begun = True  # its first tokens are the prompt, which was hashed for the lookup
        plan, chunk = Plan(), course.hashes.chunk_tokens
        if course.loaded and not course.planned:
            start, end = course.own // chunk * chunk, course.own + course.loaded
            plan.loads.append(self._op(request_id, course, start, end, course.own - start))
            course.planned = True
        end = min(computed_end, course.hashes.hashed_tokens) // chunk * chunk
        end = min(end, len(course.blocks) * self._block // chunk * chunk)
        if end > course.stored:
            plan.stores.append(self._op(request_id, course, course.stored, end))
            course.stored = end
        return plan

    def loading(self, request_id: int) -> int:
        """Return how many tokens of the request are loaded."""
        course = self._courses.get(request_id)
        return course.loaded if course else 0

    def end(self, request_id: int) -> None:
        """Forget the request, and free what was pinned for it."""
        course = self._courses.pop(request_id, None)
        if course is not None:
            self._free(course)
            self._scheduler.end_request(course.hashes.request_id)

    def _op(self, request_id: int, course: _Course, start: int, end: int, skip: int = 0) -> Op:
        ids = tuple(course.blocks[start // self._block : end // self._block])
        return Op(str(request_id), course.hashes.digests(end), course.hashes.cache_salt, start, end, ids, skip)

    def _free(self, course: _Course) -> None:
        if course.found is not None:
            self._scheduler.free(course.found)
            course.found = None

"""What this engine's scheduler knows: the engine, its requests, and how the server names their chunks."""

from __future__ import annotations

import array
import hashlib
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import TimeoutError as NotYet
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from vllm.v1.kv_offload.base import OffloadKey, get_offload_block_hash, make_offload_key

from kvf_vllm.adapters import AdapterNames
from kvf_vllm.engine_names import EngineNames
from kvf_vllm.events import Announcements
from kvf_vllm.requests import Wish, chunk_extras, salted, traceparent
from kvf_vllm.speed import Prefill
from kvf_vllm.step_messages import AdapterUse
from kvf_vllm.tally import Tally
from kvframework.api.keys import DIGEST_BYTES
from kvframework.client import ErrorNotes, KeyGroup, OpaqueInstance, Prompt
from kvframework.errors import DeadlineExceeded, ServerGone

if TYPE_CHECKING:
    from kvf_vllm.options import VllmOptions
    from kvf_vllm.requests import EngineRequest
    from kvframework.api.futures import Future
    from kvframework.client import LookupReply


@dataclass(frozen=True)
class Group:
    """One of vLLM's groups: its index, the tokens and the block hashes of a chunk, and how many tokens before its end a
    hit needs, 0 for all. `ends_hits`: a hit ends only where one of its chunks ends."""

    index: int
    tokens: int
    hashes: int
    window: int = 0
    ends_hits: bool = False


@dataclass(eq=False)
class Search:
    """The lookup of one request's tokens from `start` to `end`, and what it has found: offsets by key, of `lease` until
    a time of the monotonic clock."""

    start: int
    end: int
    began: float
    keys: list[KeyGroup]
    names: list[list[OffloadKey]]
    sent: Future[LookupReply]
    ticket: str = ""
    lease: str = ""
    until: float = 0.0
    session: bytes = b""
    found: dict[OffloadKey, int] = field(default_factory=dict)
    # The token up to which all is found.
    hit_end: int = 0
    # The lookup of the part of a block behind that.
    tail: Search | None = None
    decided: bool = False
    unanswered: bool = False

    @property
    def parts(self) -> list[Search]:
        return [self] if self.tail is None else [self, self.tail]


@dataclass(eq=False)
class Tracked:
    """A request. `computed` are the tokens that vLLM had when it asked last, `external` those that it then took of what
    was found, and `miss` is the reason if there were none.
    `was_asked_again`: it waited a step for news of the weights."""

    request: EngineRequest
    wish: Wish
    search: Search | None = None
    computed: int = 0
    external: int = 0
    # The token up to which vLLM has computed it or this connector loads it; `is_foreign`: in this step another
    # connector loads more, which may fail.
    own_end: int = sys.maxsize
    is_foreign: bool = False
    # What was found is loaded within the step.
    is_within: bool = False
    miss: str = ""
    # How long the last lookup took.
    found_s: float = 0.0
    was_asked_again: bool = False
    failed: bool = False
    finished: bool = False
    # Those that were computed when vLLM planned stores last; -1: it is to plan them again.
    chunks: int = -1
    # None without an adapter, or as long as it has no name.
    adapter: AdapterUse | None = None
    # Where its whole chunks end, by key, and how many of each group are among them.
    ends: dict[OffloadKey, int] = field(default_factory=dict)
    known: dict[int, int] = field(default_factory=dict)
    # The names of its content, if vLLM's will not do.
    own: bytearray = field(default_factory=bytearray)
    # Loads between steps that are under way: their leases and when they began.
    loads: list[tuple[list[str], float]] = field(default_factory=list)


@dataclass(eq=False)
class Engine:
    """What its requests have in common. `unit` are the tokens of which every group's chunk is a multiple; a hit ends at
    a multiple of `align`, if there is one, or within a block at a multiple of `tail`, if that is not 0."""

    options: VllmOptions
    unit: int
    workers: int
    adapters: AdapterNames
    names: EngineNames
    tally: Tally
    errors: ErrorNotes
    events: Announcements
    prefill: Prefill = field(default_factory=Prefill)
    groups: Sequence[Group] = ()
    align: int | None = None
    tail: int = 0
    # None until the workers have reported the name of their blocks.
    instance: OpaqueInstance | None = None
    # Whether requests without an adapter may have been computed by one.
    spoils_base: bool = False

    @property
    def is_ready(self) -> bool:
        return self.names.served is not None and self.instance is not None and self.instance.is_ready

    @property
    def main(self) -> int:
        """The place of the group whose chunks stand for the prompt: the first of full attention, else the first."""
        return next((place for place, group in enumerate(self.groups) if not group.window), 0)

    def prompt(self, tracked: Tracked, start: int, end: int) -> Prompt:
        request, wish = tracked.request, tracked.wish
        salt = salted(wish.salt, self.names.generation)
        if tracked.adapter is not None:
            salt = salted(salt, f"lora {tracked.adapter.content}")
        return Prompt(request.request_id, start, end, salt, traceparent(request), wish.retain, wish.conversation)

    def keys(self, tracked: Tracked, group: Group, hashes: Sequence[bytes], ends: Sequence[int]) -> KeyGroup:
        """Return the server's keys of a group's chunks; `hashes` are vLLM's of each, `ends` where they end. The keys of
        parts of blocks are keys of smaller chunks, of which a hit needs one."""
        digests = b"".join(map(_digest, hashes)) if tracked.adapter is None else self._own_digests(tracked, ends)
        if ends and ends[-1] % group.tokens:
            return KeyGroup(digests, self.tail, ends[0] // self.tail - 1, self.tail, aligned=group.ends_hits)
        first = ends[0] // group.tokens - 1 if ends else 0
        return KeyGroup(digests, group.tokens, first, group.window, aligned=group.ends_hits)

    def by_group(self, tracked: Tracked, keys: Sequence[OffloadKey]) -> Iterator[list[OffloadKey]]:
        """Yield the keys of each group. Those of parts of blocks come in calls without others."""
        request, ends = tracked.request, tracked.ends
        for place, group in enumerate(self.groups):
            known = tracked.known.get(place, 0)
            hashes = request.block_hashes[known * group.hashes + group.hashes - 1 :: group.hashes]
            for number, each in enumerate(hashes, known + 1):
                ends[make_offload_key(each, group.index)] = number * group.tokens
            tracked.known[place] = known + len(hashes)
            suffix = make_offload_key(b"", group.index)
            mine = [key for key in keys if key.endswith(suffix)]
            # Seldom: vLLM stores the part of a block once a prompt.
            if self.tail and (parts := {get_offload_block_hash(key): key for key in mine if key not in ends}):
                ends |= {parts[each]: n * self.tail for n, each in enumerate(request.block_hashes, 1) if each in parts}
            yield [key for key in mine if key in ends]

    def is_spoiled(self, tracked: Tracked) -> bool:
        """Whether the request, which has no adapter, may have been computed by one."""
        return tracked.request.lora_request is None and self.spoils_base

    def failed(self, what: str, error: Exception) -> None:
        """Log why the server did not answer a call, if it is not a matter of time."""
        if not isinstance(error, (ServerGone, DeadlineExceeded, TimeoutError, NotYet)):
            self.errors.note(what, error)

    def _own_digests(self, tracked: Tracked, ends: Sequence[int]) -> bytes:
        """Return the names of the content up to these tokens. vLLM's hashes have the name and the path of an adapter in
        them; these are of the tokens and images alone, and the adapter's content is in the salt."""
        request, unit, own = tracked.request, self.tail or self.unit, tracked.own
        if ends and len(own) < ends[-1] // unit * DIGEST_BYTES:
            extras = chunk_extras(request, unit)
            for chunk in range(len(own) // DIGEST_BYTES, request.num_tokens // unit):
                tokens = array.array("I", request.all_token_ids[chunk * unit : (chunk + 1) * unit]).tobytes()
                own += _digest(bytes(own[-DIGEST_BYTES:]) + tokens + extras.get(chunk, b"") + b"lora")
        return b"".join(own[end // unit * DIGEST_BYTES - DIGEST_BYTES :][:DIGEST_BYTES] for end in ends)


def _digest(block_hash: bytes) -> bytes:
    if len(block_hash) == DIGEST_BYTES:
        return block_hash
    return hashlib.blake2b(block_hash, digest_size=DIGEST_BYTES, person=b"kvf-vllm-hash").digest()

"""The content that transfers bring for routers: checked, and handed to the events once the transfer has succeeded.
Serving thread, and those in which copies end; without `[events]` nothing is kept and nothing done."""

from __future__ import annotations

from kvframework.api.content import ChunkContent
from kvframework.api.keys import CacheKey
from kvframework.errors import BadRange
from kvframework.events.feed import Events

# Leases whose keys are kept; of older ones the content is passed over.
MAX_PREPARED = 1024


class Contents:
    """A client prepares with the key and commits with the content, so the keys are kept in between."""

    def __init__(self, events: Events) -> None:
        self._events = events
        self._prepared: dict[str, tuple[int, CacheKey, int]] = {}

    @property
    def wanted(self) -> bool:
        """Whether anything is kept."""
        return self._events.wanted

    def prepared(self, session_id: int, lease: str, key: CacheKey, chunk_tokens: int) -> None:
        """A lease was given to a session for the objects of a key."""
        if self._events.wanted:
            self._prepared[lease] = session_id, key, chunk_tokens
            if len(self._prepared) > MAX_PREPARED:
                del self._prepared[next(iter(self._prepared))]

    def check(self, lease: str, content: ChunkContent | None) -> None:
        """Raise `BadRange` for a content that is none of the key's tokens."""
        kept = self._prepared.get(lease)
        if kept is not None:
            self.check_key(kept[1], kept[2], content)

    def check_key(self, key: CacheKey, chunk_tokens: int, content: ChunkContent | None) -> None:
        """Like `check`, for a request that brings key and content."""
        if not self._events.wanted or content is None:
            return
        problem = content.problem(key.end - key.start, chunk_tokens)
        if problem:
            raise BadRange(
                problem,
                where="content",
                available=f"that of the tokens {key.start} to {key.end}, in chunks of {chunk_tokens}",
            )

    def ended(self, lease: str, content: ChunkContent | None = None, *, ok: bool = False) -> None:
        """A lease has ended; `ok`: its objects are there, and `content`, which was checked, is theirs."""
        kept = self._prepared.pop(lease, None)
        if kept is not None and ok:
            self.named(kept[1], content)

    def named(self, key: CacheKey, content: ChunkContent | None) -> None:
        """The objects of a key are there, and `content`, which was checked, is theirs."""
        if self._events.wanted and (content is not None or key.tokens):
            self._events.named(key, content)

    def end_session(self, session_id: int) -> None:
        for lease in [lease for lease, (of, _, _) in self._prepared.items() if of == session_id]:
            del self._prepared[lease]

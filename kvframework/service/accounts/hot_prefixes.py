"""The prefixes that are asked for most, by their first chunk: a space-saving sketch of `ENTRIES` entries. Pure.

Between two cuts the sketch counts every prefix that it meets, exactly; a cut keeps the `ENTRIES` largest, and remembers
as `_floor` how often any that is forgotten can have been asked for. A prefix that comes (again) starts there, and the
floor is its error. So a count is never too small, and too large by the error at most.

A prefix is shown as a keyed hash of its digest, of a secret of this start: it can be compared within a start, and says
nothing of the tokens.
"""

from __future__ import annotations

import hashlib
import heapq
import secrets
from collections.abc import Callable

from kvframework.api.keys import NAMESPACE_BYTES

ENTRIES = 256
# Prefixes that are counted between two cuts: they make a cut's cost small for each.
MOST = 2048
SHOWN = 16
_SHOWN_BYTES = 4


class _Entry:
    """`count` lookups, of which `error` may be too many, and the tokens that they found."""

    __slots__ = ("count", "error", "hit_tokens")

    def __init__(self, floor: int) -> None:
        self.count = self.error = floor
        self.hit_tokens = 0


class HotPrefixes:
    """`looked_up` runs on the serving thread, `status` on any. `model_of` names the model of a namespace."""

    def __init__(self, model_of: Callable[[bytes], str]) -> None:
        self._model_of = model_of
        self._secret = secrets.token_bytes(32)
        # By namespace and digest of the first chunk.
        self._entries: dict[bytes, _Entry] = {}
        self._floor = 0

    def looked_up(self, prefix: bytes, hit_tokens: int) -> None:
        """Count a lookup; `prefix` is the namespace and the digest of the first chunk."""
        entry = self._entries.get(prefix)
        if entry is None:
            if len(self._entries) >= MOST:
                self._cut()
            entry = self._entries[prefix] = _Entry(self._floor)
        entry.count += 1
        entry.hit_tokens += hit_tokens

    def status(self) -> list[dict[str, object]]:
        """Return the largest, `SHOWN` at most."""
        # The copy is one step: the serving thread may change the original meanwhile.
        largest = heapq.nlargest(SHOWN, dict(self._entries).items(), key=lambda item: item[1].count)
        return [
            {
                "model": self._model_of(prefix[:NAMESPACE_BYTES]),
                "prefix": self._hash(prefix),
                "hit_tokens": entry.hit_tokens,
                "count": entry.count,
                "error": entry.error,
            }
            for prefix, entry in largest
        ]

    def _hash(self, prefix: bytes) -> str:
        return hashlib.blake2b(prefix, digest_size=_SHOWN_BYTES, key=self._secret).hexdigest()

    def _cut(self) -> None:
        ranked = sorted(self._entries.items(), key=lambda item: item[1].count, reverse=True)
        self._floor = max(self._floor, ranked[ENTRIES][1].count)
        self._entries = dict(ranked[:ENTRIES])

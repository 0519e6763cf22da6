"""The prefixes that are asked for most, by their first chunk: a space-saving sketch of `ENTRIES` entries. Pure.

Between two cuts the sketch counts every prefix that it meets, exactly; a cut keeps the `ENTRIES` largest, and remembers
as `_floor` how often any that is forgotten can have been asked for. A prefix that comes (again) starts there, and the
floor is its error. So a count is never too small, and too large by the error at most.

A prefix is shown as a keyed hash of its digest, of a secret of this start: it can be compared within a start, and says
nothing of the tokens.
"""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Callable

from kvframework.api.keys import DIGEST_BYTES, NAMESPACE_BYTES, CacheKey

ENTRIES = 256
# Prefixes that are counted between two cuts: they make a cut's cost small for each.
MOST = 2048
SHOWN = 16
_SHOWN_BYTES = 4


class HotPrefixes:
    """`looked_up` runs on the serving thread, `status` on any. `model_of` names the model of a namespace."""

    def __init__(self, model_of: Callable[[bytes], str]) -> None:
        self._model_of = model_of
        self._secret = secrets.token_bytes(32)
        # By namespace and digest of the first chunk.
        self._counts: dict[bytes, int] = {}
        self._tokens: dict[bytes, int] = {}
        self._errors: dict[bytes, int] = {}
        self._floor = 0

    def looked_up(self, key: CacheKey, hit_tokens: int) -> None:
        """Count a lookup; one without digests (token ids to hash) is left out. 0.3 us."""
        if not key.digests:
            return
        prefix = key.namespace + key.digests[:DIGEST_BYTES]
        counts = self._counts
        count = counts.get(prefix)
        if count is None:
            if len(counts) >= MOST:
                self._cut()
            count = self._floor
        counts[prefix] = count + 1
        if hit_tokens:
            self._tokens[prefix] = self._tokens.get(prefix, 0) + hit_tokens

    def status(self) -> list[dict[str, object]]:
        """Return the largest, `SHOWN` at most: the model, the lookups (`count`, of which `error` may be too many), the
        tokens that they found, and the hash of the prefix."""
        # Each copy is one step: the serving thread may change the originals meanwhile.
        counts, tokens, errors, floor = dict(self._counts), dict(self._tokens), dict(self._errors), self._floor
        largest = sorted(counts.items(), key=lambda item: -item[1])[:SHOWN]
        return [
            {
                "model": self._model_of(prefix[:NAMESPACE_BYTES]),
                "prefix": self._hash(prefix),
                "hit_tokens": tokens.get(prefix, 0),
                "count": count,
                "error": errors.get(prefix, floor),
            }
            for prefix, count in largest
        ]

    def _hash(self, prefix: bytes) -> str:
        return hashlib.blake2b(prefix, digest_size=_SHOWN_BYTES, key=self._secret).hexdigest()

    def _cut(self) -> None:
        ranked = sorted(self._counts, key=self._counts.__getitem__, reverse=True)
        kept = ranked[:ENTRIES]
        # Those that came since the last cut began at its floor.
        self._errors = {prefix: self._errors.get(prefix, self._floor) for prefix in kept}
        self._floor = max(self._floor, self._counts[ranked[ENTRIES]])
        self._counts = {prefix: self._counts[prefix] for prefix in kept}
        self._tokens = {prefix: self._tokens[prefix] for prefix in kept if prefix in self._tokens}

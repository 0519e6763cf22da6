"""The prefixes that are asked for most, by their first chunk: a space-saving sketch of `ENTRIES` entries. Pure.

Between two cuts the sketch counts every prefix that it meets, exactly; a cut keeps those with a larger count than the
`ENTRIES` largest have at least: this is the floor, as no prefix that is forgotten can have been asked for more often. A
prefix that comes (again) starts there, and the floor is its error. So a count is never too small, and too large by the
error at most.

A prefix is shown as a keyed hash of its digest, of a secret of this start: it can be compared within a start, and says
nothing of the tokens.
"""

from __future__ import annotations

import hashlib
import heapq
import secrets
from collections.abc import Callable
from operator import itemgetter

from kvframework.api.keys import NAMESPACE_BYTES

ENTRIES = 256
# Prefixes that are counted between two cuts: they make a cut's cost small for each.
MOST = 2048
SHOWN = 16
_SHOWN_BYTES = 4
_LOOKUP = 1 << 48


class _Counts:
    """What is counted between two cuts. A sum is one number, since that takes half the time of two: lookups x `_LOOKUP`
    + the tokens that they found. `errors` are those of the prefixes that the last cut kept; that of all others is
    `floor`."""

    __slots__ = ("errors", "floor", "sums")

    def __init__(self, floor: int, sums: dict[bytes, int], errors: dict[bytes, int]) -> None:
        self.floor = floor
        self.sums = sums
        self.errors = errors

    def error(self, prefix: bytes) -> int:
        return self.errors.get(prefix, self.floor)

    def cut(self) -> _Counts:
        """Return the largest of them."""
        floor = sorted(self.sums.values())[-ENTRIES - 1] // _LOOKUP
        least = (floor + 1) * _LOOKUP
        sums = {prefix: total for prefix, total in self.sums.items() if total >= least}
        return _Counts(floor, sums, {prefix: self.error(prefix) for prefix in sums})


class HotPrefixes:
    """`looked_up` runs on the serving thread, `status` on any. `model_of` names the model of a namespace."""

    def __init__(self, model_of: Callable[[bytes], str]) -> None:
        self._model_of = model_of
        self._secret = secrets.token_bytes(32)
        # By namespace and digest of the first chunk. Replaced as a whole, so that any thread finds one state.
        self._now = _Counts(0, {}, {})

    def looked_up(self, prefix: bytes, hit_tokens: int) -> None:
        """Count a lookup; `prefix` is the namespace and the digest of the first chunk."""
        sums = self._now.sums
        total = sums.get(prefix)
        if total is None:
            if len(sums) >= MOST:
                self._now = self._now.cut()
                sums = self._now.sums
            total = self._now.floor * _LOOKUP
        sums[prefix] = total + _LOOKUP + hit_tokens

    def status(self) -> list[dict[str, object]]:
        """Return the largest, `SHOWN` at most."""
        now = self._now
        # The copy is one step: the serving thread may change the original meanwhile.
        largest = heapq.nlargest(SHOWN, now.sums.copy().items(), key=itemgetter(1))
        return [
            {
                "model": self._model_of(prefix[:NAMESPACE_BYTES]),
                "prefix": self._hash(prefix),
                "hit_tokens": total % _LOOKUP,
                "count": total // _LOOKUP,
                "error": now.error(prefix),
            }
            for prefix, total in largest
        ]

    def _hash(self, prefix: bytes) -> str:
        return hashlib.blake2b(prefix, digest_size=_SHOWN_BYTES, key=self._secret).hexdigest()

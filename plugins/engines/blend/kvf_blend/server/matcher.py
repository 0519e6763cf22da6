"""The index of known segments, which finds them anywhere in a prompt without marks. Runs in the server's worker
threads; thread-safe by a separate lock, which is never held while a prompt is scanned.

The index keeps no tokens, but of each segment an anchor (its first tokens), its length and a rolling hash. A prompt is
scanned once for each length of anchors in use; at each anchor the rolling hash of each length known under it is
compared, and a match counts only after the hasher has computed the segment's name from its tokens. The work that a
prompt can cause is bounded, and anchors with little work go first: one repeated token costs its own hits, not those of
documents beside it.
"""

from __future__ import annotations

import secrets
import struct
import threading
from array import array
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, islice

from kvf_blend.messages import Segment
from kvframework.api.keys import TOKEN_BYTES

# The anchor length in tokens of segments that have as many.
MAX_ANCHOR = 16
# Bounds for one prompt: comparisons of rolling hashes, matches, and tokens that are hashed to verify them.
MAX_COMPARISONS = 1 << 18
MAX_MATCHES = 1 << 14
MAX_VERIFIED_TOKENS = 1 << 22
# Comparing bytes with a window that has been verified costs less than hashing them.
COMPARED_SHARE = 16

_MODULUS = (1 << 61) - 1
# A secret of this process, so that a client cannot construct tokens that collide.
_BASE = secrets.randbelow(_MODULUS - (1 << 33)) + (1 << 32)

# Segments of different spaces never meet: namespace, salt and fingerprint of the rotation.
Space = tuple[bytes, bytes, bytes]


@dataclass(frozen=True, eq=False, slots=True)
class _Known:
    space: Space
    tokens: int
    anchor: bytes
    rolling: int
    digests: bytes


# The segments that begin with each anchor.
_Anchors = dict[bytes, set[_Known]]


class KnownSegments:
    """At most `most` segments, of all spaces together; those that were neither added nor found for longest are
    dropped."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._lock = threading.Lock()
        self._known: OrderedDict[tuple[Space, bytes], _Known] = OrderedDict()
        # By the length of anchors in bytes.
        self._spaces: dict[Space, dict[int, _Anchors]] = {}

    def __len__(self) -> int:
        return len(self._known)

    def add(self, space: Space, tokens: bytes, digests: bytes) -> None:
        """Add a segment by its tokens and its name. Does not keep `tokens`."""
        count = len(tokens) // TOKEN_BYTES
        if not count or not self._most:
            return
        with self._lock:
            if (space, digests) in self._known:
                self._known.move_to_end((space, digests))
                return
        anchor = tokens[: TOKEN_BYTES << min(count, MAX_ANCHOR).bit_length() - 1]
        known = _Known(space, count, anchor, _rolling(tokens)[-1], digests)
        with self._lock:
            while len(self._known) >= self._most:
                self._forget(self._known.popitem(last=False)[1])
            self._known[space, digests] = known
            self._spaces.setdefault(space, {}).setdefault(len(anchor), {}).setdefault(anchor, set()).add(known)

    def find(self, space: Space, tokens: bytes, name: Callable[[bytes], bytes]) -> list[Segment]:
        """All occurrences of known segments in a prompt, the longest first, of equal ones the leftmost; they may
        overlap. `name` gives a segment's digests for its tokens. Blocks for its bounded work, some milliseconds."""
        with self._lock:
            anchors = list(self._spaces.get(space, {}).items())
        places = [(table, piece, at) for size, table in anchors for piece, at in _places(tokens, size, table)]
        if not places:
            return []
        with self._lock:
            work = [(at, list(table.get(piece, ()))) for table, piece, at in places]
        found = list(_verified(tokens, islice(_equal(tokens, work), MAX_MATCHES), name))
        found.sort(key=lambda match: (-match[1].tokens, match[0]))
        with self._lock:
            for known in {known for _, known in found}:
                if (known.space, known.digests) in self._known:
                    self._known.move_to_end((known.space, known.digests))
        return [Segment(start, known.tokens, known.digests) for start, known in found]

    def _forget(self, known: _Known) -> None:
        sizes = self._spaces[known.space]
        anchors = sizes[len(known.anchor)]
        anchors[known.anchor].remove(known)
        if not anchors[known.anchor]:
            del anchors[known.anchor]
        if not anchors:
            del sizes[len(known.anchor)]
        if not sizes:
            del self._spaces[known.space]


def _places(tokens: bytes, size: int, anchors: _Anchors) -> Iterator[tuple[bytes, list[int]]]:
    """The positions, in tokens, of each of `anchors`, all of `size` bytes. Other threads may change the table
    meanwhile."""
    found: dict[bytes, list[int]] = {}
    for at in range(0, len(tokens) - size + 1, TOKEN_BYTES):
        piece = tokens[at : at + size]
        if piece in anchors:
            found.setdefault(piece, []).append(at // TOKEN_BYTES)
    yield from found.items()


def _equal(tokens: bytes, work: Sequence[tuple[list[int], list[_Known]]]) -> Iterator[tuple[int, _Known]]:
    """(start, segment) where the rolling hashes are equal, within the bound; anchors with the fewest comparisons first.
    `work` is the positions of each anchor, and the segments that begin with it."""
    rolling = _rolling(tokens)
    count, left = len(tokens) // TOKEN_BYTES, MAX_COMPARISONS
    for places, lengths in sorted(
        ((places, _by_length(known)) for places, known in work), key=lambda each: len(each[0]) * len(each[1])
    ):
        places = places[: left // max(len(lengths), 1)]
        left -= len(places) * len(lengths)
        for length, table in sorted(lengths.items(), reverse=True):
            power = pow(_BASE, length, _MODULUS)
            for start in places:
                if start + length > count:
                    break
                known = table.get((rolling[start + length] - rolling[start] * power) % _MODULUS)
                if known is not None:
                    yield start, known


def _by_length(segments: Iterable[_Known]) -> dict[int, dict[int, _Known]]:
    """By length in tokens, then by rolling hash."""
    lengths: dict[int, dict[int, _Known]] = {}
    for known in segments:
        lengths.setdefault(known.tokens, {})[known.rolling] = known
    return lengths


def _verified(
    tokens: bytes, matches: Iterable[tuple[int, _Known]], name: Callable[[bytes], bytes]
) -> Iterator[tuple[int, _Known]]:
    """The matches whose tokens have the segment's name, within the bound."""
    windows: dict[_Known, bytes] = {}
    left = MAX_VERIFIED_TOKENS
    for start, known in matches:
        window = tokens[start * TOKEN_BYTES : (start + known.tokens) * TOKEN_BYTES]
        same = windows.get(known)
        cost = known.tokens if same is None else known.tokens // COMPARED_SHARE + 1
        if cost > left:
            continue
        left -= cost
        if same is None and name(window) == known.digests:
            same = windows[known] = window
        if same == window:
            yield start, known


def _rolling(tokens: bytes) -> Sequence[int]:
    """The rolling hashes of all prefixes, from the empty one to the whole."""
    ids = struct.unpack(f"<{len(tokens) // TOKEN_BYTES}I", tokens)
    return array("Q", accumulate(ids, lambda value, token: (value * _BASE + token + 1) % _MODULUS, initial=0))

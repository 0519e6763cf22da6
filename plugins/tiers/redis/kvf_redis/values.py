"""The steps that store or load one value, in pieces or whole: their commands, and the joint meaning of the outcomes. No
I/O: the tier runs the commands of a whole batch at once, step by step."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from types import TracebackType

from kvf_redis.commands import TRAILER_BYTES, Get, Set, Tail, Trailer, new_trailer, parse_trailer, piece_key, spans
from kvframework.api.plugin import Buffer
from kvframework.api.tier import Outcome


class Borrowed:
    """The parts of one value as one run of bytes. Every view made of them is released when the `with` block ends, so
    that not even an error's traceback keeps the caller's buffers alive."""

    def __init__(self, parts: Sequence[memoryview]) -> None:
        self._views = [part.cast("B") for part in parts if part.nbytes]
        self._made: list[memoryview] = []
        self.nbytes = sum(view.nbytes for view in self._views)

    def window(self, start: int, nbytes: int) -> list[memoryview]:
        """Views of the bytes `[start, start + nbytes)`, clipped at the end of the value."""
        found = []
        for view in self._views:
            if start < view.nbytes and nbytes:
                found.append(view[start : start + nbytes])
                nbytes -= found[-1].nbytes
            start = max(start - view.nbytes, 0)
        self._made += found
        return found

    def tail(self, end: int, nbytes: int) -> bytes:
        """A copy of the last `nbytes` before `end`, or of all bytes before `end` if there are fewer."""
        start = max(end - nbytes, 0)
        return b"".join(self.window(start, end - start))

    def __enter__(self) -> Borrowed:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for view in (*self._made, *self._views):
            view.release()


# Pieces outlive their piece 0, so that an expiring value is missing rather than torn.
_PIECE_TTL_SLACK_S = 60


class Writing:
    """The store of one value. Run `pieces` first; then, if `ready`, `before` and `first`; then delete what `remains`
    names."""

    def __init__(self, key: bytes, value: Borrowed, *, max_bytes: int, ttl_s: int) -> None:
        self.before = Tail(key)
        self.pieces: list[Set] = []
        self._possible = True
        nbytes, room = value.nbytes, max_bytes - TRAILER_BYTES
        if nbytes <= max_bytes and parse_trailer(value.tail(nbytes, TRAILER_BYTES)) is None:
            self.first = Set(key, value.window(0, nbytes), ttl_s)
            return
        trailer = new_trailer(nbytes, room)
        if trailer is None:
            self._possible = False
            self.first = Set(key, [], ttl_s)
            return
        self.first = Set(key, [*value.window(0, room), trailer.bytes_of(0)], ttl_s)
        for index, start in enumerate(spans(nbytes, room)):
            if index:
                parts: list[Buffer] = [*value.window(start, room), trailer.bytes_of(index)]
                self.pieces.append(Set(piece_key(key, trailer, index), parts, piece_ttl(ttl_s)))

    def ready(self) -> bool:
        """True once the value may become visible."""
        return self._possible and all(piece.outcome is Outcome.STORED for piece in self.pieces)

    def remains(self) -> Iterator[bytes]:
        """Keys of orphaned pieces: those of the replaced value, or of this write if it failed."""
        if self.first.outcome is Outcome.STORED:
            yield from other_pieces(self.before)
        else:
            yield from (piece.key for piece in self.pieces)


class Reading:
    """The load of one value. Run `first`, then the commands of `rest`, and both again while it is `torn`; then read
    `received`. A value with pieces that hold less than `least` bytes is forged."""

    def __init__(self, key: bytes, value: Borrowed, *, least: int = 1) -> None:
        self._value = value
        self._least = least
        self._begin(key)

    def _begin(self, key: bytes, torn: Trailer | None = None) -> None:
        self.first = Get(key, self._value.window(0, self._value.nbytes))
        self._torn = torn
        self._trailer: Trailer | None = None
        self._others: list[Get] = []

    @property
    def received(self) -> int | Outcome:
        """Bytes of the whole value that were received, without trailers, or the reason why there are none."""
        if self.first.outcome is not Outcome.FOUND:
            return self.first.outcome
        if self._trailer is None:
            return self.first.nbytes
        return self.first.nbytes - TRAILER_BYTES + sum(piece.nbytes - TRAILER_BYTES for piece in self._others)

    def rest(self) -> list[Get]:
        """The commands for the other pieces, once the first has been read. They are received over its trailer."""
        first, room = self.first, self._value.nbytes
        if first.outcome is not Outcome.FOUND:
            return []
        behind = max(first.nbytes - room, 0)
        tail = self._value.tail(first.nbytes - behind, TRAILER_BYTES) + first.spare[:behind]
        trailer = self._trailer = parse_trailer(tail[-TRAILER_BYTES:])
        first_bytes = first.nbytes - TRAILER_BYTES
        if trailer is None:
            if behind:
                first.outcome = Outcome.DAMAGED
        elif trailer.total > room or not trailer.fits(first_bytes, self._least):
            first.outcome = Outcome.DAMAGED
        else:
            for index, start in enumerate(spans(trailer.total, first_bytes)):
                if index:
                    window = self._value.window(start, min(first_bytes, trailer.total - start))
                    self._others.append(Get(piece_key(first.key, trailer, index), window))
        return self._others

    def torn(self) -> bool:
        """True if pieces are missing, so that another writer may have replaced the value meanwhile: the load then
        starts over. A value whose pieces are missing twice is DAMAGED."""
        if any(piece.outcome is Outcome.FAILED for piece in self._others):
            self.first.outcome = Outcome.FAILED
        elif self._trailer is not None and not all(map(self._belongs, range(1, len(self._others) + 1))):
            if self._torn != self._trailer:
                self._begin(self.first.key, self._trailer)
                return True
            self.first.outcome = Outcome.DAMAGED
        return False

    def _belongs(self, index: int) -> bool:
        piece = self._others[index - 1]
        assert self._trailer is not None
        whole = piece.outcome is Outcome.FOUND and piece.nbytes == piece.room + TRAILER_BYTES
        return whole and piece.spare == self._trailer.bytes_of(index)


def other_pieces(tail: Tail) -> Iterator[bytes]:
    """Keys of the pieces, without the first, of the value that ends with `tail`."""
    trailer = parse_trailer(tail.tail)
    if trailer is not None:
        yield from (piece_key(tail.key, trailer, index) for index in range(1, trailer.pieces))


def piece_ttl(ttl_s: int) -> int:
    """TTL of all pieces but the first, in seconds; 0: no expiry."""
    return ttl_s + _PIECE_TTL_SLACK_S if ttl_s else 0

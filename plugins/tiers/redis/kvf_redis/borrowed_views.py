"""Views of the caller's buffers that end with the call. No I/O."""

from __future__ import annotations

from collections.abc import Sequence
from types import TracebackType


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

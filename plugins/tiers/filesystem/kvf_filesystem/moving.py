"""Transfer of bytes between memory and a file: many buffers per system call, in slices. Runs in the caller's thread."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

from kvframework.api.types import Buffer

# A call checks its deadline and `close` between two slices. A multiple of the page size: a slice of aligned views is
# aligned.
SLICE_BYTES = 8 << 20
_SLICE_VIEWS = 1000  # the kernel takes 1024


class Vectored(Protocol):
    """`os.preadv` or `os.pwritev`."""

    def __call__(self, fd: int, buffers: Sequence[Buffer], offset: int, /) -> int: ...


def move(
    operation: Vectored,
    fd: int,
    views: Sequence[memoryview],
    check: Callable[[], None],
    *,
    offset: int = 0,
    enough: int,
) -> int:
    """Reads or writes `views` (of bytes) one after the other, from `offset` on; returns the number of bytes moved.

    Less than `enough` only where the file ends. Raises `OSError`, and the errors of `check`, which is called before
    each slice.
    """
    moved = 0
    for batch in _slices(views):
        check()
        while batch and moved < enough:
            done = operation(fd, batch, offset + moved)
            if done == 0:
                return moved
            moved += done
            batch = _rest(batch, done)
    return moved


def trimmed(views: Sequence[memoryview], nbytes: int) -> list[memoryview]:
    """The first `nbytes` bytes of the views."""
    kept = []
    for view in views:
        if nbytes <= 0:
            break
        kept.append(view[:nbytes])
        nbytes -= view.nbytes
    return kept


def _slices(views: Sequence[memoryview]) -> Iterator[list[memoryview]]:
    batch: list[memoryview] = []
    room = SLICE_BYTES
    for view in views:
        while view.nbytes:
            if not room or len(batch) == _SLICE_VIEWS:
                yield batch
                batch, room = [], SLICE_BYTES
            batch.append(view[:room])
            room -= batch[-1].nbytes
            view = view[batch[-1].nbytes :]
    if batch:
        yield batch


def _rest(views: list[memoryview], done: int) -> list[memoryview]:
    for index, view in enumerate(views):
        if done < view.nbytes:
            return [view[done:], *views[index + 1 :]]
        done -= view.nbytes
    return []

"""What `Retain`s say of the objects of one request, as parts that a policy gets in one call each. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import NamedTuple

from kvframework.api.eviction import Hint
from kvframework.api.retain import Retain


class Part(NamedTuple):
    """Neighbours of which the same is said; the fields are those of `RequestFacts`."""

    objects: slice
    hint: Hint = ""
    keep_s: float = 0.0
    priority: int = 0


def parts_of(
    count: int, chunks: Sequence[int], chunk_tokens: int, retains: Sequence[Retain], *, own: bool
) -> list[Part]:
    """Return the parts of `count` objects, the last part first, as the policies get them. `chunks` are their places in
    the prompt; `own`: the request has stored them itself, and so nobody else has used them."""
    if retains[0].start is None:
        return [_said(slice(0, count), retains[0], own=own)]
    of = {chunk: _fitting(retains, chunk * chunk_tokens, (chunk + 1) * chunk_tokens) for chunk in set(chunks)}
    parts = [_said(span, retain, own=own) for retain, span in _runs([of[chunk] for chunk in chunks])]
    return parts[::-1]


def _fitting(retains: Sequence[Retain], first: int, end: int) -> Retain | None:
    """Return the first one that is said of all tokens of a chunk; of one at no known place (before 0) nothing is."""
    for retain in retains:
        if (retain.start or 0) <= first and first >= 0 and (retain.end is None or end <= retain.end):
            return retain
    return None


def _said(objects: slice, retain: Retain | None, *, own: bool) -> Part:
    if retain is None:
        return Part(objects)
    if retain.what == "keep":
        return Part(objects, "keep", retain.duration, retain.priority)
    return Part(objects, "done" if own or retain.start is not None else "ends")


def _runs(values: Sequence[Retain | None]) -> Iterator[tuple[Retain | None, slice]]:
    first = 0
    for value, run in groupby(values):
        end = first + sum(1 for _ in run)
        yield value, slice(first, end)
        first = end

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
    chunks: Sequence[int], chunk_tokens: int, retains: Sequence[Retain], is_first: Sequence[bool]
) -> list[Part]:
    """Return the parts of a request's objects, the last part first, as the policies get them. `chunks` are their places
    in the prompt; `is_first`: whether the request is the first one to store an object."""
    of = {chunk: _fitting(retains, chunk * chunk_tokens, (chunk + 1) * chunk_tokens) for chunk in set(chunks)}
    said = [_allowed(of[chunk], is_first=first) for chunk, first in zip(chunks, is_first, strict=True)]
    return [_said(span, retain) for retain, span in _runs(said)][::-1]


def _fitting(retains: Sequence[Retain], first: int, end: int) -> Retain | None:
    """Return the first one that is said of all tokens of a chunk; of one at no known place (before 0) only what is said
    of the request."""
    for retain in retains:
        if retain.start is None or (retain.start <= first and first >= 0 and (retain.end is None or end <= retain.end)):
            return retain
    return None


def _allowed(retain: Retain | None, *, is_first: bool) -> Retain | None:
    """Return what is said of an object, None for a request that is done, but not the first one to store it."""
    if retain is None or retain.start is not None or retain.what == "keep" or is_first:
        return retain
    return None


def _said(objects: slice, retain: Retain | None) -> Part:
    if retain is None:
        return Part(objects)
    return Part(objects, "keep", retain.duration, retain.priority) if retain.what == "keep" else Part(objects, "done")


def _runs(values: Sequence[Retain | None]) -> Iterator[tuple[Retain | None, slice]]:
    first = 0
    for value, run in groupby(values):
        end = first + sum(1 for _ in run)
        yield value, slice(first, end)
        first = end

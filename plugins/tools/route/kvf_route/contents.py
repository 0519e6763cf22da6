"""What one publisher says that it holds, kept in the index. Pure.

A publisher may speak of several engines and models on one socket: by topic, `kv@NAME@MODEL` where it names them, and by
data parallel rank. Each of them, with each size of block and each tier, is a place of the index of its own.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from kvf_route import events, prefix_hashes
from kvf_route.index import Index, Keys

log = logging.getLogger(__name__)

# Of one publisher: engines, sizes of blocks and tiers, multiplied.
MOST_PLACES = 64
_LONGEST_TOPIC = 1024
_LONGEST_MISTAKE = 200


class Place(NamedTuple):
    """What a place of the index is. `model` is None where the topic names none."""

    number: int
    topic: bytes
    rank: int
    block_tokens: int
    tier: str
    model: str | None


class Contents:
    """The places of one publisher, with room for `most_blocks`; topics that begin otherwise than with `topic` are not
    taken in. `counts` has what came, by kind: `stored`, `removed`
    and `cleared` blocks and clears; events that were `skipped` or `malformed`; blocks without room (`refused`) and
    blocks whose parent is not known (`orphans`)."""

    def __init__(self, index: Index, most_blocks: int, *, topic: bytes = b"") -> None:
        self.counts: Counter[str] = Counter()
        self.last_mistake = ""
        self.most_blocks = most_blocks
        self._index = index
        self._topic = topic
        self._places: dict[tuple[bytes, int, int, str], Place] = {}
        # Of a model with groups of layers of different kinds one is followed, by topic and rank.
        self._groups: dict[tuple[bytes, int], int | None] = {}

    @property
    def places(self) -> list[Place]:
        return list(self._places.values())

    @property
    def blocks(self) -> int:
        return sum(self._index.size(place.number) for place in self._places.values())

    def apply(self, topic: bytes, payload: bytes) -> None:
        for _ in self.steps(topic, payload):
            pass

    def steps(self, topic: bytes, payload: bytes) -> Iterator[None]:
        """Take a batch in, by steps of some milliseconds. An error of this code costs the rest of that batch, and would
        come again with it."""
        try:
            yield from self._steps(topic, payload)
        except Exception:
            log.exception("a batch of events could not be read")
            self._mistaken("a bug of this router; see the router's log")

    def _steps(self, topic: bytes, payload: bytes) -> Iterator[None]:
        if len(topic) > _LONGEST_TOPIC:
            self._mistaken("the topic of an event is too long")
            return
        if not topic.startswith(self._topic):
            return
        batch = events.decoded(payload)
        stored: list[events.Stored] = []
        blocks = 0
        for event in batch.events:
            if isinstance(event, events.Stored):
                stored.append(event)
                blocks += len(event.externals) + 1
                if blocks < events.AT_ONCE:
                    continue
            self._store(topic, batch.rank, stored)
            stored, blocks = [], 0
            yield
            if isinstance(event, events.Stored):
                continue
            if isinstance(event, events.Removed):
                self._remove(topic, batch.rank, event)
            elif isinstance(event, events.Cleared):
                self.counts["cleared"] += 1
                self._close([each for each in self._places.values() if (each.topic, each.rank) == (topic, batch.rank)])
            elif isinstance(event, events.Skipped):
                self.counts["skipped"] += 1
            else:
                self._mistaken(event.why)
        self._store(topic, batch.rank, stored)

    def _mistaken(self, why: str) -> None:
        self.counts["malformed"] += 1
        self.last_mistake = why[:_LONGEST_MISTAKE]

    def clear(self) -> None:
        self._close(self.places)
        self._groups.clear()

    def _close(self, places: list[Place]) -> None:
        self._index.close([place.number for place in places])
        self._places = {key: place for key, place in self._places.items() if place not in places}

    def _forget_empty(self) -> None:
        """Make room for places: a publisher has many in its life."""
        self._close([place for place in self._places.values() if not self._index.size(place.number)])
        held = {(place.topic, place.rank) for place in self._places.values()}
        self._groups = {of: group for of, group in self._groups.items() if of in held}

    def _store(self, topic: bytes, rank: int, stored: list[events.Stored]) -> None:
        """Take in events without others between them: their parents are looked up at once, and may be among them."""
        if stored and (topic, rank) not in self._groups and len(self._groups) == MOST_PLACES:
            self._forget_empty()
        if stored and (topic, rank) not in self._groups and len(self._groups) == MOST_PLACES:
            self.counts["refused"] += sum(len(event.externals) for event in stored)
            return
        followed = [event for event in stored if event.group == self._groups.setdefault((topic, rank), event.group)]
        self.counts["skipped"] += len(stored) - len(followed)
        for block_tokens in {event.block_tokens for event in followed}:
            self._store_sized(topic, rank, [event for event in followed if event.block_tokens == block_tokens])

    def _store_sized(self, topic: bytes, rank: int, stored: list[events.Stored]) -> None:
        block_tokens = stored[0].block_tokens
        names = dict(self._known_parents(topic, rank, stored))
        held: dict[str, dict[int, bytes]] = {}
        for event in stored:
            parent = prefix_hashes.root(event.adapter) if event.parent is None else names.get(event.parent)
            if parent is None:
                self.counts["orphans"] += len(event.externals)
                continue
            made = prefix_hashes.chained(parent, event.tokens, block_tokens, event.extras)
            named = dict(zip(event.externals, made, strict=True))
            names.update(named)
            held.setdefault(event.tier, {}).update(named)
        for tier, named in held.items():
            place = self._place(topic, rank, block_tokens, tier)
            if place is None or self.blocks + len(named) > self.most_blocks:
                self.counts["refused"] += len(named)
                continue
            refused = self._index.store(place.number, _externals(named), prefix_hashes.as_keys(list(named.values())))
            self.counts["stored"] += len(named) - refused
            self.counts["refused"] += refused

    def _known_parents(self, topic: bytes, rank: int, stored: list[events.Stored]) -> Iterator[tuple[int, bytes]]:
        """The names of those parents that are in the index, in any tier."""
        parents = list({event.parent for event in stored if event.parent is not None})
        tiers = [self._places.get((topic, rank, stored[0].block_tokens, tier)) for tier in events.TIERS]
        places = [place.number for place in tiers if place]
        if not parents or not places:
            return
        known, owns = self._index.own(places, _externals(parents))
        for parent, here, own in zip(parents, known.tolist(), owns.tolist(), strict=True):
            if here:
                yield parent, own.to_bytes(8, "big")

    def _remove(self, topic: bytes, rank: int, event: events.Removed) -> None:
        if event.group is not None and event.group != self._groups.get((topic, rank)):
            self.counts["skipped"] += 1
            return
        externals = _externals(event.externals)
        for place in self._places.values():
            if (place.topic, place.rank, place.tier) == (topic, rank, event.tier):
                self.counts["removed"] += self._index.remove(place.number, externals)

    def _place(self, topic: bytes, rank: int, block_tokens: int, tier: str) -> Place | None:
        """The place, which is made when it is needed first; None if there are too many."""
        key = (topic, rank, block_tokens, tier)
        if key not in self._places:
            if len(self._places) == MOST_PLACES:
                self._forget_empty()
            number = self._index.open(self) if len(self._places) < MOST_PLACES else None
            if number is None:
                return None
            self._places[key] = Place(number, topic, rank, block_tokens, tier, _model(topic))
        return self._places[key]


def _model(topic: bytes) -> str | None:
    """The model that a topic `kv@NAME@MODEL` names."""
    parts = topic.decode("utf-8", "replace").split("@", 2)
    return parts[2] or None if len(parts) == 3 else None


def _externals(externals: list[int] | dict[int, bytes]) -> Keys:
    return np.fromiter(externals, np.uint64, len(externals))

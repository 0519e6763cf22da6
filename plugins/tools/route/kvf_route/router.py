"""All publishers, and the nodes that they tell of."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import zmq.asyncio

from kvf_route import scoring
from kvf_route.contents import Contents, Place
from kvf_route.follower import Follower
from kvf_route.index import Index
from kvf_route.scoring import Scoring
from kvf_route.settings import Node, Publisher
from kvf_route.subscription import Intake, Subscription
from kvframework.client import CurveKeys, LoadedKeys

_SWEEP_S = 0.2


@dataclass(eq=False)
class _Followed:
    contents: Contents
    follower: Follower
    subscription: Subscription
    names: list[str] = field(default_factory=list)
    task: asyncio.Task[None] | None = None


class Router:
    """Follows the publishers of `nodes`, within an event loop. Every publisher may fill an equal part of `blocks`, so
    that none takes another's room."""

    def __init__(self, blocks: int, client_key: str = "") -> None:
        self.index = Index(blocks)
        self._client_key = client_key
        self._context = zmq.asyncio.Context()
        self._context.set(zmq.MAX_SOCKETS, 1 << 16)
        self._followed: dict[Publisher, _Followed] = {}
        self._sweeper: asyncio.Task[None] | None = None

    def follow(self, nodes: Sequence[Node]) -> None:
        """Follow these nodes and no others from now on. Blocking: reads key files. Raises `CurveKeyError`, with nothing
        changed."""
        wanted: dict[Publisher, list[str]] = {}
        for node in nodes:
            wanted.setdefault(node.publisher, []).append(node.name)
        keys = {publisher: self._keys(publisher) for publisher in wanted if publisher not in self._followed}
        for publisher in [each for each in self._followed if each not in wanted]:
            self._end(self._followed.pop(publisher))
        for publisher, names in wanted.items():
            if publisher not in self._followed:
                self._followed[publisher] = self._begin(publisher, keys[publisher])
            self._followed[publisher].names = names
        self._sweeper = self._sweeper or asyncio.get_running_loop().create_task(self._sweep())
        for each in self._followed.values():
            each.contents.most_blocks = self.index.blocks // len(self._followed)

    async def stop(self) -> None:
        """End all subscriptions."""
        tasks = [task for task in (self._sweeper, *(each.task for each in self._followed.values())) if task]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._context.destroy(linger=0)

    @property
    def waiting_for(self) -> list[str]:
        """The publishers that are there and were not heard to the end yet; and those that may still come."""
        return [
            publisher.events
            for publisher, each in self._followed.items()
            if not each.subscription.begun and not each.subscription.is_away
        ]

    def score_tokens(self, tokens: bytes, model: str | None, salt: str, adapter: str) -> Scoring:
        """The score of each node that is there, for packed tokens."""
        return scoring.by_tokens(self.index, self._nodes(model), tokens, salt=salt, adapter=adapter)

    def score_digests(self, digests: bytes, chunk_tokens: int, model: str, salt: str, adapter: str) -> Scoring:
        """The score of each node that is there, for packed digests."""
        nodes = self._nodes(model)
        return scoring.by_digests(self.index, nodes, digests, chunk_tokens, model=model, salt=salt, adapter=adapter)

    def document(self) -> dict[str, Any]:
        return {
            "blocks": sum(each.contents.blocks for each in self._followed.values()),
            "most_blocks": self.index.blocks,
            "index_bytes": self.index.bytes,
            "publishers": [_publisher(publisher, each) for publisher, each in self._followed.items()],
        }

    def _nodes(self, model: str | None) -> dict[str, list[Place]]:
        """The places of each node that is there, for a model; all of them without one."""
        nodes: dict[str, list[Place]] = {}
        for each in self._followed.values():
            if each.subscription.is_away:
                continue
            places = [place for place in each.contents.places if model is None or place.model in (None, model)]
            for name in each.names:
                nodes.setdefault(name, []).extend(places)
        return nodes

    async def _sweep(self) -> None:
        """Free, little by little, what was forgotten."""
        while True:
            await asyncio.sleep(0 if self.index.sweep() else _SWEEP_S)

    def _begin(self, publisher: Publisher, keys: LoadedKeys | None) -> _Followed:
        contents = Contents(self.index, 0, topic=publisher.topic.encode())
        intake = Intake(contents)
        follower = Follower(intake, has_replay=bool(publisher.replay))
        subscription = Subscription(self._context, publisher, follower, intake, keys)
        task = asyncio.get_running_loop().create_task(subscription.run())
        return _Followed(contents, follower, subscription, task=task)

    def _end(self, followed: _Followed) -> None:
        if followed.task:
            followed.task.cancel()
        followed.contents.clear()

    def _keys(self, publisher: Publisher) -> LoadedKeys | None:
        if not publisher.server_key:
            return None
        return CurveKeys(Path(publisher.server_key), Path(self._client_key)).load()


def _publisher(publisher: Publisher, followed: _Followed) -> Mapping[str, Any]:
    subscription, follower, contents = followed.subscription, followed.follower, followed.contents
    counts = contents.counts
    return {
        "events": publisher.events,
        "topic": publisher.topic,
        "nodes": followed.names,
        "connected": subscription.connected,
        "trouble": subscription.trouble,
        "away": subscription.is_away,
        "in_step": subscription.in_step,
        "blocks": contents.blocks,
        "most_blocks": contents.most_blocks,
        "places": [
            {
                "topic": place.topic.decode("utf-8", "replace"),
                "rank": place.rank,
                "block_tokens": place.block_tokens,
                "tier": place.tier,
            }
            for place in contents.places
        ],
        "batches": subscription.batches,
        "lost_batches": follower.lost,
        "forgotten": follower.forgotten,
        "failed_replays": subscription.failures,
        "events_by_kind": {
            "cleared": counts["cleared"],
            "skipped": counts["skipped"],
            "malformed": counts["malformed"] + subscription.malformed,
        },
        "blocks_by_fate": {name: counts[name] for name in ("stored", "removed", "refused", "orphans")},
        "last_mistake": contents.last_mistake,
    }

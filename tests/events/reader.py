"""A router's view: the events of one stream, applied as the strictest router does, with an assertion for each rule."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

import msgspec


class Reader:
    """`held` has the announced blocks by medium. A block comes once until it is removed, and after its parent."""

    def __init__(self) -> None:
        self.held: dict[str, set[int]] = {"CPU": set(), "STORAGE": set()}
        # By hash: the tokens of the prompt from its first one to the end of the block.
        self.prefix: dict[int, tuple[int, ...]] = {}
        self.kinds: Counter[str] = Counter()

    def batch(self, payload: bytes, *, replayed: bool = False) -> None:
        """Apply one payload. What is `replayed` may remove what is not held."""
        at, events, rank = msgspec.msgpack.decode(payload)
        assert at > 0
        assert rank == 0
        for event in events:
            self.event(event if isinstance(event, dict) else as_map(event), replayed=replayed)

    def event(self, event: Mapping[str, Any], *, replayed: bool = False) -> None:
        self.kinds[event["type"]] += 1
        held, hashes = self.held[event["medium"]], event["block_hashes"]
        if event["type"] == "BlockRemoved":
            for each in hashes:
                assert replayed or each in held, "removed, and never announced"
                held.discard(each)
            return
        size = event["block_size"]
        assert len(event["token_ids"]) == size * len(hashes)
        parent = event["parent_block_hash"]
        assert parent is None or any(parent in each for each in self.held.values()), "its parent is not announced"
        for number, each in enumerate(hashes):
            assert each not in held, "announced twice"
            held.add(each)
            before = self.prefix[parent] if parent is not None else ()
            self.prefix[each] = (*before, *event["token_ids"][number * size : (number + 1) * size])
            parent = each

    def batches(self, payloads: Iterable[bytes], *, replayed: bool = False) -> None:
        for each in payloads:
            self.batch(each, replayed=replayed)

    def prompts(self, medium: str = "CPU") -> set[tuple[int, ...]]:
        return {self.prefix[each] for each in self.held[medium]}

    @property
    def now(self) -> dict[str, set[int]]:
        return {medium: set(held) for medium, held in self.held.items()}


def as_map(event: list[Any]) -> dict[str, Any]:
    names = ("type", "block_hashes", "parent_block_hash", "token_ids", "block_size", "lora_id", "medium", "lora_name")
    if event[0] == "BlockRemoved":
        names = ("type", "block_hashes", "medium")
    return dict(zip((*names, "extra_keys"), event, strict=False))

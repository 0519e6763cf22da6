"""What routers hear of the blocks that lie with the server: stored, and no longer there. Pure.

A server tells engines nothing of what it evicts: that something is gone is seen, and announced, when a lookup misses
what this engine has announced. A server that is slow or away looks the same; whatever is found later is not announced
again until it is stored again.

What is announced must not look like other content to a router, which builds its index from tokens and these fields:
images stand in the extra keys, as in vLLM's own events; a salt stands there or the block is not announced.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvf_vllm.requests import EngineRequest, Wish

MAX_ANNOUNCED = 1 << 20
# By it NVIDIA Dynamo tells salts from the other extra keys. What Dynamo itself sends to vLLM as a salt has it already.
SALT_TAG = "dynamo-cache-salt:"

# A block's extra keys, as in vLLM's events: (identifier, offset in the block) of an image, and a salt as text.
ExtraKeys = tuple[tuple[str, int] | str, ...]


@dataclass(frozen=True)
class BlocksStored:
    """`hashes` are vLLM's own, a hash for each `block_size` of `tokens`; `parent` is the one before the first.
    `extra_keys` has an entry for each block, () if no block has any. `salt` is what routers call the request's salt."""

    hashes: Sequence[bytes]
    parent: bytes | None
    tokens: Sequence[int]
    block_size: int
    salt: str = ""
    extra_keys: Sequence[ExtraKeys | None] = ()


@dataclass(frozen=True)
class BlocksRemoved:
    hashes: Sequence[bytes]


class Announcements:
    """`block_size` is that of vLLM's hashes, 0: nothing is announced. Blocks of salted requests are announced only with
    `salts`, since all who subscribe learn them. The oldest announcements are forgotten beyond `MAX_ANNOUNCED` blocks.
    """

    def __init__(self, block_size: int, *, salts: bool = False) -> None:
        self._block_size = block_size
        self._salts = salts
        self._announced: OrderedDict[bytes, None] = OrderedDict()
        self._events: list[BlocksStored | BlocksRemoved] = []

    def of(self, request: EngineRequest, wish: Wish, start: int, end: int) -> BlocksStored | None:
        """The event for when tokens `[start, end)` of a request are stored, None if that is not announced."""
        size, hashes = self._block_size, request.block_hashes
        if not self._names(request, wish) or start % size or end % size or len(hashes) * size < end:
            return None
        salt = request.cache_salt or ""
        return BlocksStored(
            hashes=list(hashes[start // size : end // size]),
            parent=hashes[start // size - 1] if start else None,
            tokens=list(request.all_token_ids[start:end]),
            block_size=size,
            salt=salt.removeprefix(SALT_TAG),
            extra_keys=_extra_keys(request.mm_features, salt, range(start, end, size), size),
        )

    def stored(self, event: BlocksStored) -> None:
        self._events.append(event)
        for each in event.hashes:
            self._announced[each] = None
            self._announced.move_to_end(each)
        while len(self._announced) > MAX_ANNOUNCED:
            self._announced.popitem(last=False)

    def looked_up(self, request: EngineRequest, wish: Wish, hit_end: int, end: int) -> None:
        """A lookup up to `end` found what lies before `hit_end`."""
        if hit_end >= end or not self._names(request, wish):
            return
        span = request.block_hashes[-(-hit_end // self._block_size) : end // self._block_size]
        gone = [each for each in span if each in self._announced]
        for each in gone:
            del self._announced[each]
        if gone:
            self._events.append(BlocksRemoved(gone))

    def forget(self) -> None:
        """Nothing that was announced is found any more by this engine."""
        if self._announced:
            self._events.append(BlocksRemoved(list(self._announced)))
            self._announced.clear()

    def take(self) -> list[BlocksStored | BlocksRemoved]:
        """Since the last call."""
        events, self._events = self._events, []
        return events

    def _names(self, request: EngineRequest, wish: Wish) -> bool:
        """Whether vLLM's hashes name the request's content to a router, and may."""
        # vLLM's hashes know nothing of the connector's own salt: they are those of the same tokens without it.
        return bool(self._block_size) and not wish.own_salt and (self._salts or not request.cache_salt)


def _extra_keys(features: Sequence[Any], salt: str, starts: range, size: int) -> Sequence[ExtraKeys | None]:
    """By block: the images and the like in it, and where each begins; in the first block the salt. Dynamo reads it
    there of every event; vLLM has it in the first block of a prompt."""
    if not features and not salt:
        return ()
    found: list[ExtraKeys | None] = []
    for start in starts:
        keys: list[tuple[str, int] | str] = []
        for feature in features:
            offset, length = int(feature.mm_position.offset), int(feature.mm_position.length)
            if offset < start + size and start < offset + length:
                keys.append((str(feature.identifier), offset - start))
        if salt and start == starts.start:
            keys.append(SALT_TAG + salt.removeprefix(SALT_TAG))
        found.append(tuple(keys) or None)
    return found if any(found) else ()

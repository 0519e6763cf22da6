"""The events for routers about blocks in the server: stored, and removed. Pure.

A server does not report its evictions to engines: a removal is noticed, and announced, when a lookup misses a block
that this engine has announced. A server that is slow or down looks the same; a block that is found later is not
announced again until it is stored again.

An announced block must not look like other content to a router, which builds its index from tokens and these fields:
images stand in the extra keys, as in vLLM's own events; a salt stands there too, or the block is not announced.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvf_vllm.requests import EngineRequest, Wish

MAX_ANNOUNCED = 1 << 20
# The tag by which NVIDIA Dynamo tells salts from the other extra keys. Salts that Dynamo itself sends to vLLM have it
# already.
SALT_TAG = "dynamo-cache-salt:"

# A block's extra keys, as in vLLM's events: (identifier, offset in the block) of an image, and a salt as text.
ExtraKeys = tuple[tuple[str, int] | str, ...]


@dataclass(frozen=True)
class BlocksStored:
    """`hashes` are vLLM's own, a hash for each `block_size` of `tokens`; `parent` is the one before the first.
    `extra_keys` has an entry for each block, () if no block has any. `salt` is the request's salt as routers see it."""

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
    """The announced blocks. `block_size` is that of vLLM's hashes; with 0 nothing is announced. Blocks of salted
    requests are announced only with `salts`, since all subscribers learn the salts. The oldest announcements are
    dropped beyond `MAX_ANNOUNCED` blocks."""

    def __init__(self, block_size: int, *, salts: bool = False) -> None:
        self._block_size = block_size
        self._salts = salts
        self._announced: OrderedDict[bytes, None] = OrderedDict()
        self._events: list[BlocksStored | BlocksRemoved] = []

    def of(self, request: EngineRequest, wish: Wish, start: int, end: int) -> BlocksStored | None:
        """The event for the store of tokens `[start, end)` of a request, None if it is not announced."""
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
        """Records a lookup up to `end` with a hit up to `hit_end`: announced blocks between them are removed."""
        if hit_end >= end or not self._names(request, wish):
            return
        span = request.block_hashes[-(-hit_end // self._block_size) : end // self._block_size]
        gone = [each for each in span if each in self._announced]
        for each in gone:
            del self._announced[each]
        if gone:
            self._events.append(BlocksRemoved(gone))

    def forget(self) -> None:
        """Announce the removal of everything announced so far: this engine no longer finds it."""
        if self._announced:
            self._events.append(BlocksRemoved(list(self._announced)))
            self._announced.clear()

    def take(self) -> list[BlocksStored | BlocksRemoved]:
        events, self._events = self._events, []
        return events

    def _names(self, request: EngineRequest, wish: Wish) -> bool:
        """True if vLLM's hashes name the request's content to a router, and announcing them is allowed."""
        # vLLM's hashes do not cover the connector's own salt: they are those of the same tokens without it. Nor do they
        # cover what an adapter holds.
        if not self._block_size or wish.own_salt or request.lora_request is not None:
            return False
        return self._salts or not request.cache_salt


def _extra_keys(features: Sequence[Any], salt: str, starts: range, size: int) -> Sequence[ExtraKeys | None]:
    """By block: its images and similar inputs with their offsets; in the first block also the salt. Dynamo reads the
    salt in the first block of every event; vLLM has it in the first block of a prompt."""
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

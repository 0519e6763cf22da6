"""The one check of a transfer's arguments in an engine, for all transports. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from operator import attrgetter, index
from typing import TYPE_CHECKING, SupportsIndex

from kvframework.api.content import ChunkContent
from kvframework.api.keys import CacheKey
from kvframework.api.layout import LayerTensors, check_skip
from kvframework.api.transfer import LoadGrant
from kvframework.api.transport import ArenaRange, BlockIds, GroupBlocks, Registration, StoreOutcome, Transfer
from kvframework.errors import BadBlockIds, BadRange, ProtocolError
from kvframework.wire.transfer_blocks import checked_blocks

if TYPE_CHECKING:
    import torch

_offset = attrgetter("offset")


def checked_tokens(registration: Registration, request_id: str, start: int, end: int) -> tuple[int, int]:
    """Return the ends of tokens `[start, end)` as ints. Raises `BadRange` unless they are whole chunks."""
    chunk = registration.desc.chunk_tokens
    first, last = _as_int(start, "start"), _as_int(end, "end")
    if not 0 <= first < last or first % chunk or last % chunk:
        raise BadRange(
            f"tokens {first} to {last}", where=f"request {request_id!r}", available=f"whole chunks of {chunk} tokens"
        )
    return first, last


def checked_start(request_id: str, start: int, chunk_tokens: int) -> int:
    """Return the start of a lookup as an int. Raises `BadRange` unless it is a chunk's first token."""
    first = _as_int(start, "start")
    if first < 0 or first % chunk_tokens:
        raise BadRange(
            f"start is {first}",
            where=f"request {request_id!r}",
            available=f"multiples of {chunk_tokens} tokens",
            hint="round down to a chunk, and skip what the engine has with skip_first_n_tokens",
        )
    return first


def checked_skip(registration: Registration, tokens: int, skip_tokens: int) -> int:
    """Return `skip_tokens` as an int. Raises `BadRange` unless a load of `tokens` tokens can skip as many."""
    skipped = _as_int(skip_tokens, "skip_first_n_tokens")
    if not 0 <= skipped <= tokens:
        raise BadRange(f"skip_first_n_tokens is {skipped}", available=f"0 to {tokens} tokens")
    check_skip(registration.layout, skipped)
    return skipped


def checked_transfer(
    registration: Registration,
    key: CacheKey,
    kv_caches: Mapping[str, LayerTensors],
    block_ids: BlockIds,
    event: torch.Event | None,
    content: ChunkContent | None = None,
    *,
    storing: bool,
    moved: Registration | None = None,
    grant: LoadGrant | None = None,
    in_pieces: bool = False,
) -> Transfer:
    """Return the transfer of the key's tokens, which are whole chunks. `moved` is the registration of the transport,
    whose layer groups are those of `registration`, perhaps several times over. Raises `BadBlockIds`."""
    chunk = registration.desc.chunk_tokens
    try:
        blocks = checked_blocks(
            registration.layout, chunk, key.end - key.start, block_ids, storing=storing, bounded=False
        )
    except BadBlockIds as error:
        of = f"request {key.request_id!r}, tokens {key.start} to {key.end}"
        error.where = f"{of}, {error.where}" if error.where else of
        raise
    if moved is None or moved is registration or len(moved.layout.groups) == len(blocks):
        return Transfer(key, moved or registration, kv_caches, block_ids, blocks, event, content, grant, in_pieces)
    copies = len(moved.layout.groups) // len(blocks)
    return Transfer(key, moved, kv_caches, [*block_ids] * copies, blocks * copies, event, content, grant, in_pieces)


def bare_transfer(registration: Registration, key: CacheKey) -> Transfer:
    """Return the transfer of a client without blocks, which writes and reads whole objects by itself."""
    chunk = registration.desc.chunk_tokens
    blocks = tuple(GroupBlocks((), group.object_blocks(chunk), 0, -1) for group in registration.layout.groups)
    return Transfer(key, registration, {}, (), blocks)


def check_ranges(transfer: Transfer, ranges: Sequence[ArenaRange], arena_bytes: int | None) -> None:
    """Raise `ProtocolError` for an invalid range: of no object of the transfer, of another size, of an object that has
    one already, outside of the arena or over another range (`arena_bytes` None: the bytes come over the wire)."""
    chunks, sizes = transfer.chunks, [group.nbytes for group in transfer.registration.desc.groups]
    for place in ranges:
        group = place.group
        if not (0 <= group < len(sizes) and 0 <= place.chunk < chunks):
            raise ProtocolError(f"the server names {place}", available=f"{chunks} chunks of {len(sizes)} groups")
        if place.length != sizes[group]:
            raise ProtocolError(f"the server names {place}", available=f"{sizes[group]} bytes an object")
        if arena_bytes is not None and not 0 <= place.offset <= arena_bytes - place.length:
            raise ProtocolError(f"the server names {place}", available=f"an arena of {arena_bytes} bytes")
    if len({(place.chunk, place.group) for place in ranges}) < len(ranges):
        raise ProtocolError("the server names an object twice", available="a range for each object")
    if arena_bytes is not None:
        for before, after in pairwise(sorted(ranges, key=_offset)):
            if after.offset < before.offset + before.length:
                raise ProtocolError(f"the server names {before} and {after}", available="ranges apart from each other")


def check_held(transfer: Transfer, ranges: Sequence[ArenaRange], others: StoreOutcome) -> None:
    """Raise `ProtocolError` unless the `ranges` to write and the `others` are together the objects that the engine
    holds."""
    firsts = transfer.first_chunks
    for place in ranges:
        if place.chunk < firsts[place.group]:
            raise ProtocolError(f"the server asks for {place}, which is not held")
    counts = (others.stored, others.present, others.in_flight, others.dropped, others.unknown)
    held = sum(transfer.chunks - first for first in firsts)
    if min(counts) < 0 or len(ranges) + sum(counts) != held:
        raise ProtocolError(f"the server asks for {len(ranges)} objects beside {others}", available=f"{held} objects")


def check_complete(transfer: Transfer, ranges: Sequence[ArenaRange]) -> None:
    """Raise `ProtocolError` if a required chunk is missing: each under full attention, those that a window reaches, the
    last one of a state."""
    given = {(place.chunk, place.group) for place in ranges}
    for group, first in enumerate(transfer.first_chunks):
        missing = [chunk for chunk in range(first, transfer.chunks) if (chunk, group) not in given]
        if missing:
            raise ProtocolError(f"the server names no object for chunks {missing} of layer group {group}")


def _as_int(number: SupportsIndex, name: str) -> int:
    """The number of an engine, which may be one of another library's integers."""
    try:
        return int(index(number))
    except TypeError:
        raise BadRange(f"{name} is {number!r}", available="integers") from None

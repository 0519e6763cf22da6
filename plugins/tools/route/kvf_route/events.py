"""The batches of events as vLLM and others publish them, decoded and checked. Pure.

A batch is `[time, events, data parallel rank]`; an event is a map with its `type`, or, from older publishers, an array
that begins with it. What a publisher may send is bounded by the size of its message; anything that is not as described
is a `Malformed` event, and those around it still count.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, NamedTuple

import msgspec

from kvf_route import prefix_hashes

MOST_BLOCK_TOKENS = 1 << 16
# Of one batch, of one event, of one block. What is longer is a mistake, and costs no time or memory.
MOST_EVENTS = 1 << 16
MOST_BLOCKS = 1 << 16
MOST_TOKENS = 1 << 20
MOST_REMOVED = 1 << 18
MOST_KEYS = 64
LONGEST_KEY = 4096
# Blocks of which a step of work is made.
AT_ONCE = 1024
_LONGEST_NAME = 1024  # bytes of a hash, characters of a name
_LOW = (1 << 64) - 1
# The tag that NVIDIA Dynamo wants before a salt among the extra keys.
_SALT_TAG = "dynamo-cache-salt:"
# Groups of layers that can serve a prefix from any block of it: with others, which a publisher tells apart by
# `group_idx`, a hit is not what the last blocks are.
_WHOLE_PREFIX = frozenset({None, "full_attention", "mla_attention", "sink_full_attention", "unknown"})
_TIERS = {"GPU": "gpu", "CPU": "cpu", "CPU_PINNED": "cpu"}

TIERS = ("gpu", "cpu", "storage")  # the fastest first
_Keys = Annotated[list[msgspec.Raw], msgspec.Meta(max_length=MOST_KEYS)]
_ANY = msgspec.msgpack.Decoder()
_KINDS = ("BlockStored", "BlockRemoved", "AllBlocksCleared")
_MISTAKES = (msgspec.MsgspecError, ValueError, OverflowError, TypeError, RecursionError)


class Stored(NamedTuple):
    """Blocks that a publisher has: `externals` are its hashes, `tokens` packed ids of all of them, `parent` the hash of
    the block before, None for the beginning of a prompt. `extras` are folded into their names, by block."""

    externals: list[int]
    parent: int | None
    tokens: bytes
    block_tokens: int
    tier: str
    adapter: str
    extras: dict[int, bytes]
    group: int | None


class Removed(NamedTuple):
    externals: list[int]
    tier: str
    group: int | None


class Cleared(NamedTuple):
    """The publisher has nothing any more."""


class Skipped(NamedTuple):
    """Well-formed, but not about what a request could find there: other groups of layers, remote stores."""


class Malformed(NamedTuple):
    why: str


Event = Stored | Removed | Cleared | Skipped | Malformed


class Batch(NamedTuple):
    events: Iterator[Event]
    rank: int


def decoded(payload: bytes) -> Batch:
    """The events of a payload, in order, each decoded when it is asked for, with `AT_ONCE` blocks at most: a longer one
    is several. At most one `Malformed` if it is no batch."""
    try:
        batch = _BATCH.decode(payload)
    except _MISTAKES as error:
        return Batch(iter([Malformed(f"the message is not a batch of events: {error}")]), 0)
    return Batch((part for raw in batch.events for part in _parts(_event(raw))), batch.rank or 0)


class _Batch(msgspec.Struct, array_like=True, gc=False):
    ts: float
    events: Annotated[list[msgspec.Raw], msgspec.Meta(max_length=MOST_EVENTS)]
    rank: int | None = None


class _Stored(msgspec.Struct, tag="BlockStored", gc=False):
    block_hashes: Annotated[list[int | bytes], msgspec.Meta(max_length=MOST_BLOCKS)]
    parent_block_hash: int | bytes | None
    token_ids: Annotated[list[int], msgspec.Meta(max_length=MOST_TOKENS)]
    block_size: int
    lora_id: int | str | None = None
    medium: str | None = None
    lora_name: str | None = None
    extra_keys: Annotated[list[_Keys | None], msgspec.Meta(max_length=MOST_BLOCKS)] | None = None
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None
    kv_cache_spec_sliding_window: int | None = None
    locality: str | None = None
    ownership: str | None = None
    session_id: str | None = None
    cache_salt: str | None = None


class _Removed(msgspec.Struct, tag="BlockRemoved", gc=False):
    block_hashes: Annotated[list[int | bytes], msgspec.Meta(max_length=MOST_REMOVED)]
    medium: str | None = None
    group_idx: int | None = None
    locality: str | None = None


class _Cleared(msgspec.Struct, tag="AllBlocksCleared", gc=False):
    pass


class _StoredArray(_Stored, tag="BlockStored", array_like=True, gc=False):
    pass


class _RemovedArray(_Removed, tag="BlockRemoved", array_like=True, gc=False):
    pass


class _ClearedArray(_Cleared, tag="AllBlocksCleared", array_like=True, gc=False):
    pass


class _Kind(msgspec.Struct):
    type: str


_BATCH = msgspec.msgpack.Decoder(_Batch)
_MAP = msgspec.msgpack.Decoder(_Stored | _Removed | _Cleared)
_ARRAY = msgspec.msgpack.Decoder(_StoredArray | _RemovedArray | _ClearedArray)
_KIND = msgspec.msgpack.Decoder(_Kind)


def _event(raw: msgspec.Raw) -> Event:
    try:
        return _checked((_ARRAY if _is_array(raw) else _MAP).decode(raw))
    except _MISTAKES as error:
        return Skipped() if _is_newer(raw) else Malformed(str(error))


def _parts(event: Event) -> Iterator[Event]:
    """The same event by parts of `AT_ONCE` blocks: each continues the one before."""
    if not isinstance(event, (Stored, Removed)) or len(event.externals) <= AT_ONCE:
        yield event
        return
    for begin in range(0, len(event.externals), AT_ONCE):
        externals = event.externals[begin : begin + AT_ONCE]
        if isinstance(event, Removed):
            yield event._replace(externals=externals)
            continue
        step = event.block_tokens * 4
        yield event._replace(
            externals=externals,
            parent=event.externals[begin - 1] if begin else event.parent,
            tokens=event.tokens[begin * step : (begin + AT_ONCE) * step],
            extras={at - begin: extra for at, extra in event.extras.items() if begin <= at < begin + AT_ONCE},
        )


def _is_newer(raw: msgspec.Raw) -> bool:
    """Whether this is a kind of event that did not exist when this was written."""
    try:
        return _KIND.decode(raw).type not in _KINDS
    except _MISTAKES:
        return False


def _is_array(raw: msgspec.Raw) -> bool:
    first = memoryview(raw)[0]
    return first & 0xF0 == 0x90 or first in (0xDC, 0xDD)


def _checked(event: _Stored | _Removed | _Cleared) -> Event:
    """Raise `ValueError` and `OverflowError`."""
    if isinstance(event, _Cleared):
        return Cleared()
    if event.locality == "REMOTE":
        return Skipped()
    externals = [_external(each) for each in event.block_hashes]
    tier = _TIERS.get((event.medium or "GPU").upper(), "storage")
    if isinstance(event, _Removed):
        return Removed(externals, tier, event.group_idx)
    if event.kv_cache_spec_kind not in _WHOLE_PREFIX:
        return Skipped()
    if not 1 <= event.block_size <= MOST_BLOCK_TOKENS:
        raise ValueError(f"the event has blocks of {event.block_size} tokens")
    if len(event.token_ids) != len(externals) * event.block_size:
        raise ValueError(
            f"the event has {len(event.token_ids)} tokens for {len(externals)} blocks of {event.block_size}"
        )
    adapter = event.lora_name or ("" if event.lora_id is None else f"#{event.lora_id}")
    if len(adapter) > _LONGEST_NAME:
        raise ValueError("an adapter's name in the event is too long")
    parent = None if event.parent_block_hash is None else _external(event.parent_block_hash)
    return Stored(
        externals,
        parent,
        prefix_hashes.packed(event.token_ids),
        event.block_size,
        tier,
        adapter,
        _extras(event, first=parent is None),
        event.group_idx,
    )


def _external(name: int | bytes) -> int:
    if isinstance(name, int):
        return name & _LOW
    if len(name) > _LONGEST_NAME:
        raise ValueError("a block hash in the event is too long")
    return prefix_hashes.short(name)


def _extras(event: _Stored, *, first: bool) -> dict[int, bytes]:
    """What is folded into each block besides its tokens. The salt is folded into the first block of a prompt only,
    which all others continue; the adapter's name is in the root."""
    if not event.extra_keys and not event.cache_salt:
        return {}
    if event.extra_keys and len(event.extra_keys) > len(event.block_hashes):
        raise ValueError(f"the event has extra keys for {len(event.extra_keys)} of {len(event.block_hashes)} blocks")
    salts = {event.cache_salt} if event.cache_salt else set()
    extras: dict[int, bytes] = {}
    for number, keys in enumerate(event.extra_keys or ()):
        rest: list[Any] = []
        for key in map(_key, keys or ()):
            if not isinstance(key, str):
                rest.append(key)
            elif key.startswith(_SALT_TAG):
                salts.add(key.removeprefix(_SALT_TAG))
            elif key == event.lora_name:
                continue
            elif first and number == 0:
                salts.add(key)
            elif key != event.cache_salt:
                rest.append(key)
        if rest:
            extras[number] = msgspec.msgpack.encode(rest)
    if first and salts:
        extras[0] = b"".join(map(prefix_hashes.salted, sorted(salts))) + extras.get(0, b"")
    return extras


def _key(raw: msgspec.Raw) -> Any:
    if memoryview(raw).nbytes > LONGEST_KEY:
        raise ValueError(f"the length of an extra key in the event is more than {LONGEST_KEY} bytes")
    return _ANY.decode(raw)

"""What a lookup has prepared for the loads of its hit, from the scheduler's side of an engine to that of its workers.

A grant has one end: a load takes it, in this process or another, or it is given back when the lookup is freed.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

from kvframework.api.hasher import DIGEST_BYTES
from kvframework.api.keys import CacheKey
from kvframework.api.transfer import ArenaRange, LoadGrant, Transfer
from kvframework.errors import ProtocolError
from kvframework.wire import messages as m
from kvframework.wire.indices import unpack_indices, unpack_offsets


class Grants:
    """The grants of a lookup that are not taken yet. Thread-safe."""

    def __init__(self, grants: Iterable[LoadGrant] = ()) -> None:
        self._of = {each.instance_id: each for each in grants}

    def add(self, grants: Iterable[LoadGrant]) -> None:
        """Add those of a later answer."""
        self._of.update((each.instance_id, each) for each in grants)

    def take(self, instance_id: int, start: int, end: int) -> LoadGrant | None:
        """Return the grant for the load of these tokens by this instance, None if there is none (any more)."""
        grant = self._of.get(instance_id)
        if grant is None or (grant.start, grant.end) != (start, end):
            return None
        return self._of.pop(instance_id, None)

    def take_all(self) -> tuple[LoadGrant, ...]:
        """Return the grants of all instances."""
        taken = (self._of.pop(instance_id, None) for instance_id in list(self._of))
        return tuple(each for each in taken if each is not None)


def content_name(digests: bytes, cache_salt: str) -> bytes:
    """Return a name of what the prompt is up to the last of the chunks with these digests: 32 bytes, in which a salt is
    not to be read."""
    return hashlib.sha256(digests[-DIGEST_BYTES:] + cache_salt.encode()).digest()


def grants_of(
    reply: m.LookupReply, key: CacheKey, chunk_tokens: int, boot_id: bytes, began: float
) -> Iterable[LoadGrant]:
    """Return the grants in an answer about the tokens of `key`, to a request that was sent at `began`."""
    start, end, until = key.start, key.start + reply.hit_tokens, began + reply.lease_s
    content = content_name(key.digests[: end // chunk_tokens * DIGEST_BYTES], key.cache_salt)
    return [
        LoadGrant(each.instance_id, each.lease, start, end, content, each.offsets, each.objects, boot_id, began, until)
        for each in reply.grants
    ]


def granted_ranges(transfer: Transfer, grant: LoadGrant) -> tuple[ArenaRange, ...]:
    """Return the ranges of a grant for a transfer of the same tokens. Raises `ProtocolError` and `InvalidPayload`."""
    offsets = unpack_offsets(grant.offsets, where="offsets")
    objects = unpack_indices(grant.objects, where="objects") or range(len(offsets))
    if len(objects) != len(offsets):
        raise ProtocolError(f"the server grants {len(offsets)} places", available=f"{len(objects)} objects")
    sizes = [group.nbytes for group in transfer.registration.desc.groups]
    groups = len(sizes)
    return tuple(
        ArenaRange(index // groups, index % groups, offset, sizes[index % groups])
        for index, offset in zip(objects, offsets, strict=True)
    )

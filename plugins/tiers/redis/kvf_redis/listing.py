"""The values under a prefix, found by SCAN, page by page: no call holds the server for longer than one page takes. Runs
in the caller's thread."""

from __future__ import annotations

import re
from collections.abc import Iterator

from kvf_redis.commands import Length, Page, Tail
from kvf_redis.node import Router
from kvf_redis.pieces import parse_trailer
from kvframework.api.keys import PACKED_KEY_BYTES
from kvframework.api.tier import TierEntry
from kvframework.errors import TierError

_START = b"0"
_SPECIAL = re.compile(rb"[\\*?\[\]]")


def pattern_of(prefix: bytes) -> bytes:
    """The glob of the tier's keys: the prefix as it stands, and as many bytes as a key has, so that no piece but the
    first and no key of a longer prefix matches."""
    return _SPECIAL.sub(rb"\\\g<0>", prefix) + b"?" * PACKED_KEY_BYTES


def list_values(router: Router, prefix: bytes, deadline: float) -> Iterator[TierEntry]:
    """Yields each value once, on all servers. Between two pages it holds no connection. Raises `TierError`."""
    pattern, seen = pattern_of(prefix), set[bytes]()
    for server in router.servers(deadline):
        cursor = _START
        while True:
            page = Page(cursor, pattern, key_bytes=len(prefix) + PACKED_KEY_BYTES)
            router.run_at(server, page, deadline)
            # SCAN may answer a key twice, and a key that moves between two servers is on both for a moment.
            fresh = [key for key in dict.fromkeys(page.keys) if key not in seen]
            seen.update(fresh)
            yield from _entries(router, fresh, len(prefix), deadline)
            cursor = page.cursor
            if cursor == _START:
                break


def _entries(router: Router, keys: list[bytes], prefix_bytes: int, deadline: float) -> Iterator[TierEntry]:
    sizes = [(Length(key), Tail(key)) for key in keys]
    if sizes:
        router.run([command for pair in sizes for command in pair], deadline)
    for length, tail in sizes:
        for command in (length, tail):
            if command.error or not command.answered:
                raise TierError(f"a listed value cannot be measured: {command.error or 'no answer'}", where="redis")
        if length.is_string:
            trailer = parse_trailer(tail.tail)
            nbytes = trailer.total if trailer else length.nbytes
            yield TierEntry(length.key[prefix_bytes:], nbytes, used_at=None)

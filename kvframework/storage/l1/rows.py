"""The index of readable objects: by name, and by their place in the arena. Pure.

Objects of one namespace, salt, rank and layer group form a row, digest to object. A request asks each row for the same
digests, whose hashes are computed once, so that a lookup does not have to build keys.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from operator import attrgetter

from kvframework.api.keys import DIGEST_BYTES, PACKED_KEY_BYTES, PackedKey
from kvframework.storage.l1.leases import StoredObject

PREFIX_BYTES = PACKED_KEY_BYTES - DIGEST_BYTES

_offset_of = attrgetter("offset")


class ObjectRows:
    """The rows. An empty row is removed, since the number of salts is unbounded."""

    def __init__(self) -> None:
        self._rows: dict[bytes, dict[bytes, StoredObject]] = {}
        self._at: dict[int, StoredObject] = {}

    def __len__(self) -> int:
        return len(self._at)

    def __iter__(self) -> Iterator[StoredObject]:
        return iter(self._at.values())

    def __contains__(self, key: PackedKey) -> bool:
        return self.get(key) is not None

    def get(self, key: PackedKey) -> StoredObject | None:
        row = self._rows.get(key[:PREFIX_BYTES])
        return None if row is None else row.get(key[PREFIX_BYTES:])

    def find(self, keys: Iterable[PackedKey]) -> list[StoredObject | None]:
        """Return the objects of `keys`, fastest where neighbours are of one row."""
        of, row, none = b"", dict[bytes, StoredObject](), dict[bytes, StoredObject]()
        found = []
        for key in keys:
            prefix = key[:PREFIX_BYTES]
            if prefix != of:
                of, row = prefix, self._rows.get(prefix, none)
            found.append(row.get(key[PREFIX_BYTES:]))
        return found

    def unpinned(self, keys: Iterable[PackedKey]) -> Iterator[StoredObject]:
        """Yield the objects of those of `keys` that are here and not pinned."""
        of, row, none = b"", dict[bytes, StoredObject](), dict[bytes, StoredObject]()
        for key in keys:
            prefix = key[:PREFIX_BYTES]
            if prefix != of:
                of, row = prefix, self._rows.get(prefix, none)
            stored = row.get(key[PREFIX_BYTES:])
            if stored is not None and not stored.pins:
                yield stored

    def at(self, offset: int) -> StoredObject | None:
        """Return the object that begins at this byte of the arena."""
        return self._at.get(offset)

    def row(self, prefix: bytes, digests: Sequence[bytes]) -> list[StoredObject | None]:
        """Return the objects of one row by their digests; `prefix` is the result of `key_prefix`."""
        row = self._rows.get(prefix)
        return [None] * len(digests) if row is None else list(map(row.get, digests))

    def which(self, keys: Iterable[PackedKey]) -> list[bool]:
        """Return which of `keys` are in the index."""
        row_of, none = self._rows.get, dict[bytes, StoredObject]()
        return [key[PREFIX_BYTES:] in row_of(key[:PREFIX_BYTES], none) for key in keys]

    def prefixes_with(self, digest: bytes, most: int) -> list[bytes]:
        """Return the prefixes of the rows, among the `most` latest ones, that have an object of this digest."""
        latest = itertools.islice(reversed(self._rows.items()), most)
        return [prefix for prefix, row in latest if digest in row]

    def add(self, stored: StoredObject) -> None:
        key = stored.key
        row = self._rows.get(key[:PREFIX_BYTES])
        if row is None:
            row = self._rows[key[:PREFIX_BYTES]] = {}
        row[key[PREFIX_BYTES:]] = stored
        self._at[stored.offset] = stored

    def add_all(self, objects: Sequence[StoredObject]) -> None:
        """Add many, fastest where neighbours are of one row."""
        of, row = b"", dict[bytes, StoredObject]()
        for stored in objects:
            key = stored.key
            prefix = key[:PREFIX_BYTES]
            if prefix != of:
                of, row = prefix, self._rows.setdefault(prefix, {})
            row[key[PREFIX_BYTES:]] = stored
        self._at.update(zip(map(_offset_of, objects), objects, strict=True))

    def remove(self, stored: StoredObject) -> None:
        key = stored.key
        prefix = key[:PREFIX_BYTES]
        row = self._rows[prefix]
        del row[key[PREFIX_BYTES:]]
        if not row:
            del self._rows[prefix]
        del self._at[stored.offset]

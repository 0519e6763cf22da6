"""The objects of L1: the ranges of the arena that are free (best fit with coalescing), on whose account each object is,
and the index of them by name and by place. Pure."""

from __future__ import annotations

import itertools
from bisect import bisect_left, insort
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from operator import attrgetter

from kvframework.api.keys import DIGEST_BYTES, NAMESPACE_BYTES, PACKED_KEY_BYTES, PackedKey

# Beyond this number, what is new counts for no client and no namespace.
MAX_ACCOUNTS = 4096
NO_CLIENT = 0
NO_NAMESPACE = b""

# Client session, namespace, number of the tenant.
AccountKey = tuple[int, bytes, int]


_OF_LOOKUPS = ("asked_tokens", "l1_tokens", "l2_tokens", "limited", "lookups", "saved_s")


class Account:
    """Sums since the start, except `nbytes` and `objects`, which are in L1 now. The sums of lookups are changed by the
    thread that handles records, the others under the storage lock. `into` is the account that this one passed into."""

    SUMS = ("evicted", "nbytes", "objects", "stored", *_OF_LOOKUPS)
    __slots__ = (*SUMS, "into")

    def __init__(self) -> None:
        self.nbytes = self.objects = self.stored = self.evicted = 0
        self.lookups = self.limited = self.asked_tokens = self.l1_tokens = self.l2_tokens = 0
        self.saved_s = 0.0
        self.into: Account | None = None

    @property
    def hit_tokens(self) -> int:
        return self.l1_tokens + self.l2_tokens

    def looked_up(self, asked_tokens: int, l1_tokens: int, l2_tokens: int, saved_s: float = 0.0) -> None:
        self.lookups += 1
        self.asked_tokens += asked_tokens
        self.l1_tokens += l1_tokens
        self.l2_tokens += l2_tokens
        self.saved_s += saved_s


class Accounts:
    """All accounts. `of` creates and `end` removes some, under the storage lock; `get` and `items` need no lock."""

    def __init__(self) -> None:
        self._accounts: dict[AccountKey, Account] = {}
        # Return an account that exists, else None.
        self.get = self._accounts.get

    def items(self) -> list[tuple[AccountKey, Account]]:
        return list(self._accounts.items())

    def of(self, client: int, namespace: bytes, tenant: int) -> Account:
        """Return the account, or that of no client and namespace if there are too many."""
        key = client, namespace[:NAMESPACE_BYTES], tenant
        account = self._accounts.get(key)
        if account is None:
            if len(self._accounts) >= MAX_ACCOUNTS:
                key = NO_CLIENT, NO_NAMESPACE, tenant
            account = self._accounts.setdefault(key, Account())
        return account

    def end(self, client: int) -> None:
        """Let the accounts of a client that has ended pass into those of no client."""
        for key, account in self.items():
            if key[0] == client != NO_CLIENT:
                del self._accounts[key]
                into = account.into = self.of(NO_CLIENT, *key[1:])
                for name in Account.SUMS:
                    setattr(into, name, getattr(into, name) + getattr(account, name))


# The account of objects and leases outside a table.
NO_ACCOUNT = Account()


@dataclass(slots=True, eq=False)
class StoredObject:
    """A readable object. Equality is identity, since the same key may be stored again."""

    key: PackedKey
    offset: int
    length: int
    pins: int = 0
    # The time of the last use, to a tick of the table; its negative once nobody is said to ask again.
    used: float = 0.0
    # The tenant's number in `Tenants`.
    tenant: int = 0
    # The account of the client that stored the object.
    account: Account = NO_ACCOUNT
    # The object's slot in the journal, -1 for none.
    slot: int = -1
    # The session whose pins it has, see `PinShares`, and those of its pins that are the server's own.
    payer: int = 0
    holds: int = 0


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

    def each(self, keys: Iterable[PackedKey]) -> Iterator[StoredObject | None]:
        """Yield the objects of `keys`, fastest where neighbours are of one row."""
        of, row, none = b"", dict[bytes, StoredObject](), dict[bytes, StoredObject]()
        for key in keys:
            prefix = key[:PREFIX_BYTES]
            if prefix != of:
                of, row = prefix, self._rows.get(prefix, none)
            yield row.get(key[PREFIX_BYTES:])

    def find(self, keys: Iterable[PackedKey]) -> list[StoredObject | None]:
        return list(self.each(keys))

    def unpinned(self, keys: Iterable[PackedKey]) -> Iterator[StoredObject]:
        """Yield the objects of those of `keys` that are here and not pinned."""
        return (stored for stored in self.each(keys) if stored is not None and not stored.pins)

    def at(self, offset: int) -> StoredObject | None:
        return self._at.get(offset)

    def row(self, prefix: bytes, digests: Sequence[bytes]) -> list[StoredObject | None]:
        """Return the objects of one row by their digests; `prefix` is the result of `key_prefix`."""
        row = self._rows.get(prefix)
        return [None] * len(digests) if row is None else list(map(row.get, digests))

    def prefixes_with(self, digest: bytes, most: int) -> list[bytes]:
        """Return the prefixes of the rows, among the `most` latest ones, that have an object of this digest."""
        latest = itertools.islice(reversed(self._rows.items()), most)
        return [prefix for prefix, row in latest if digest in row]

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


ALIGNMENT = 4096


class RangeAllocator:
    """Allocates `(offset, length)` ranges of mixed sizes, aligned to 4 KiB. It starts empty; `grow` adds bytes that the
    L1 memory has made resident. The caller keeps the lengths, and frees a range as it was allocated."""

    def __init__(self) -> None:
        self.limit = 0
        self.free_bytes = 0
        # No byte behind it has been allocated.
        self.reached = 0
        # The free ranges: (length, offset) in order, and by where they begin and end.
        self._by_size: list[tuple[int, int]] = []
        self._length_at: dict[int, int] = {}
        self._start_of_end: dict[int, int] = {}

    def grow(self, limit: int) -> None:
        """Add bytes up to `limit`; a limit below the current one is ignored."""
        limit -= limit % ALIGNMENT
        if limit > self.limit:
            start, self.limit = self.limit, limit
            self.free(start, limit - start)

    def restore(self, gaps: Sequence[tuple[int, int]], end: int) -> None:
        """Begin with what an earlier server has allocated: all bytes up to `end` except `gaps`, (offset, length), of
        which none touches another. The allocator is empty before."""
        self.limit = self.reached = end
        self.free_bytes = sum(length for _, length in gaps)
        self._by_size = sorted((length, offset) for offset, length in gaps)
        self._length_at = dict(gaps)
        self._start_of_end = {offset + length: offset for offset, length in gaps}

    def allocate(self, nbytes: int) -> int | None:
        """Return the offset of a free range of at least `nbytes`, or None. The smallest sufficient range is split."""
        length = rounded(nbytes)
        at = bisect_left(self._by_size, (length, 0))
        if at == len(self._by_size):
            return None
        size, offset = self._by_size[at]
        self._take(offset, size, at)
        if size > length:
            self._insert(offset + length, size - length)
        if offset + length > self.reached:
            self.reached = offset + length
        return offset

    def take(self, start: int, end: int) -> list[tuple[int, int]]:
        """Allocate what is free of the bytes `[start, end)`; return its ranges, (offset, length)."""
        taken = []
        for offset, length in list(self._length_at.items()):
            first, last = max(offset, start), min(offset + length, end)
            if first < last:
                self._take(offset, length)
                taken.append((first, last - first))
                if offset < first:
                    self._insert(offset, first - offset)
                if last < offset + length:
                    self._insert(last, offset + length - last)
        return taken

    def free(self, offset: int, nbytes: int) -> None:
        """Free a range, with the length of its allocation, and merge it with its free neighbours."""
        length = rounded(nbytes)
        before = self._start_of_end.get(offset)
        if before is not None:
            size = offset - before
            self._take(before, size)
            offset, length = before, length + size
        after = self._length_at.get(offset + length)
        if after is not None:
            self._take(offset + length, after)
            length += after
        self._insert(offset, length)

    def free_at(self, offset: int) -> int:
        """Return the length of the free range that begins here, 0 for none."""
        return self._length_at.get(offset, 0)

    def free_before(self, offset: int) -> int:
        """Return the length of the free range that ends here, 0 for none."""
        return offset - self._start_of_end.get(offset, offset)

    @property
    def largest_free(self) -> int:
        return self._by_size[-1][0] if self._by_size else 0

    @property
    def fragmentation(self) -> float:
        """0.0 when all free bytes are one range, closer to 1.0 the more they are scattered."""
        return 1.0 - self.largest_free / self.free_bytes if self.free_bytes else 0.0

    def _insert(self, offset: int, length: int) -> None:
        insort(self._by_size, (length, offset))
        self._length_at[offset] = length
        self._start_of_end[offset + length] = offset
        self.free_bytes += length

    def _take(self, offset: int, length: int, at: int | None = None) -> None:
        del self._by_size[bisect_left(self._by_size, (length, offset)) if at is None else at]
        del self._length_at[offset]
        del self._start_of_end[offset + length]
        self.free_bytes -= length


def rounded(nbytes: int) -> int:
    """Return the bytes that `nbytes` occupy in the arena."""
    return -(-nbytes // ALIGNMENT) * ALIGNMENT or ALIGNMENT

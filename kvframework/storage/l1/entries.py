"""The objects of L1: on whose account each is, and the index of them by name and by place. Pure.

An account says what one client, in one namespace, for one tenant, has asked for, found, stored and lost. An object
carries the account of the client that stored it. The account of a client that has ended passes into that of no client
(0), where objects that were loaded from L2 are, too.

Objects of one namespace, salt, rank and layer group form a row, digest to object. A request asks each row for the same
digests, whose hashes are computed once, so that a lookup does not have to build keys."""

from __future__ import annotations

import itertools
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


# Of objects and leases outside a table.
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
    # Its number in `Tenants`.
    tenant: int = 0
    # Of the client that stored it.
    account: Account = NO_ACCOUNT
    # In the journal, -1 for none.
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

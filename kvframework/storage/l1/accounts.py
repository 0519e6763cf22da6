"""Accounts of L1: what one client, in one namespace, for one tenant, has asked for, found, stored and lost. Pure.

An object carries the account of the client that stored it. The account of a client that has ended passes into that of
no client (0), where objects that were loaded from L2 are, too.
"""

from __future__ import annotations

from kvframework.api.keys import NAMESPACE_BYTES

# Beyond this number, what is new counts for no client and no namespace.
MAX_ACCOUNTS = 4096
NO_CLIENT = 0
NO_NAMESPACE = b""

# Client session, namespace, number of the tenant.
AccountKey = tuple[int, bytes, int]


class Account:
    """Sums since the start, except `nbytes` and `objects`, which are in L1 now. The sums of lookups are changed by the
    serving thread, the others under the storage lock. `into` is the account that this one has passed into."""

    __slots__ = ("asked_tokens", "evicted", "hit_tokens", "into", "lookups", "nbytes", "objects", "stored")

    def __init__(self) -> None:
        self.nbytes = self.objects = self.stored = self.evicted = 0
        self.lookups = self.asked_tokens = self.hit_tokens = 0
        self.into: Account | None = None

    def looked_up(self, asked_tokens: int, hit_tokens: int) -> None:
        self.lookups += 1
        self.asked_tokens += asked_tokens
        self.hit_tokens += hit_tokens

    def added(self, objects: int, nbytes: int) -> None:
        self.objects += objects
        self.nbytes += nbytes
        self.stored += objects


class Accounts:
    """All accounts. `of` creates and `end` removes some, under the storage lock; `of` and `items` may be called
    without it for an account that exists."""

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
                into.nbytes += account.nbytes
                into.objects += account.objects
                into.stored += account.stored
                into.evicted += account.evicted
                into.lookups += account.lookups
                into.asked_tokens += account.asked_tokens
                into.hit_tokens += account.hit_tokens

"""Accounts of L1: they agree with the objects, and are bounded."""

from __future__ import annotations

from kvframework.storage.l1 import entries
from kvframework.storage.l1.entries import NO_CLIENT, NO_NAMESPACE, Accounts
from tests.core.storage.memory import NAMESPACE, packed_key
from tests.core.storage.node import SIZE, MakeNode


def test_a_store_that_ends_after_its_client_counts_for_no_client(make_node: MakeNode) -> None:
    node = make_node(units=4, tiers=[])
    lease = node.table.reserve([(packed_key(1), SIZE)], owner=0, client=1).lease
    assert lease is not None
    node.table.end_owner(1)
    node.table.commit(lease.id, owner=0)
    assert [(key, account.objects) for key, account in node.table.accounts.items()] == [((NO_CLIENT, NAMESPACE, 0), 1)]


def test_beyond_the_bound_what_is_new_has_no_client_and_no_namespace() -> None:
    book = Accounts()
    for client in range(1, entries.MAX_ACCOUNTS + 1):
        book.of(client, NAMESPACE, 0)
    late = book.of(entries.MAX_ACCOUNTS + 1, NAMESPACE, 0)
    assert late is book.of(NO_CLIENT, NO_NAMESPACE, 0)
    book.end(1)
    assert book.get((1, NAMESPACE, 0)) is None

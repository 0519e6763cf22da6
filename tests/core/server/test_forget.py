"""FORGET beside stores and loads of others: nobody reads other bytes than were stored, and none of L1 is lost."""

from __future__ import annotations

import threading

import pytest

from kvframework.storage import table as table_module
from kvframework.wire import messages as m
from tests.core.server.in_process import serving
from tests.support.wire_client import WireClient, key_for

ROUNDS = 60
CHUNKS = 8


def test_others_store_and_load_beside_orders(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(table_module, "ERASE_AT_ONCE", 1 << 18)
    wrong: list[str] = []
    receipts: list[m.Forgotten] = []
    ended = threading.Event()

    def work(number: int) -> None:
        fill = bytes([number])
        with WireClient(server.endpoint) as client:
            registered = client.register(number)
            for turn in range(ROUNDS):
                tokens = [number * 1000 + turn % 7] * 256 * CHUNKS
                key = key_for(registered, tokens, request_id=f"{number}-{turn}")
                client.store(key, fill, number)
                found = client.retrieve(key, number)
                if found is not None and found.strip(fill):
                    wrong.append(f"{number}: {found[:16]!r}")

    with serving(capacity="4MiB") as server:
        workers = [threading.Thread(target=work, args=(number,)) for number in (1, 2)]

        def forget() -> None:
            with WireClient(server.endpoint, timeout=60.0) as operator:
                while not ended.is_set():
                    tokens = (1000 + len(receipts) % 7).to_bytes(4, "little") * 256 * CHUNKS
                    receipts.append(operator.call("FORGET", m.Forget(tokens=tokens, wait_s=0.0)))

        operator = threading.Thread(target=forget)
        for thread in (*workers, operator):
            thread.start()
        for thread in workers:
            thread.join(120)
        ended.set()
        operator.join(60)
        table = server.service.storage.table
        assert not wrong
        assert any(receipt.erased_bytes for receipt in receipts)
        assert table.allocator.free_bytes + table.used_bytes == table.capacity

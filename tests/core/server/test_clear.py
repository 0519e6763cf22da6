"""CLEAR of many objects, and who is served meanwhile: by the order of what happens, not by time."""

from __future__ import annotations

import threading
import time
from types import SimpleNamespace

import pytest

from kvframework.storage import table as table_module
from kvframework.storage.l1.entries import ALIGNMENT
from kvframework.wire import messages as m
from tests.core.server.in_process import serving
from tests.core.storage.memory import packed_key
from tests.support.waiting import wait_until
from tests.support.wire_client import WireClient, key_for

OTHERS = 3 * table_module.AT_ONCE


def test_lookups_and_pings_are_answered_between_the_slices_of_a_clear(monkeypatch: pytest.MonkeyPatch) -> None:
    """What was stored first is missing while what was stored last is still a hit."""
    answered = threading.Event()
    pause = SimpleNamespace(sleep=lambda _seconds: answered.wait(30.0), monotonic=time.monotonic)
    with serving(capacity="64MiB") as server, WireClient(server.endpoint) as client:
        registered = client.register()
        first, last = (key_for(registered, [token] * 256, request_id="r") for token in (1, 2))
        client.store(first, b"a")
        storage = server.service.storage
        lease = storage.table.reserve(
            [(packed_key(number), ALIGNMENT) for number in range(OTHERS)], owner=0, request_id="", lease_s=None
        ).lease
        assert len(storage.table.commit(lease.id, owner=0)) == OTHERS
        client.store(last, b"b")
        monkeypatch.setattr(table_module, "time", pause)
        with WireClient(server.endpoint, timeout=60.0) as cleaner:
            clear = cleaner.send("CLEAR", m.Clear())
            try:
                # A lookup would pin what it finds, and so keep it.
                wait_until(lambda: client.status()["l1"]["objects"] < OTHERS + 2, what="the first slice")
                assert client.lookup(first).hit_tokens == 0
                reply = client.lookup(last)
                client.call("PING", m.Empty())
            finally:
                answered.set()
            assert reply.hit_tokens == 256, "CLEAR was over before another client was answered"
            # What is in use at its turn stays.
            cleared = cleaner.answer(clear, "CLEAR")
            assert (cleared.objects, cleared.in_use) == (OTHERS + 1, 1)


def test_what_is_stored_during_a_clear_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also under the name of something that was dropped."""
    with serving(capacity="64MiB") as server:
        storage = server.service.storage
        keys = [packed_key(number) for number in range(OTHERS)]

        def store(chosen: list[bytes]) -> None:
            lease = storage.table.reserve(
                [(key, ALIGNMENT) for key in chosen], owner=0, request_id="", lease_s=None
            ).lease
            storage.table.commit(lease.id, owner=0)

        store(keys)
        pauses: list[float] = []

        def store_again(seconds: float) -> None:
            if not pauses:
                store([keys[0], packed_key(OTHERS)])
            pauses.append(seconds)

        monkeypatch.setattr(table_module, "time", SimpleNamespace(sleep=store_again, monotonic=time.monotonic))
        cleared = storage.clear()
        assert (cleared.objects, cleared.in_use) == (OTHERS, 0)
        assert len(pauses) == 2
        assert storage.table.which_present([*keys, packed_key(OTHERS)]) == [True] + [False] * (OTHERS - 1) + [True]

"""Two hundred client processes die by kill -9 between LOOKUP and RETRIEVE, all at once. Their pins are gone at once."""

from __future__ import annotations

import os
import signal

from kvframework.wire import messages as m
from tests.core.survival import nursery_program
from tests.core.survival.nursery_program import TOKENS
from tests.support.line_process import LineProcess
from tests.support.processes import descriptors
from tests.support.server_process import ServerProcess
from tests.support.waiting import wait_until
from tests.support.wire_client import WireClient, key_for

CLIENTS = 200
CHUNKS = len(TOKENS) // 256


def held(watcher: WireClient) -> tuple[int, int, int, int]:
    status = watcher.status()
    return (status["l1"]["pins"], status["l1"]["pin_leases"], status["tickets"], len(status["messaging"]["sessions"]))


def test_two_hundred_clients_die_between_lookup_and_retrieve() -> None:
    with ServerProcess() as server, server.client(timeout=60.0) as client:
        registered = client.register()
        key = key_for(registered, TOKENS)
        client.store(key, b"PINS")
        before, files = held(client), len(descriptors(server.pid))
        arguments = (server.endpoint, registered.namespace.hex(), str(CLIENTS))
        with LineProcess("-m", nursery_program.__name__, *arguments) as nursery:
            try:
                assert [nursery.hear() for _ in range(CLIENTS)] == ["pins"] * CLIENTS
                assert held(client) == (CHUNKS * CLIENTS, CLIENTS, CLIENTS, CLIENTS + before[3])
                assert client.call("CLEAR", m.Clear()).in_use == CHUNKS
            finally:
                os.killpg(nursery.pid, signal.SIGKILL)
            wait_until(lambda: held(client) == before, what="the end of all that the dead had")
            wait_until(lambda: len(descriptors(server.pid)) <= files, what="the end of their descriptors")
            assert client.retrieve(key) is not None
            assert client.call("CLEAR", m.Clear()).in_use == 0, "nothing is pinned any more"
            counters = client.status()["messaging"]["counters"]
            assert counters["sessions_ended"] >= CLIENTS

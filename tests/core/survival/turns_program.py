"""A client process that does the same over and over: KIND ENDPOINT [RIG]. For each number that it reads it does so many
turns and prints what its Python objects take then. Measured from outside, see `test_nothing_grows.py`.
"""

from __future__ import annotations

import array
import contextlib
import json
import os
import sys
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

from kvframework.api.keys import CacheKey
from kvframework.api.transport import Transfer
from kvframework.client import CanonicalInstance, KVClient
from kvframework.errors import DeadlineExceeded, ServerGone
from kvframework.wire import messages as m
from tests.core.survival import traced
from tests.support.waiting import wait_until
from tests.support.wire_client import register_tiny

Turn = Callable[[int], None]
KEPT = [0] * 512
# The machine is busy, and both processes are traced.
TIMEOUT_S = 20.0


class Patient(KVClient):
    """On a busy machine a server may be slow to answer a PING; what counts here is what a request leaves behind."""

    def request(self, name: str, *arguments: Any, **options: Any) -> Any:
        wait_until(lambda: self.usable, TIMEOUT_S, "the client to heal")
        try:
            return super().request(name, *arguments, **options)
        except ServerGone:  # it was not even sent
            return self.request(name, *arguments, **options)


def connected(endpoint: str) -> KVClient:
    client = Patient(endpoint, deadline_scale=20.0)
    assert client.wait_up(TIMEOUT_S)
    return client


def transfer_of(known: CanonicalInstance, tokens: list[int]) -> Transfer:
    return known.transfer(key_of(known, tokens))


def key_of(known: CanonicalInstance, tokens: list[int], worker_id: int | None = 0) -> CacheKey:
    packed = array.array("I", tokens).tobytes()
    return CacheKey("tiny", 1, worker_id, known.namespace, 0, len(tokens), "r", tokens=packed)


def keep(client: KVClient, known: CanonicalInstance, instance_id: int) -> None:
    """Stores what all turns look up. The bytes do not matter here."""
    assert client.prepare_store(transfer_of(known, KEPT)).result().commit().result().ok


def sessions(endpoint: str, _rig: str) -> Turn:
    """Clients that come, take all there is to take, and go without a word about it."""
    keeper = connected(endpoint)
    own = register_tiny(keeper, 0)

    def turn(number: int) -> None:
        keep(keeper, own, 0)
        with connected(endpoint) as client:
            known = register_tiny(client, number)
            assert client.prepare_store(transfer_of(known, [number] * 512)).result().ranges
            assert client.prepare_load(transfer_of(known, KEPT)).result().hit
            assert client.request("LOOKUP", m.Lookup(key_of(known, KEPT, None)), m.LookupReply).hit_tokens == 512

    return turn


def registrations(endpoint: str, _rig: str) -> Turn:
    """An engine that registers its tensors, stores, loads, and gives them back."""
    import torch

    from kvframework.client import RequestHashes, SchedulerAdapter, WorkerAdapter

    torch.set_num_threads(1)
    client = connected(endpoint)
    kv = {f"layer{at}": torch.zeros(2, 32, 16, 2, 4) for at in range(2)}
    axes = ["plane", "block", "token", "head", "dim"]
    blocks = [list(range(32))]

    def turn(number: int) -> None:
        worker = WorkerAdapter(client, instance_id=number % 7, model_name="m", layout_options={"axes": axes})
        known = worker.register_kv_caches(kv, block_size=16)
        scheduler = SchedulerAdapter(client, model_name="m", namespace=known.namespace, chunk_tokens=256)
        request = RequestHashes(client.hasher, 256, request_id=f"r{number}")
        request.extend(KEPT)
        wait_until(lambda: worker.submit_store(request, 0, 512, blocks).result(30), TIMEOUT_S, "a store")
        scheduler.free(scheduler.lookup(request))
        wait_until(lambda: worker.submit_retrieve(request, 0, 512, blocks).result(30), TIMEOUT_S, "a load")
        worker.get_finished()
        worker.close()

    return turn


def forks(endpoint: str, _rig: str) -> Turn:
    """An engine whose children inherit its connection: some clean up, some end at once."""
    client = connected(endpoint)
    known = register_tiny(client, 0)
    keep(client, known, 0)
    lookup = m.Lookup(key_of(known, KEPT, None))
    boot = client.boot_id

    def turn(number: int) -> None:
        child = os.fork()
        if child == 0:
            if number % 2:
                client.close()
            os._exit(3 if client.usable else 0)
        assert os.waitpid(child, 0)[1] == 0
        assert client.boot_id == boot, "the parent's connection was disturbed"
        keep(client, known, 0)
        found = client.request("LOOKUP", lookup, m.LookupReply)
        assert found.hit_tokens == 512
        client.request("FREE_LOOKUP_LOCKS", m.TicketRef(found.ticket), m.Freed)

    return turn


def aborted(endpoint: str, _rig: str) -> Turn:
    """Requests that are given up: taken back, cancelled while L2 is asked, ended with their session, or too late."""
    client = connected(endpoint)
    known = register_tiny(client, 0)
    keep(client, known, 0)
    lookup = m.Lookup(key_of(known, KEPT, None))

    def late(reply: m.LookupReply) -> None:
        client.send("FREE_LOOKUP_LOCKS", m.TicketRef(reply.ticket))

    def turn(number: int) -> None:
        client.prepare_store(transfer_of(known, [number] * 1024)).result().abort()
        withdrawn = client.prepare_store(transfer_of(known, [number] * 512)).result()
        client.request("END_SESSION", m.EndSession(), m.SessionEnded)
        withdrawn.abort()
        client.request("CLEAR", m.Clear(), m.Cleared)
        # L2 has it. Cancelled at any point of the load, or when that has ended.
        found = client.request("LOOKUP", lookup, m.LookupReply)
        if number % 3:
            client.request("CANCEL", m.Cancel(ticket=found.ticket), m.CancelReply)
        with contextlib.suppress(DeadlineExceeded):
            client.request("LOOKUP", lookup, m.LookupReply, timeout=0.0, on_late=late)
        client.request("END_SESSION", m.EndSession(), m.SessionEnded)

    return turn


def copies(endpoint: str, rig: str) -> Turn:
    """Transfers by the server's own copies, cancelled at any point of them, and an instance that registers again."""
    from kvf_dev.testing.transport.engine import PAGED, KitEngine
    from kvf_dev.testing.transport.node import client_of, rig_told

    made = rig_told(rig)
    client = client_of(made, endpoint)
    engine = KitEngine(made, client, 1, PAGED["nhd"], seed=1)

    def turn(number: int) -> None:
        request = engine.request(1)
        for submit in (lambda: engine.store(request, engine.source()), lambda: engine.load(request, engine.target())):
            cancelled = submit()
            if number % 2:
                cancelled.cancel()
            cancelled.result(TIMEOUT_S)
        engine.worker.get_finished()
        engine.worker.take_failed_blocks()
        client.request("CLEAR", m.Clear(), m.Cleared, timeout=TIMEOUT_S)
        if number % 5 == 0:
            engine.worker.close()
            engine.worker.register_kv_caches(engine.caches, block_size=4)

    return turn


KINDS = {each.__name__: each for each in (sessions, registrations, forks, aborted, copies)}


def main() -> None:
    kind, endpoint, *rig = sys.argv[1:]
    traced.start()
    turn = KINDS[kind](endpoint, *rig or [""])
    print("ready", flush=True)
    number = 0
    for line in sys.stdin:
        for _ in range(int(line)):
            number += 1
            turn(number)
        print(json.dumps(asdict(traced.traced())), flush=True)


if __name__ == "__main__":
    main()

"""The adapters of an engine integration against a real server process, through its deaths and silences."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest

from kvframework import errors
from kvframework.api.transport import StoreOutcome
from kvframework.client import KVClient, RequestHashes, SchedulerAdapter, WorkerAdapter
from kvframework.wire import messages as m
from tests.support.engines import AXES, BLOCK, BLOCKS, CHUNK, DIM, HEADS, PagedEngine
from tests.support.lazy import torch
from tests.support.server_process import ServerProcess
from tests.support.waiting import wait_until

pytestmark = pytest.mark.torch


def test_the_server_shows_what_the_model_computes_in(server: ServerProcess, client: KVClient) -> None:
    PagedEngine(client, model_dtype="bfloat16")
    (instance,) = server.status()["instances"]
    assert (instance["dtype"], instance["model_dtype"]) == ("float32", "bfloat16")


def test_the_trace_of_a_request_rides_in_each_of_its_requests(server: ServerProcess, client: KVClient) -> None:
    engine = PagedEngine(client)
    trace = f"00-{'ab' * 16}-{'cd' * 8}-01"
    request = RequestHashes(client.hasher, CHUNK, request_id="r", trace=trace)
    request.extend(list(range(512)))
    blocks = [list(range(32))]
    assert engine.worker.submit_store(request, 0, 512, blocks).result(30).ok
    engine.scheduler.free(engine.scheduler.lookup(request))
    assert engine.worker.submit_retrieve(request, 0, 512, blocks).result(30).ok
    untraced = engine.request(list(range(512)), "q")
    engine.scheduler.free(engine.scheduler.lookup(untraced))
    with server.client() as watcher:
        records = watcher.call("RECENT", m.Recent()).records
        assert [(each.request, each.trace) for each in records if each.request_id == "r"][-3:] == [
            (name, trace) for name in ("STORE", "LOOKUP", "RETRIEVE")
        ]
        assert {each.trace for each in records if each.request_id == "q"} == {""}
        sampled = watcher.call("RECENT", m.Recent(traced=True))
        assert {each.trace for each in sampled.records} == {trace}
        assert watcher.call("RECENT", m.Recent(sampled.last, traced=True)).records == ()


def test_a_miss_in_l2_is_no_error(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    l2 = ("l2.0.use=filesystem", f"l2.0.path={tmp_path / 'l2'}")
    with ServerProcess(*l2) as server, server.engine_client() as client:
        engine = PagedEngine(client)
        asked = engine.scheduler.lookup(engine.request(list(range(512))))
        assert asked.pending
        assert asked.ticket
        found = engine.scheduler.wait(asked, 10)
        assert (found.hit_tokens, found.ticket, found.pending) == (0, "", False)
        engine.scheduler.free(found)
        engine.scheduler.end_request("r")
        assert server.status()["messaging"]["counters"].get("errors.request.lease", 0) == 0
        engine.scheduler.free(asked)  # a ticket that is over: nothing is left to let go
        assert engine.scheduler.failures == 0
        assert [record for record in caplog.records if record.levelno >= logging.WARNING] == []
        engine.worker.close()


def test_without_a_server_everything_is_a_miss() -> None:
    with KVClient("ipc:///tmp/kvf-no-such-directory/s.sock", connect_timeout_s=0.2) as client:
        scheduler = SchedulerAdapter(client, model_name="m", namespace=b"n" * 16, chunk_tokens=CHUNK)
        with pytest.raises(errors.ServerGone, match="no server answers"):
            _ = client.chunk_size
        from kvf_hashers.sha256 import Sha256

        request = RequestHashes(Sha256(), CHUNK, request_id="r")
        request.extend([1] * 256)
        assert scheduler.lookup(request).hit_tokens == 0
        assert scheduler.failures == 1


def test_an_unknown_transport_or_layout_is_a_clear_error(client: KVClient) -> None:
    worker = WorkerAdapter(client, instance_id=1, model_name="m", transport="warp", layout_options={"axes": AXES})
    kv = {"layer0": torch.zeros(2, BLOCKS, BLOCK, HEADS, DIM)}
    with pytest.raises(errors.TransportMismatch, match="no transport"):
        worker.register_kv_caches(kv, block_size=BLOCK)
    with pytest.raises(errors.PluginNotFound):
        WorkerAdapter(client, instance_id=1, model_name="m", layout="nope").register_kv_caches(kv, block_size=BLOCK)


def test_close_unregisters(server: ServerProcess, client: KVClient) -> None:
    engine = PagedEngine(client)
    engine.worker.close()
    engine.worker.close()
    with server.client() as watcher:
        assert watcher.status()["instances"] == []


def test_a_store_has_its_outcome_whatever_becomes_of_it(server: ServerProcess, client: KVClient) -> None:
    engine = PagedEngine(client)
    blocks = [list(range(32))]
    request = engine.request(list(range(512)))
    stored = engine.worker.submit_store(request, 0, 512, blocks)
    assert stored.result(20) == StoreOutcome(stored=2)
    server.kill9()
    wait_until(lambda: not client.usable, what="the client to see the server's end")
    for start, end in ((0, 512), (256, 512)):
        away = engine.worker.submit_store(request, start, end, [blocks[0][start // 16 :]])
        assert away.result(0) == StoreOutcome(dropped=(end - start) // 256, error="run.server_gone")
    engine.worker.close()
    closed = engine.worker.submit_store(request, 0, 256, [blocks[0][:16]])
    assert closed.result(0) == StoreOutcome(dropped=1, error="request.not_registered")


def test_a_load_of_what_was_never_stored_is_not_called_evicted(
    client: KVClient, caplog: pytest.LogCaptureFixture
) -> None:
    engine = PagedEngine(client)
    loaded = engine.worker.submit_retrieve(engine.request(list(range(256))), 0, 256, [list(range(16))])
    assert not loaded.result(20)
    assert "some objects are not in L1" in caplog.text
    assert "evicted" not in caplog.text


@pytest.mark.parametrize("start", [100, -256, 1.5, None])
def test_a_lookup_from_within_a_chunk_is_the_engines_mistake(client: KVClient, start: Any) -> None:
    engine = PagedEngine(client)
    with pytest.raises(errors.BadRange, match="start"):
        engine.scheduler.lookup(engine.request(list(range(512))), start)
    engine.worker.close()


def test_a_workers_scheduler_asks_for_all_ranks(client: KVClient) -> None:
    """A hit is what both ranks have, and the world size is the registered one."""
    ranks = [PagedEngine(client, 70 + rank, world_size=2, rank=rank) for rank in range(2)]
    scheduler, blocks = ranks[1].worker.scheduler(), [list(range(16))]
    hits = []
    for engine in ranks:
        request = engine.request([7, *range(255)])
        assert engine.worker.submit_store(request, 0, 256, blocks).result(30).ok
        found = scheduler.lookup(request)
        hits.append(found.hit_tokens)
        scheduler.free(found)
    assert hits == [0, 256]
    for engine in ranks:
        engine.worker.close()
    with pytest.raises(errors.NotRegistered):
        ranks[0].worker.scheduler()


def test_a_store_whose_request_has_ended_says_so(client: KVClient) -> None:
    """Its lease ended with the request, in the midst of the copy."""
    engine = PagedEngine(client)
    request = engine.request([9, *range(255)])

    class Ends:
        def synchronize(self) -> None:
            engine.scheduler.end_request(request.request_id)

    stored = engine.worker.submit_store(request, 0, 256, [list(range(16))], event=Ends())  # type: ignore[arg-type]
    assert stored.result(30) == StoreOutcome(dropped=1, error=errors.LeaseUnknown.code)
    engine.worker.close()

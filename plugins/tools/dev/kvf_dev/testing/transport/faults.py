"""The transport kit's tests of faults: a copy that fails, a context that is poisoned, memory that differs from its
handle."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from kvf_dev.testing.transport.cases import PAGED
from kvf_dev.testing.transport.kit import MakeEngine, TransportKit
from kvf_dev.testing.transport.memory import must_be_refused, needs_handles, relabelled
from kvf_dev.testing.transport.node import PATIENCE_S, status_of, wait_until
from kvf_dev.testing.transport.outcomes import must_miss, must_succeed, must_work
from kvf_dev.testing.transport.rig import TransportRig
from kvframework.client import KVClient
from kvframework.devices.handles import export_memory

NHD = PAGED["nhd"]


class Faults(TransportKit):
    """Faults on the device harm only the transfers that they hit."""

    def test_a_load_that_fails_is_one_miss(self, rig: TransportRig, client: KVClient, make_engine: MakeEngine) -> None:
        engine = make_engine(NHD)
        request = engine.request()
        must_succeed(engine.store(request, engine.source()))
        stored = engine.snapshot()
        copiers = _copiers(client, rig)
        _injected(rig.fail_copy)
        must_miss(engine.load(request, engine.target()), "a load whose copy failed was answered as a hit")
        assert _copiers(client, rig) == copiers, "the copier ended: raise DeviceError for one operation that failed"
        engine.overwrite()
        must_succeed(engine.load(request, engine.target()), "a load after one that failed")
        engine.expect_loaded(stored, engine.source(), engine.target())
        engine.must_be_right("a load after one that failed")

    def test_a_copy_that_fails_is_one_miss(self, rig: TransportRig, client: KVClient, make_engine: MakeEngine) -> None:
        engine = make_engine(NHD)
        must_work(engine)
        copiers = _copiers(client, rig)
        request = engine.request()
        _injected(rig.fail_copy)
        must_miss(
            engine.store(request, engine.source()), "a store whose copy failed was answered as one that succeeded"
        )
        assert engine.hit(request) == 0, "nothing of it is published"
        assert _copiers(client, rig) == copiers, "the copier ended: raise DeviceError for one operation that failed"
        must_work(engine)

    def test_a_poisoned_context_ends_its_copier_and_the_next_one_works(
        self, rig: TransportRig, client: KVClient, make_engine: MakeEngine
    ) -> None:
        engine = make_engine(NHD)
        must_work(engine)
        copiers = _copiers(client, rig)
        request = engine.request()
        _injected(rig.poison)
        must_miss(engine.store(request, engine.source()))
        wait_until(
            lambda: engine.store(engine.request(), engine.source()).result(PATIENCE_S),
            "a store after the poisoning: raise DeviceLost once nothing works any more",
            self.patience_s,
        )
        assert engine.hit(request) == 0, "nothing of it is published"
        must_work(engine)
        assert not copiers or _copiers(client, rig) != copiers, (
            "the copier whose context is poisoned goes on: raise DeviceLost once nothing works any more"
        )

    def test_what_is_no_event_is_not_taken_for_none(self, make_engine: MakeEngine) -> None:
        engine = make_engine(NHD)
        needs_handles(engine)
        request = engine.request()
        stored = engine.store(request, engine.source(), event=object()).result(PATIENCE_S)
        assert not stored.ok, "the copy came too early: raise DeviceError for what is no event of the device"
        assert engine.hit(request) == 0, "a store whose event is none was published"
        must_work(engine)

    def test_memory_smaller_than_it_says_is_refused(
        self, make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """A client may send any size, and a copy beyond the end would harm others."""
        engine = make_engine(NHD)
        needs_handles(engine)
        why = "an allocation smaller than its `nbytes` was opened: a copy beyond its end harms others"
        must_be_refused(monkeypatch, engine, _lying, why)
        engine.worker.register_kv_caches(engine.caches, block_size=NHD[0].block_size)
        must_work(engine)


def _lying(*arguments: Any) -> tuple[str, tuple[bytes, ...]]:
    """Return `export_memory`'s result, with far too large sizes for all allocations."""
    device, handles = export_memory(*arguments)
    return device, tuple(relabelled(each, more=1 << 40) for each in handles)


def _injected(fault: Callable[[], None]) -> None:
    try:
        fault()
    except NotImplementedError as reason:
        pytest.skip(str(reason))


def _copiers(client: KVClient, rig: TransportRig) -> dict[str, int | None]:
    """Return each device's copier process; empty for a transport without them."""
    transports = status_of(client)["transports"]
    assert isinstance(transports, dict)
    return {each["device"]: each["pid"] for each in transports.get(rig.transport, {}).get("devices", ())}

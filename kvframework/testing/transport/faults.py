"""The transport kit's tests of faults: a copy that fails, a context that is poisoned, memory that differs from its
handle."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from kvframework.client import KVClient
from kvframework.devices import engine_half
from kvframework.devices.engine_half import DeviceTransfer
from kvframework.devices.handles import ExportedAllocation, export_memory
from kvframework.errors import KVFrameworkError
from kvframework.testing.transport.cases import PAGED
from kvframework.testing.transport.engine import KitEngine
from kvframework.testing.transport.kit import MakeEngine, TransportKit
from kvframework.testing.transport.node import PATIENCE_S, status_of, wait_until
from kvframework.testing.transport.rig import TransportRig

NHD = PAGED["nhd"]


class Faults(TransportKit):
    """Faults on the device harm only the transfers that they hit."""

    def test_a_copy_that_fails_is_one_miss(self, rig: TransportRig, client: KVClient, make_engine: MakeEngine) -> None:
        engine = make_engine(NHD)
        _works(engine)
        copiers = _copiers(client, rig)
        request = engine.request()
        _injected(rig.fail_copy)
        assert not engine.store(request, engine.source()).result(PATIENCE_S).ok
        assert engine.hit(request) == 0, "nothing of it is published"
        assert _copiers(client, rig) == copiers, "the copier ended: raise DeviceError for one operation that failed"
        _works(engine)

    def test_a_poisoned_context_ends_its_copier_and_the_next_one_works(
        self, rig: TransportRig, client: KVClient, make_engine: MakeEngine
    ) -> None:
        engine = make_engine(NHD)
        _works(engine)
        copiers = _copiers(client, rig)
        request = engine.request()
        _injected(rig.poison)
        assert not engine.store(request, engine.source()).result(PATIENCE_S).ok
        wait_until(
            lambda: engine.store(engine.request(), engine.source()).result(PATIENCE_S),
            "a store after the poisoning: raise DeviceLost once nothing works any more",
            self.patience_s,
        )
        assert engine.hit(request) == 0, "nothing of it is published"
        _works(engine)
        assert not copiers or _copiers(client, rig) != copiers

    def test_what_is_no_event_is_not_taken_for_none(self, make_engine: MakeEngine) -> None:
        engine = make_engine(NHD)
        self._exports(engine)
        request = engine.request()
        stored = engine.store(request, engine.source(), event=object()).result(PATIENCE_S)
        assert not stored.ok, "the copy came too early: raise DeviceError for what is no event of the device"
        assert engine.hit(request) == 0
        _works(engine)

    def test_memory_smaller_than_it_says_is_refused(
        self, make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """A client may send any size, and a copy beyond the end would harm others."""
        engine = make_engine(NHD)
        self._exports(engine)
        engine.close()
        with monkeypatch.context() as patch:
            patch.setattr(engine_half, "export_memory", _lying)
            with pytest.raises(KVFrameworkError):
                engine.worker.register_kv_caches(engine.caches, block_size=NHD[0].block_size)
        engine.worker.register_kv_caches(engine.caches, block_size=NHD[0].block_size)
        _works(engine)

    def _exports(self, engine: KitEngine) -> None:
        instance = engine.worker._instance
        assert instance is not None
        if not isinstance(instance.transfer, DeviceTransfer):
            pytest.skip("the transport is none of a device driver")


def _lying(*arguments: Any) -> tuple[str, tuple[bytes, ...]]:
    """Return `export_memory`'s result, with far too large sizes for all allocations."""
    device, handles = export_memory(*arguments)
    return device, tuple(map(_enlarged, handles))


def _enlarged(handle: bytes) -> bytes:
    try:
        exported = msgspec.msgpack.decode(handle, type=ExportedAllocation)
    except msgspec.ValidationError:
        return handle
    larger = msgspec.structs.replace(exported.allocation, nbytes=exported.allocation.nbytes + (1 << 40))
    return msgspec.msgpack.encode(ExportedAllocation(larger))


def _injected(fault: Callable[[], None]) -> None:
    try:
        fault()
    except NotImplementedError as reason:
        pytest.skip(str(reason))


def _works(engine: KitEngine) -> None:
    request = engine.request()
    assert engine.store(request, engine.source()).result(PATIENCE_S).ok
    assert engine.load(request, engine.target()).result(PATIENCE_S).ok
    engine.expect_loaded(engine.snapshot(), engine.source(), engine.target())
    assert engine.differences() == []


def _copiers(client: KVClient, rig: TransportRig) -> dict[str, int | None]:
    """Return each device's copier process; empty for a transport without them."""
    transports = status_of(client)["transports"]
    assert isinstance(transports, dict)
    return {each["device"]: each["pid"] for each in transports.get(rig.transport, {}).get("devices", ())}

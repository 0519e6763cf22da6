"""Handles that say what is not so: of another device, or of more memory than there is. A client may send them."""

from __future__ import annotations

from collections.abc import Callable

import msgspec
import pytest

from kvf_dev.testing.transport.engine import KitEngine
from kvframework.devices import halves
from kvframework.devices.halves import DeviceTransfer
from kvframework.devices.handles import ExportedAllocation
from kvframework.errors import KVFrameworkError


def needs_handles(engine: KitEngine) -> None:
    """Skip the test for a transport that exports memory in a way of its own, or none."""
    instance = engine.worker._instance
    if instance is None or not isinstance(instance.transfer, DeviceTransfer):
        pytest.skip("the transport is none of a device driver")


def must_be_refused(
    monkeypatch: pytest.MonkeyPatch, engine: KitEngine, export: Callable[..., tuple[str, tuple[bytes, ...]]], why: str
) -> None:
    """Register the engine's memory again, with what `export` returns in the place of `export_memory`; fail unless that
    is refused. The engine is closed before, and afterwards."""
    __tracebackhide__ = True
    engine.close()
    with monkeypatch.context() as patch:
        patch.setattr(halves, "export_memory", export)
        try:
            engine.worker.register_kv_caches(engine.caches, block_size=engine.groups[0].block_size)
        except KVFrameworkError:
            return
    engine.close()
    pytest.fail(why)


def relabelled(handle: bytes, *, device: str = "", more: int = 0) -> bytes:
    """Return the handle of an allocation with another device, or a larger size; any other as it is."""
    try:
        exported = msgspec.msgpack.decode(handle, type=ExportedAllocation)
    except msgspec.ValidationError:
        return handle
    found = exported.allocation
    false = msgspec.structs.replace(found, nbytes=found.nbytes + more, device=device or found.device)
    return msgspec.msgpack.encode(ExportedAllocation(false))

"""The transport kit's tests of memory: neighbouring allocations, slabs, all of the arena, and other devices; and of
handles that say what is not so: of another device, or of more memory than there is. A client may send them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from kvf_dev.testing.transport.cases import CASES, CHUNK, PAGED, GroupCase
from kvf_dev.testing.transport.engine import KitEngine
from kvf_dev.testing.transport.kit import MakeEngine, TransportKit
from kvf_dev.testing.transport.outcomes import must_succeed, must_work
from kvf_dev.testing.transport.rig import TransportRig
from kvframework.client import KVClient
from kvframework.devices import endpoints
from kvframework.devices.endpoints import DeviceTransfer
from kvframework.devices.handles import ExportedAllocation, export_memory
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
        patch.setattr(endpoints, "export_memory", export)
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


NHD = PAGED["nhd"]
# A block is a whole number of an allocator's units, so that one allocation may begin where another ends.
_DENSE = [GroupCase(("block", "token", "head", "dim"), planes=1, heads=2, dim=16, layers=5)]
_LARGE = [GroupCase(("block", "token", "head", "dim"), planes=1, heads=2, dim=256, layers=2)]


class Memory(TransportKit):
    """Where tensors and objects lie."""

    def test_fragments_of_neighbouring_allocations_are_apart(self, make_engine: MakeEngine) -> None:
        """The last block of one layer and the first of the next, which follow each other on the device and in the
        arena: no copy may run from one into the other."""
        engine = make_engine(_DENSE)
        last = engine.model.blocks[0] - 1
        request = engine.request()
        blocks, others = [[0, 5, 3, last]], [[0, 1, 2, last]]
        must_succeed(engine.store(request, blocks, 0, CHUNK), "a store over the borders of allocations")
        must_succeed(engine.load(request, others, 0, CHUNK), "a load over the borders of allocations")
        engine.expect_loaded(engine.snapshot(), blocks, others)
        engine.must_be_right("blocks at the borders of allocations")

    @pytest.mark.parametrize("case", ["pairs_of_flat_tokens", "latent", "hybrid"])
    def test_tensors_of_one_allocation_are_found(self, rig: TransportRig, make_engine: MakeEngine, case: str) -> None:
        """As with an allocator that cuts all layers from one slab: each has an offset, and it is opened once."""
        before = rig.open_elsewhere()
        engine = make_engine(CASES[case], slab=True)
        must_work(engine, "a transfer of tensors that share an allocation")
        shapes = {(engine.groups[name[0]].dtype, *shape) for name, shape in engine.model.shapes.items()}
        opened = rig.open_elsewhere() - before
        assert opened <= len(shapes), f"{len(shapes)} allocations were opened {opened} times: give each one handle"

    @pytest.mark.parametrize("case", ["nhd", "dim_before_token"])
    def test_a_long_request_is_copied_whole(self, make_engine: MakeEngine, case: str) -> None:
        """Thousands of fragments in a batch, and more objects than fit into a batch of 16 or 64."""
        engine = make_engine(PAGED[case], chunks=24 if case == "dim_before_token" else 70)
        must_work(engine, f"a request of {engine.chunks} chunks")

    def test_objects_may_lie_anywhere_in_the_arena(self, make_engine: MakeEngine) -> None:
        """All of the arena is registered for copies, slice by slice. Every place of it is used once here."""
        engine = make_engine(_LARGE)
        size = sum(len(image) for image in engine.model.images.values()) // engine.model.blocks[0] * 4 * engine.chunks
        count = (10 << 20) // size
        for number in range(count):
            request = engine.request()
            must_succeed(
                engine.store(request, engine.source()),
                f"a store behind {number * size >> 10} KiB of others (pin registers each slice of the arena)",
            )
            if number == count // 2:
                kept, stored = request, engine.snapshot()
                engine.overwrite()
        must_succeed(engine.load(kept, engine.target()), "a load from far inside of the arena")
        engine.expect_loaded(stored, engine.source(), engine.target())
        engine.must_be_right("an object far inside of the arena, after others were stored")

    def test_two_devices_do_not_mix(self, rig: TransportRig, client: KVClient, make_engine: MakeEngine) -> None:
        engine, other = make_engine(NHD), self._elsewhere(rig, client)
        try:
            requests = [each.request() for each in (engine, other)]
            stores = [each.store(to, each.source()) for each, to in zip((engine, other), requests, strict=True)]
            for store, what in zip(stores, ("a store", "a store from another device"), strict=True):
                must_succeed(store, what)
            stored = [engine.snapshot(), other.snapshot()]
            loads = [engine.load(requests[1], engine.target()), other.load(requests[0], other.target())]
            for load in loads:
                must_succeed(load, "a load of what another device stored")
            engine.expect_loaded(stored[1], other.source(), engine.target())
            other.expect_loaded(stored[0], engine.source(), other.target())
            engine.must_be_right("a load of what another device stored")
            other.must_be_right("a load of what another device stored")
        finally:
            other.close()

    def test_memory_of_another_device_is_refused(
        self, rig: TransportRig, client: KVClient, make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """A client may say any device of its memory."""
        devices: list[str] = []

        def watched(*arguments: Any) -> tuple[str, tuple[bytes, ...]]:
            found = export_memory(*arguments)
            devices.append(found[0])
            return found

        def lying(*arguments: Any) -> tuple[str, tuple[bytes, ...]]:
            _, handles = export_memory(*arguments)
            return devices[0], tuple(relabelled(each, device=devices[0]) for each in handles)

        with monkeypatch.context() as patch:
            patch.setattr(endpoints, "export_memory", watched)
            engine = make_engine(NHD)
        needs_handles(engine)
        why = "memory of another device was opened: `open` refuses what is of another device"
        must_be_refused(monkeypatch, self._elsewhere(rig, client), lying, why)
        must_succeed(engine.store(engine.request(), engine.source()), "a store after a refused registration")

    def _elsewhere(self, rig: TransportRig, client: KVClient) -> KitEngine:
        """Return an engine on another device."""
        try:
            other = rig.elsewhere()
        except NotImplementedError as reason:
            pytest.skip(str(reason))
        return KitEngine(other, client, 100_000 + id(other) % 100_000, NHD, seed=7)

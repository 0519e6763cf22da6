"""The transport kit's tests of memory: neighbouring allocations, slabs, all of the arena, other devices, handles that
say what is not so; and of faults: a copy that fails, a context that is poisoned."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from kvf_dev.testing.kit import must_refuse, wait_until
from kvf_dev.testing.transport.cases import CASES, CHUNK, NHD, PAGED, GroupCase
from kvf_dev.testing.transport.engine import PATIENCE_S, KitEngine, must_miss, must_succeed, must_work
from kvf_dev.testing.transport.kit import MakeEngine, TransportKit, or_skip
from kvf_dev.testing.transport.node import status_of
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
            must_refuse(why, engine.register, KVFrameworkError)
        finally:
            engine.close()


def relabelled(handle: bytes, *, device: str = "", more: int = 0) -> bytes:
    """Return the handle of an allocation with another device, or a larger size; any other as it is."""
    try:
        exported = msgspec.msgpack.decode(handle, type=ExportedAllocation)
    except msgspec.ValidationError:
        return handle
    found = exported.allocation
    false = msgspec.structs.replace(found, nbytes=found.nbytes + more, device=device or found.device)
    return msgspec.msgpack.encode(ExportedAllocation(false))


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
            before = f"{number * size >> 10} KiB of others (pin registers each slice of the arena)"
            request = engine.stored(what=f"a store behind {before}")
            if number == count // 2:
                kept, stored = request, engine.snapshot()
                engine.overwrite()
        engine.must_load(kept, stored, what="a load of an object far inside of the arena, after others were stored")

    def test_two_devices_do_not_mix(self, rig: TransportRig, client: KVClient, engine: KitEngine) -> None:
        other = self._elsewhere(rig, client)
        try:
            pairs = ((engine, other), (other, engine))
            requests = [each.request() for each, _ in pairs]
            stores = [each.store(to, each.source()) for (each, _), to in zip(pairs, requests, strict=True)]
            for store, what in zip(stores, ("a store", "a store from another device"), strict=True):
                must_succeed(store, what)
            stored = {id(each): each.snapshot() for each, _ in pairs}
            loads = [each.load(of, each.target()) for (each, _), of in zip(pairs, requests[::-1], strict=True)]
            for load in loads:
                must_succeed(load, "a load of what another device stored")
            for each, origin in pairs:
                each.must_have_loaded(stored[id(origin)], origin.source(), what="a load of what another device stored")
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
        why = "`open` of memory of another device"
        must_be_refused(monkeypatch, self._elsewhere(rig, client), lying, why)
        must_succeed(engine.store(engine.request(), engine.source()), "a store after a refused registration")

    def _elsewhere(self, rig: TransportRig, client: KVClient) -> KitEngine:
        """Return an engine on another device."""
        other = or_skip(rig.elsewhere)
        return KitEngine(other, client, 100_000 + id(other) % 100_000, NHD, seed=7)


class Faults(TransportKit):
    """Faults on the device harm only the transfers that they hit."""

    @pytest.mark.parametrize("what", ["load", "store"])
    def test_a_copy_that_fails_is_one_miss(
        self, rig: TransportRig, client: KVClient, engine: KitEngine, what: str
    ) -> None:
        must_work(engine)
        request, stored = engine.stored() if what == "load" else engine.request(), engine.snapshot()
        copiers = _copiers(client, rig)
        or_skip(rig.fail_copy)
        if what == "load":
            must_miss(engine.load(request, engine.target()), "a load whose copy failed was answered as a hit")
        else:
            why = "a store whose copy failed was answered as one that succeeded"
            must_miss(engine.store(request, engine.source()), why)
            assert engine.hit(request) == 0, "nothing of it is published"
        assert _copiers(client, rig) == copiers, "the copier ended: raise DeviceError for one operation that failed"
        if what == "load":
            engine.overwrite()
            engine.must_load(request, stored, what="a load after one that failed")
        must_work(engine)

    def test_a_poisoned_context_ends_its_copier_and_the_next_one_works(
        self, rig: TransportRig, client: KVClient, engine: KitEngine
    ) -> None:
        must_work(engine)
        copiers, request = _copiers(client, rig), engine.request()
        or_skip(rig.poison)
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

    def test_what_is_no_event_is_not_taken_for_none(self, engine: KitEngine) -> None:
        needs_handles(engine)
        request = engine.request()
        stored = engine.store(request, engine.source(), event=object()).result(PATIENCE_S)
        assert not stored.ok, "the copy came too early: raise DeviceError for what is no event of the device"
        assert engine.hit(request) == 0, "a store whose event is none was published"
        must_work(engine)

    def test_memory_smaller_than_it_says_is_refused(self, engine: KitEngine, monkeypatch: pytest.MonkeyPatch) -> None:
        """A client may send any size, and a copy beyond the end would harm others."""
        needs_handles(engine)
        why = "opening an allocation smaller than its `nbytes`, beyond whose end a copy harms others,"
        must_be_refused(monkeypatch, engine, _lying, why)
        engine.register()
        must_work(engine)


def _lying(*arguments: Any) -> tuple[str, tuple[bytes, ...]]:
    """Return `export_memory`'s result, with far too large sizes for all allocations."""
    device, handles = export_memory(*arguments)
    return device, tuple(relabelled(each, more=1 << 40) for each in handles)


def _copiers(client: KVClient, rig: TransportRig) -> dict[str, int | None]:
    """Return each device's copier process; empty for a transport without them."""
    transports = status_of(client)["transports"]
    assert isinstance(transports, dict)
    return {each["device"]: each["pid"] for each in transports.get(rig.transport, {}).get("devices", ())}

"""The transport kit's tests of memory: neighbouring allocations, slabs, all of the arena, other devices, handles that
say what is not so; of a driver's two halves alone; and of faults: a copy that fails, a context that is poisoned."""

from __future__ import annotations

import contextlib
import ctypes
import mmap
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import msgspec
import pytest

from kvf_dev.testing.kit import must_refuse, wait_until
from kvf_dev.testing.transport.engine import (
    CASES,
    CHUNK,
    NHD,
    PAGED,
    PATIENCE_S,
    GroupCase,
    KitEngine,
    must_miss,
    must_succeed,
    must_work,
)
from kvf_dev.testing.transport.node import TransportKit
from kvframework.api.futures import Future
from kvframework.api.layout import NO_BLOCK
from kvframework.api.transport import LoadOutcome, StoreOutcome
from kvframework.errors import DeviceError, KVFrameworkError


class Content(TransportKit):
    """Every layout, every group, every range."""

    @pytest.fixture(params=sorted(CASES))
    def case(self, request: pytest.FixtureRequest) -> str:
        name: str = request.param
        return name

    def test_what_is_stored_comes_back_in_other_blocks(self, case: str) -> None:
        must_work(self.make_engine(CASES[case]))

    def test_another_instance_loads_what_was_stored(self, case: str) -> None:
        one, other = self.make_engine(CASES[case]), self.make_engine(CASES[case])
        other.must_load(one.stored(), one.model, one.source())
        one.must_be_right("A store changed the engine's memory")

    def test_skipped_tokens_are_not_written(self, case: str) -> None:
        groups = CASES[case]
        whole = max(group.block_size for group in groups) if any(group.opaque for group in groups) else 1
        engine = self.make_engine(groups)
        request = engine.stored()
        # The longest first, so that no load finds its skipped tokens written already.
        for skip in (3 * CHUNK - 1, CHUNK + 6, CHUNK, 7, 1):
            skip -= skip % whole
            engine.must_load(request, skip=skip, what=f"{skip} tokens were skipped")

    def test_one_block_is_gathered_for_the_canary(self, case: str) -> None:
        """The canary receives the canonical bytes of a block, through the path that stores take."""
        engine = self.make_engine(CASES[case])
        blocks = [count - 2 for count in engine.model.blocks]
        instance = engine.worker._instance
        assert instance is not None
        gathered = list(instance.transfer.gather_block(engine.caches, blocks))
        for index, block in enumerate(blocks):
            right = gathered[index : index + 1] == [engine.model.canonical_block(index, block)]
            assert right, f"`gather_block` returned wrong bytes for block {block} of layer group {index}"

    def test_only_missing_chunks_are_copied(self, engine: KitEngine) -> None:
        request, middle = engine.request(), engine.source(CHUNK, 2 * CHUNK)
        must_succeed(engine.store(request, middle, CHUNK, 2 * CHUNK))
        before = engine.snapshot()
        engine.overwrite()
        whole = engine.store(request, engine.source())
        must_succeed(whole)
        found = whole.result()
        assert found == StoreOutcome(stored=2, present=1), f"Storing 3 chunks, 1 of them present, returned {found}"
        after = engine.snapshot()
        must_succeed(engine.load(request, engine.target()))
        engine.expect_loaded(after, engine.source(), engine.target())
        engine.expect_loaded(before, middle, engine.target(CHUNK, 2 * CHUNK))
        engine.must_be_right()

    def test_a_load_of_what_is_not_there_touches_nothing(self, engine: KitEngine) -> None:
        request = engine.request()
        must_miss(engine.load(request, engine.target()))
        must_succeed(engine.store(request, engine.source(0, CHUNK), 0, CHUNK))
        must_miss(engine.load(request, engine.target()), "A load succeeded although two chunks are missing")
        engine.must_be_right()

    def test_blocks_that_a_window_gave_away_are_left_out(self) -> None:
        engine = self.make_engine(CASES["hybrid"])
        ids = engine.source()
        ids[1] = [NO_BLOCK] * 5 + ids[1][5:]
        ids[2] = [NO_BLOCK] * 2 + ids[2][2:]
        stored = engine.store(engine.request(), ids)
        must_succeed(stored)
        found = stored.result()
        assert found == StoreOutcome(stored=8), f"A store of 8 objects' blocks returned {found}"

    def test_many_transfers_at_once_do_not_mix(self) -> None:
        engines = [self.make_engine(CASES[name]) for name in ("nhd", "hnd", "nhd")] * 4
        requests = [engine.request() for engine in engines]
        for what in ("store", "load"):
            for future in [engine.submit(what, each) for engine, each in zip(engines, requests, strict=True)]:
                must_succeed(future, f"One of many concurrent {what}s")
        for engine in engines[:3]:
            engine.must_have_loaded()


class Pieces(TransportKit):
    """`Future.advance` of a load with `in_pieces`."""

    @pytest.mark.parametrize("case", ["nhd", "hybrid"])
    def test_a_load_in_pieces_is_whole_at_its_end(self, case: str) -> None:
        engine = self.make_engine(CASES[case])
        future = engine.load(engine.stored(), engine.target(), in_pieces=True)
        pieces = list(self._pieces(future))
        must_succeed(future, "A load in pieces")
        engine.must_have_loaded()
        largest = max(group.nbytes for group in engine.registration.desc.groups)
        assert max(pieces, default=0) <= largest, "A piece was larger than the largest object"
        assert future.advance() == 0, "`advance` must return 0 for a load that has ended"

    def test_between_its_pieces_a_load_touches_nothing_and_is_cancelled(self, engine: KitEngine) -> None:
        future = engine.load(engine.stored(), engine.target(), in_pieces=True)
        if not next(self._pieces(future), 0):
            pytest.skip("The transport copies by itself")
        assert not future.query(), "A load of several objects ended after its first piece"
        engine.overwrite()
        future.cancel()
        assert future.query(), "A load cancelled between pieces must end at once"
        must_miss(future, "A load cancelled between two pieces succeeded")
        assert future.advance() == 0
        engine.must_be_right("A load cancelled between two pieces changed the tensors")
        self.must_be_given_back("a load that ended early")
        must_work(engine, "A transfer after a load cancelled between two pieces")

    def _pieces(self, future: Future[LoadOutcome]) -> Iterator[int]:
        for _ in range(int(self.patience_s / 0.01)):
            if future.query():
                return
            if piece := future.advance(1):
                yield piece
            else:
                future.wait(0.01)
        pytest.fail("A load in pieces did not end although it was advanced")


# A block is a whole number of an allocator's units, so that one allocation may begin where another ends.
_DENSE = [GroupCase(("block", "token", "head", "dim"), planes=1, heads=2, dim=16, layers=5)]
_LARGE = [GroupCase(("block", "token", "head", "dim"), planes=1, heads=2, dim=256, layers=2)]


class Memory(TransportKit):
    """The places of tensors and objects in memory."""

    def test_fragments_of_neighbouring_allocations_are_apart(self) -> None:
        """The last block of one layer and the first of the next, which follow each other on the device and in the
        arena: no copy may run from one into the other."""
        engine = self.make_engine(_DENSE)
        last = engine.model.blocks[0] - 1
        request = engine.request()
        blocks, others = [[0, 5, 3, last]], [[0, 1, 2, last]]
        must_succeed(engine.store(request, blocks, 0, CHUNK), "A store across allocations")
        must_succeed(engine.load(request, others, 0, CHUNK), "A load across allocations")
        engine.expect_loaded(engine.snapshot(), blocks, others)
        engine.must_be_right("Blocks at the ends of allocations are wrong")

    @pytest.mark.parametrize("case", ["pairs_of_flat_tokens", "latent", "hybrid"])
    def test_tensors_of_one_allocation_are_found(self, case: str) -> None:
        """As with an allocator that cuts all layers from one slab: each has an offset, and it is opened once."""
        before = self.rig.open_elsewhere()
        engine = self.make_engine(CASES[case], slab=True)
        must_work(engine, "A transfer of tensors that share an allocation")
        shapes = {(engine.groups[name[0]].dtype, *shape) for name, shape in engine.model.shapes.items()}
        opened = self.rig.open_elsewhere() - before
        assert opened <= len(shapes), f"{len(shapes)} allocations were opened {opened} times: export each once"

    @pytest.mark.parametrize("case", ["nhd", "dim_before_token"])
    def test_a_long_request_is_copied_whole(self, case: str) -> None:
        """Thousands of fragments in a batch, and more objects than fit into a batch of 16 or 64."""
        chunks = 70 if case == "nhd" else 24
        must_work(self.make_engine(PAGED[case], chunks=chunks), f"A request of {chunks} chunks")

    def test_objects_may_lie_anywhere_in_the_arena(self) -> None:
        """All of the arena is registered for copies, slice by slice. Every place of it is used once here."""
        engine = self.make_engine(_LARGE)
        size = sum(len(image) for image in engine.model.images.values()) // engine.model.blocks[0] * 4 * engine.chunks
        count = (10 << 20) // size
        for number in range(count):
            before = f"{number * size >> 10} KiB of other data (`pin` must register each slice of the arena)"
            request = engine.stored(what=f"A store after {before}")
            if number == count // 2:
                kept, stored = request, engine.snapshot()
                engine.overwrite()
        engine.must_load(kept, stored, what="A load of an object deep in the arena, after other stores,")

    def test_two_devices_do_not_mix(self, engine: KitEngine) -> None:
        other = self.make_engine(NHD, rig=self.rig.elsewhere())
        requests = [engine.request(), other.request()]
        stores = [engine.submit("store", requests[0]), other.submit("store", requests[1])]
        for store, what in zip(stores, ("a store", "a store from another device"), strict=True):
            must_succeed(store, what)
        stored = [engine.snapshot(), other.snapshot()]
        loads = [engine.submit("load", requests[1]), other.submit("load", requests[0])]
        for load in loads:
            must_succeed(load, "A load of KV that another device stored")
        engine.must_have_loaded(stored[1], other.source(), what="A load of KV that another device stored")
        other.must_have_loaded(stored[0], engine.source(), what="A load of KV that another device stored")

    def test_memory_of_another_device_is_refused(self, engine: KitEngine) -> None:
        """A client may say any device of its memory."""
        driver = self.driver()
        device = driver.export(engine.address).allocation.device
        driver.close()
        other = self.make_engine(NHD, rig=self.rig.elsewhere())
        _must_be_refused(self.patch, other, "Opening memory of another device", device=device)
        must_succeed(engine.store(engine.request(), engine.source()), "A store after a refused registration")


class Driver(TransportKit):
    """The halves as the core makes them, without a server: calls at rare times, such as after `close`."""

    def test_events_are_destroyed_after_close(self, engine: KitEngine) -> None:
        """An event is given back once its request is answered, which may be after the end of its instance."""
        driver = self.driver()
        device, before = driver.export(engine.address).allocation.device, self.rig.events()
        events = [driver.create_event(device) for _ in range(2)]
        driver.record(events[0], self.rig.event())
        for event in events:
            driver.export_event(event)
        _must_not_raise("close", driver.close)
        _must_not_raise("a second close", driver.close)
        for event in events:
            # `DeviceError` is fine: the events may have ended with the driver.
            _must_not_raise("`destroy_event` after `close`", partial(driver.destroy_event, event))
        left = self.rig.events() - before
        assert left <= 0, f"{left} events are left: `destroy_event` must work after `close`"

    @pytest.mark.parametrize("when", ["twice", "after close", "twice by threads"])
    def test_a_blocked_stream_is_released(self, engine: KitEngine, when: str) -> None:
        """The core calls a release from any thread, perhaps twice, perhaps after `close`."""
        driver = self.driver()
        driver.export(engine.address)
        stream = self.rig.stream()
        release = driver.block_stream(stream)
        reads = engine.read_later(stream)
        try:
            if when == "after close":
                _must_not_raise("`close` while a stream is blocked", driver.close)
            for number in ("a", "a second"):
                call = partial(_must_not_raise, f"{number.capitalize()} call of `release` ({when})", release)
                self.in_threads(call) if when == "twice by threads" else call()
        finally:
            with contextlib.suppress(Exception):  # no stream stands still after a test that failed
                release()
        self.must_go_on(reads)
        driver.close()

    @pytest.mark.parametrize("device", ["no such device", ""], ids=["another", "empty"])
    def test_a_copier_of_a_device_that_the_machine_lacks_is_refused(self, device: str) -> None:
        provider, options = self.provider()
        from kvf_devices import Arena

        view = memoryview(mmap.mmap(-1, mmap.PAGESIZE))
        arena = Arena(view, ctypes.addressof(ctypes.c_char.from_buffer(view)))
        must_refuse(
            f"`create_copier` for {device!r}, a device that this machine lacks,",
            lambda: provider.create_copier(options, device, arena),
            DeviceError,
        )


class Faults(TransportKit):
    """Faults on the device harm only the transfers that they hit."""

    @pytest.mark.parametrize("what", ["load", "store"])
    def test_a_copy_that_fails_is_one_miss(self, engine: KitEngine, what: str) -> None:
        must_work(engine)
        request, stored = engine.stored() if what == "load" else engine.request(), engine.snapshot()
        copiers = self.copiers()
        self.rig.fail_copy()
        good = "a hit" if what == "load" else "one that succeeded"
        must_miss(engine.submit(what, request), f"A {what} whose copy failed was answered as {good}")
        assert what == "load" or engine.hit(request) == 0, "A store whose copy failed was published"
        assert self.copiers() == copiers, "The copier ended: raise DeviceError, not DeviceLost, for one failed copy"
        if what == "load":
            engine.overwrite()
            engine.must_load(request, stored, what="A load after a failed one")
        must_work(engine)

    def test_a_poisoned_context_ends_its_copier_and_the_next_one_works(self, engine: KitEngine) -> None:
        must_work(engine)
        copiers, request = self.copiers(), engine.request()
        self.rig.poison()
        must_miss(engine.store(request, engine.source()))
        wait_until(
            lambda: engine.store(engine.request(), engine.source()).result(PATIENCE_S),
            "a store after the context was lost: raise DeviceLost once nothing works",
            self.patience_s,
        )
        assert engine.hit(request) == 0, "A store whose copy failed was published"
        must_work(engine)
        assert not copiers or self.copiers() != copiers, (
            "The copier runs on after its context was lost: raise DeviceLost once nothing works"
        )

    def test_a_device_reset_is_a_miss_and_then_all_works(self, engine: KitEngine) -> None:
        must_work(engine)
        request = engine.request()
        with self.rig.without_device():
            must_miss(engine.store(request, engine.source()), "A store succeeded while the device was reset")
        assert engine.hit(request) == 0, "A store was published although the device was reset during it"
        wait_until(
            lambda: engine.store(engine.request(), engine.source()).result(PATIENCE_S).ok,
            "a store after the reset of the device",
            self.patience_s,
        )
        must_work(engine)

    def test_what_is_no_event_is_not_taken_for_none(self, engine: KitEngine) -> None:
        request = engine.request()
        stored = engine.store(request, engine.source(), event=object()).result(PATIENCE_S)
        assert not stored.ok, "An object that is not an event was accepted: raise DeviceError"
        assert engine.hit(request) == 0, "A store with an invalid event was published"
        must_work(engine)

    def test_memory_smaller_than_it_says_is_refused(self, engine: KitEngine) -> None:
        """A client may send any size, and a copy beyond the end would harm others."""
        self.provider()
        why = "Opening an allocation smaller than its `nbytes`"
        _must_be_refused(self.patch, engine, why, nbytes=1 << 40)
        engine.register()
        must_work(engine)


def _must_be_refused(monkeypatch: pytest.MonkeyPatch, engine: KitEngine, why: str, **false: Any) -> None:
    """Fail unless the engine's memory is refused with `false` fields. The engine is closed before and afterwards."""
    __tracebackhide__ = True
    from kvf_devices import endpoints
    from kvf_devices.handles import ExportedAllocation, export_memory

    def relabelled(handle: bytes) -> bytes:
        try:
            exported = msgspec.msgpack.decode(handle, type=ExportedAllocation)
        except msgspec.ValidationError:  # of something else
            return handle
        return msgspec.msgpack.encode(ExportedAllocation(msgspec.structs.replace(exported.allocation, **false)))

    def lying(*arguments: Any) -> tuple[str, tuple[bytes, ...]]:
        device, handles = export_memory(*arguments)
        return false.get("device", device), tuple(map(relabelled, handles))

    engine.close()
    with monkeypatch.context() as patch:
        patch.setattr(endpoints, "export_memory", lying)
        try:
            must_refuse(why, engine.register, KVFrameworkError)
        finally:
            engine.close()


def _must_not_raise(what: str, call: Callable[[], object]) -> None:
    __tracebackhide__ = True
    try:
        call()
    except DeviceError:
        return
    except Exception as error:  # noqa: BLE001  any other is the bug
        pytest.fail(f"{what} raised {type(error).__name__}: {error}")

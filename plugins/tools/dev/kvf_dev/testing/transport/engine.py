"""An engine of the transport kit: memory of known content on the rig's device, registered with a server; and the ends
of its transfers, with a sentence for any other."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import deepcopy
from importlib import import_module
from typing import Any

import pytest

from kvf_dev.testing.transport.cases import CHUNK, GroupCase, MemoryModel, Name, loaded_slots
from kvf_dev.testing.transport.rig import TransportRig
from kvframework.api.futures import Future
from kvframework.api.transport import BlockIds, LoadOutcome, StoreOutcome
from kvframework.client import KVClient, RequestHashes, SchedulerAdapter, WorkerAdapter
from kvframework.errors import DeadlineExceeded
from kvframework.registry.registry import PluginRegistry

SPARE = 3
PATIENCE_S = 20.0
WRONG = (
    "a byte is wrong, though the transfers ended well: `reached` was true too early, or `copy` put fragments in the "
    "wrong place"
)
_SEEDS = itertools.count(1000)


def registry_for(rig: TransportRig) -> PluginRegistry:
    """Return the registry of installed plugins, with the rig's modules."""
    registry = PluginRegistry()
    for name in rig.plugins:
        registry.register(import_module(name), distribution="kit")
    return registry


class KitEngine:
    """One instance: memory for `chunks` chunks twice over, with known content, behind a `WorkerAdapter`.

    With `slab`, tensors of one shape and dtype are cut from one allocation.

    Blocks to store from and to load into are drawn from `seed`, so that ids are neither in order nor equal between
    groups. `model` is the expected content of the memory.
    """

    def __init__(
        self,
        rig: TransportRig,
        client: KVClient,
        instance_id: int,
        groups: Sequence[GroupCase],
        *,
        chunks: int = 3,
        seed: int = 0,
        slab: bool = False,
    ) -> None:
        self.rig, self.client, self.groups, self.chunks = rig, client, groups, chunks
        tokens = chunks * CHUNK
        counts = [2 * tokens // group.block_size + SPARE for group in groups]
        self.model = MemoryModel(groups, counts, seed)
        self._seed = seed
        self.tensors: dict[Name, Any] = dict(self._allocated(slab))
        for name, tensor in self.tensors.items():
            rig.write(tensor, bytes(self.model.images[name]))
        opaque = any(group.opaque for group in groups)
        tables = [group.table(f"g{index}.*", index) for index, group in enumerate(groups)]
        self.worker = WorkerAdapter(
            client,
            instance_id=instance_id,
            model_name="kit",
            transport=rig.transport,
            transport_options=rig.engine_options,
            layout="opaque" if opaque else "paged",
            layout_options={"groups": tables, **({"packing": "kit/1"} if opaque else {})},
        )
        self.caches = self._caches()
        self._passed: Mapping[str, Any] | None = None
        self.register()
        assert self.registration.desc.chunk_tokens == CHUNK

    def register(self) -> None:
        self.registration = self.worker.register_kv_caches(self.caches, block_size=self.groups[0].block_size)

    @property
    def address(self) -> int:
        """The device's address of the first tensor."""
        return int(next(iter(self.tensors.values())).data_ptr())

    def request(self, seed: int | None = None, request_id: str = "r") -> RequestHashes:
        """Return a request with tokens of `seed` (below 1000), or with tokens of its own."""
        seed = next(_SEEDS) if seed is None else seed
        request = RequestHashes(self.client.hasher, CHUNK, request_id=request_id)
        request.extend([seed * 1000 + at for at in range(self.chunks * CHUNK)])
        return request

    def source(self, start: int = 0, end: int | None = None, *, seed: int | None = None) -> list[list[int]]:
        """Return the blocks that hold tokens `[start, end)`, per group; those of an engine of another `seed`."""
        return self._blocks(start, end, 0, self._seed if seed is None else seed)

    def target(self, start: int = 0, end: int | None = None) -> list[list[int]]:
        """Return other blocks for the same tokens."""
        return self._blocks(start, end, self.chunks * CHUNK, self._seed)

    def store(
        self, request: RequestHashes, blocks: BlockIds, start: int = 0, end: int | None = None, event: object = None
    ) -> Future[StoreOutcome]:
        event = self.rig.event() if event is None else event
        return self.worker.submit_store(request, start, self._end(end), blocks, self._passed, event)

    def load(
        self,
        request: RequestHashes,
        blocks: BlockIds,
        start: int = 0,
        end: int | None = None,
        *,
        skip: int = 0,
        event: object = None,
        in_pieces: bool = False,
    ) -> Future[LoadOutcome]:
        return self.worker.submit_retrieve(
            request,
            start,
            self._end(end),
            blocks,
            self._passed,
            event=self.rig.event() if event is None else event,
            skip_first_n_tokens=skip,
            in_pieces=in_pieces,
        )

    def submit(self, what: str, request: RequestHashes) -> Future[Any]:
        """Store from the blocks of `source`, or load into those of `target`."""
        return self.store(request, self.source()) if what == "store" else self.load(request, self.target())

    def stored(self, request: RequestHashes | None = None, what: str = "a transfer") -> RequestHashes:
        """Store a request (None: a new one), which must succeed, and return it."""
        __tracebackhide__ = True
        request = request or self.request()
        must_succeed(self.store(request, self.source()), what)
        return request

    def must_load(
        self,
        request: RequestHashes,
        of: MemoryModel | None = None,
        blocks: BlockIds | None = None,
        skip: int = 0,
        what: str = "",
        event: object = None,
    ) -> None:
        """Load what `blocks` of memory `of` (None: this engine's) held when stored; fail unless all memory is right."""
        __tracebackhide__ = True
        must_succeed(self.load(request, self.target(), skip=skip, event=event), what or "a transfer")
        self.must_have_loaded(of, blocks, skip, what)

    def must_have_loaded(
        self, of: MemoryModel | None = None, blocks: BlockIds | None = None, skip: int = 0, what: str = ""
    ) -> None:
        __tracebackhide__ = True
        self.expect_loaded(of or self.snapshot(), blocks or self.source(), self.target(), skip)
        self.must_be_right(what or WRONG)

    def read_later(self, stream: object | None) -> list[Callable[[], bytes | None]]:
        """Queue a read of each tensor on a stream, as `TransportRig.read_later`."""
        return [self.rig.read_later(tensor, stream) for tensor in self.tensors.values()]

    def hit(self, request: RequestHashes) -> int:
        """Return how many tokens a lookup finds."""
        scheduler = SchedulerAdapter(
            self.client,
            model_name=self.worker.model_name,
            namespace=self.registration.namespace,
            chunk_tokens=CHUNK,
            world_size=self.registration.world_size,
        )
        result = scheduler.lookup(request)
        scheduler.free(result)
        return result.hit_tokens

    def expect_loaded(self, other: MemoryModel, sources: BlockIds, targets: BlockIds, skip: int = 0) -> None:
        """Update the model with a load of the content that `other` held when it was stored."""
        for index, group in enumerate(self.groups):
            for at, slots in loaded_slots(group, len(targets[index]), skip):
                self.model.copy_slots(other, index, sources[index][at], targets[index][at], slots)

    def overwrite(self, *, later: bool = False) -> object:
        """Give the memory other content at once, or later; return the event behind it in that case."""
        self.model = MemoryModel(self.groups, self.model.blocks, next(_SEEDS))
        event = None
        for name, image in self.model.images.items():
            event = (self.rig.write_later if later else self.rig.write)(self.tensors[name], bytes(image))
        return event

    def move(self) -> None:
        """Put other tensors with other content in the place of those so far; submits pass them from now on."""
        self.tensors = dict(self._allocated(slab=False))
        self.overwrite()
        self._passed = self.caches = self._caches()

    def snapshot(self) -> MemoryModel:
        """Return the model as it is now, apart from later changes."""
        return deepcopy(self.model)

    def differences(self) -> list[str]:
        """Return the places where the memory differs from the model."""
        found = []
        for name, tensor in self.tensors.items():
            is_there, expected = self.rig.read(tensor), bytes(self.model.images[name])
            if is_there != expected:
                wrong = [at for at, (one, other) in enumerate(zip(is_there, expected, strict=True)) if one != other]
                found.append(f"tensor {name}: {len(wrong)} of {len(expected)} bytes differ, first at {wrong[0]}")
        return found

    def must_be_right(self, why: str = WRONG) -> None:
        """Fail if the memory differs from the model."""
        __tracebackhide__ = True
        if found := self.differences():
            pytest.fail(f"{why}: {'; '.join(found[:3])}")

    def close(self) -> None:
        self.worker.close()

    def _end(self, end: int | None) -> int:
        return self.chunks * CHUNK if end is None else end

    def _blocks(self, start: int, end: int | None, shift: int, seed: int) -> list[list[int]]:
        found = []
        for index, (group, count) in enumerate(zip(self.groups, self.model.blocks, strict=True)):
            ids = list(range(count))
            random.Random(seed + index).shuffle(ids)  # noqa: S311 - repeatable test data
            found.append(ids[(start + shift) // group.block_size : (self._end(end) + shift) // group.block_size])
        return found

    def _allocated(self, slab: bool) -> Iterator[tuple[Name, Any]]:
        if not slab:
            for name, shape in self.model.shapes.items():
                yield name, self.rig.empty(shape, self.groups[name[0]].dtype)
            return
        together: dict[tuple[str, tuple[int, ...]], list[Name]] = {}
        for name, shape in self.model.shapes.items():
            together.setdefault((self.groups[name[0]].dtype, shape), []).append(name)
        for (dtype, shape), names in together.items():
            # The last is before the first, so that addresses are not in the order of layers.
            whole = self.rig.empty([len(names), *shape], dtype)
            yield from ((name, whole.select(0, at)) for at, name in enumerate(names[::-1]))

    def _caches(self) -> Mapping[str, Any]:
        caches: dict[str, Any] = {}
        for (index, layer, plane), tensor in self.tensors.items():
            name = f"g{index}.{'all' if layer < 0 else layer}"
            if plane < 0 or self.groups[index].planes == 1:
                caches[name] = tensor
            else:
                caches[name] = (*caches.get(name, ()), tensor)
        return caches


def must_succeed(future: Future[Any], what: str = "a transfer") -> None:
    """Fail unless the transfer ends well in time."""
    __tracebackhide__ = True
    if not (outcome := _outcome(future, what)):
        pytest.fail(f"{what} failed, though nothing hinders it: {outcome}")


def must_work(engine: KitEngine, what: str = "", *, request: RequestHashes | None = None) -> None:
    """Store a request (None: a new one) and load it into other blocks; fail unless all memory is then as it must be."""
    __tracebackhide__ = True
    engine.must_load(engine.stored(request, what or "a transfer"), what=what)


def must_miss(future: Future[Any], why: str = "a transfer that cannot succeed ended well") -> None:
    """Fail unless the transfer ends in time, as a miss."""
    __tracebackhide__ = True
    if outcome := _outcome(future, "a transfer that is to miss"):
        pytest.fail(f"{why}: {outcome}")


def must_be_under_way(future: Future[Any]) -> None:
    """Fail if the transfer ends within 0.2 s."""
    __tracebackhide__ = True
    if future.wait(0.2):
        pytest.fail("blocks are still touched: the transfer ended while its copy stood still")


def _outcome(future: Future[Any], what: str) -> Any:
    __tracebackhide__ = True
    try:
        return future.result(PATIENCE_S)
    except DeadlineExceeded:
        pytest.fail(f"{what} did not end within {PATIENCE_S:g} s")
    except Exception as error:  # noqa: BLE001  a transfer's future never fails
        pytest.fail(f"the future of {what} failed with {type(error).__name__}, instead of a miss: {error}")

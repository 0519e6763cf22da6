"""An engine of the transport kit: memory of known content on the rig's device, registered with a server."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator, Mapping, Sequence
from importlib import import_module
from typing import Any

import pytest

from kvf_dev.testing.transport.cases import CHUNK, GroupCase, MemoryModel, Name, loaded_slots
from kvf_dev.testing.transport.rig import TransportRig
from kvframework.api.futures import Future
from kvframework.api.transport import BlockIds, LoadOutcome, StoreOutcome
from kvframework.client import KVClient, RequestHashes, SchedulerAdapter, WorkerAdapter
from kvframework.registry import PluginRegistry

SPARE = 3
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
        model_name: str = "kit",
        slab: bool = False,
    ) -> None:
        self.rig, self.client, self.groups, self.chunks = rig, client, groups, chunks
        tokens = chunks * CHUNK
        counts = [2 * tokens // group.block_size + SPARE for group in groups]
        self.model = MemoryModel(groups, counts, seed)
        self._seed = seed
        self.tensors: dict[Name, Any] = {}
        for name, tensor in self._allocated(slab):
            self.tensors[name] = tensor
            rig.write(self.tensors[name], bytes(self.model.images[name]))
        opaque = any(group.opaque for group in groups)
        tables = [group.table(f"g{index}.*", index) for index, group in enumerate(groups)]
        self.worker = WorkerAdapter(
            client,
            instance_id=instance_id,
            model_name=model_name,
            transport=rig.transport,
            transport_options=rig.engine_options,
            layout="opaque" if opaque else "paged",
            layout_options={"groups": tables, **({"packing": "kit/1"} if opaque else {})},
        )
        self.caches = self._caches()
        self._passed: Mapping[str, Any] | None = None
        self.registration = self.worker.register_kv_caches(self.caches, block_size=groups[0].block_size)
        assert self.registration.desc.chunk_tokens == CHUNK

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

    def model_of(self, seed: int) -> MemoryModel:
        """Return the initial memory of an engine of the same case and another seed."""
        return MemoryModel(self.groups, self.model.blocks, seed)

    def store(
        self, request: RequestHashes, blocks: BlockIds, start: int = 0, end: int | None = None, event: object = None
    ) -> Future[StoreOutcome]:
        event = self.rig.event() if event is None else event
        return self.worker.submit_store(request, start, self._end(end), blocks, self._passed, event)  # type: ignore[arg-type]

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
            event=self.rig.event() if event is None else event,  # type: ignore[arg-type]
            skip_first_n_tokens=skip,
            in_pieces=in_pieces,
        )

    def hit(self, request: RequestHashes) -> int:
        """Return how many tokens a lookup finds."""
        scheduler = SchedulerAdapter(
            self.client,
            model_name=self.worker.identity.model_name,
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
        fresh = MemoryModel(self.groups, self.model.blocks, next(_SEEDS))
        self.model = fresh
        event = None
        for name, image in fresh.images.items():
            if later:
                event = self.rig.write_later(self.tensors[name], bytes(image))
            else:
                self.rig.write(self.tensors[name], bytes(image))
        return event

    def move(self) -> None:
        """Put other tensors with other content in the place of those so far; submits pass them from now on."""
        self.model = MemoryModel(self.groups, self.model.blocks, next(_SEEDS))
        self.tensors = dict(self._allocated(slab=False))
        for name, image in self.model.images.items():
            self.rig.write(self.tensors[name], bytes(image))
        self._passed = self.caches = self._caches()

    def snapshot(self) -> MemoryModel:
        """Return the model as it is now, apart from later changes."""
        copy = MemoryModel(self.groups, self.model.blocks, 0)
        copy.images = {name: bytearray(image) for name, image in self.model.images.items()}
        return copy

    def differences(self) -> list[str]:
        """Return the places where the memory differs from the model."""
        found = []
        for name, tensor in self.tensors.items():
            is_there, expected = self.rig.read(tensor), bytes(self.model.images[name])
            if is_there != expected:
                wrong = [at for at in range(len(expected)) if is_there[at] != expected[at]]
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
            yield from zip(names[::-1], whole.unbind(0), strict=True)

    def _caches(self) -> Mapping[str, Any]:
        caches: dict[str, Any] = {}
        for (index, layer, plane), tensor in self.tensors.items():
            name = f"g{index}.{'all' if layer < 0 else layer}"
            if plane < 0 or self.groups[index].planes == 1:
                caches[name] = tensor
            else:
                caches[name] = (*caches.get(name, ()), tensor)
        return caches

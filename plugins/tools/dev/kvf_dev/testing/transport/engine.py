"""An engine of the transport kit: memory of known content on the rig's device, registered with a server; and the ends
of its transfers, with a sentence for any other."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from importlib import import_module
from itertools import product
from typing import Any

import pytest

from kvf_dev.testing.transport.rig import TransportRig
from kvframework.api.futures import Future
from kvframework.api.plugin import DTYPE_BYTES
from kvframework.api.transport import BlockIds, LoadOutcome, StoreOutcome
from kvframework.client import KVClient, RequestHashes, SchedulerAdapter, WorkerAdapter
from kvframework.errors import DeadlineExceeded
from kvframework.registry.registry import PluginRegistry

CHUNK = 16
# A tensor of a model: group, layer, plane (-1: held by the tensor itself).
Name = tuple[int, int, int]


@dataclass(frozen=True)
class GroupCase:
    """One layer group: its sizes, and the axes in which the engine holds it."""

    axes: tuple[str, ...]
    layers: int = 2
    planes: int = 2
    heads: int = 2
    dim: int = 3
    dtype: str = "float32"
    block_size: int = 4
    compress_ratio: int = 1
    window: int = 0
    state: bool = False
    opaque: bool = False

    @property
    def slots(self) -> int:
        return 1 if self.state else self.block_size // self.compress_ratio

    @property
    def units(self) -> int:
        return 1 if self.opaque else self.slots

    def table(self, pattern: str, index: int) -> dict[str, object]:
        common = {"layers": [pattern], "block_size": self.block_size, "window": self.window, "state": self.state}
        if self.opaque:
            return {**common, "block_axis": self.axes.index("block")}
        return {**common, "axes": list(self.axes), "compress_ratio": self.compress_ratio}

    def shapes(self, blocks: int) -> dict[tuple[int, int], tuple[int, ...]]:
        """Return the shape of each tensor by (layer, plane); -1 for an axis that the tensor itself holds."""
        sizes = {"layer": self.layers, "plane": self.planes, "block": blocks, "token": self.slots}
        sizes |= {"head": self.heads, "dim": self.dim}
        if "block" not in self.axes:
            sizes["token"] *= blocks
        shape = tuple(sizes[axis] for axis in self.axes)
        lanes = product(range(self.layers), range(self.planes))
        return dict.fromkeys((self.held_apart(layer, plane) for layer, plane in lanes), shape)

    def held_apart(self, layer: int, plane: int) -> tuple[int, int]:
        return (-1 if "layer" in self.axes else layer, -1 if "plane" in self.axes else plane)


PAGED = {
    "nhd": [GroupCase(("plane", "block", "token", "head", "dim"))],
    "hnd": [GroupCase(("block", "plane", "head", "token", "dim"), dtype="bfloat16")],
    "dim_before_token": [GroupCase(("block", "head", "dim", "token"), dtype="float16")],
    "all_layers_in_one": [GroupCase(("block", "layer", "plane", "token", "head", "dim"), layers=3)],
    "pairs_of_flat_tokens": [GroupCase(("token", "head", "dim"), dtype="uint8")],
    "latent": [GroupCase(("block", "token", "dim"), planes=1, heads=1, dim=5, layers=3)],
    "window": [GroupCase(("plane", "block", "token", "head", "dim"), window=10)],
    "state": [
        GroupCase(("block", "token", "head", "dim")),
        GroupCase(("block", "dim"), planes=1, heads=1, dim=7, state=True),
    ],
    "hybrid": [
        GroupCase(("plane", "block", "head", "token", "dim"), block_size=8),
        GroupCase(("block", "token", "head", "dim"), layers=3, window=20, block_size=4),
        GroupCase(("block", "dim"), layers=1, planes=1, heads=1, dim=6, state=True, block_size=16),
        GroupCase(("block", "token", "dim"), layers=1, planes=1, heads=1, compress_ratio=4, block_size=16),
    ],
}
NHD = PAGED["nhd"]
OPAQUE = {
    "opaque": [
        GroupCase(("block", "token", "head", "dim"), opaque=True, dtype="bfloat16"),
        GroupCase(("block", "token", "dim"), planes=1, heads=1, layers=1, opaque=True, window=9),
    ]
}
CASES = {**PAGED, **OPAQUE}


class MemoryModel:
    """The expected bytes of an engine's tensors: `images` by tensor. Starts with random bytes."""

    def __init__(self, groups: Sequence[GroupCase], blocks: Sequence[int], seed: int) -> None:
        self.groups = groups
        self.blocks = blocks
        source = random.Random(seed)  # noqa: S311 - repeatable test data
        self.shapes: dict[Name, tuple[int, ...]] = {
            (index, *name): shape
            for index, (group, count) in enumerate(zip(groups, blocks, strict=True))
            for name, shape in group.shapes(count).items()
        }
        self.images = {
            name: bytearray(source.randbytes(math.prod(shape) * DTYPE_BYTES[groups[name[0]].dtype]))
            for name, shape in self.shapes.items()
        }

    def copy_slots(self, other: MemoryModel, group: int, source: int, target: int, slots: Sequence[int]) -> None:
        for slot in slots:
            there, here = other.elements(group, source, slot), self.elements(group, target, slot)
            for (from_name, from_place), (to_name, to_place) in zip(there, here, strict=True):
                self.images[to_name][to_place] = other.images[from_name][from_place]

    def canonical_block(self, index: int, block: int) -> bytes:
        group = self.groups[index]
        lanes = product(range(group.planes), range(group.layers), range(group.slots))
        places = (each for plane, layer, slot in lanes for each in self._lane(index, block, layer, plane, slot))
        return b"".join(self.images[name][place] for name, place in places)

    def elements(self, index: int, block: int, slot: int) -> Iterator[tuple[Name, slice]]:
        """Yield every element of one slot as (tensor, its bytes), in the same order for all axes."""
        group = self.groups[index]
        slots = range(group.slots) if group.opaque else [slot]
        for layer, plane, at in product(range(group.layers), range(group.planes), slots):
            yield from self._lane(index, block, layer, plane, at)

    def _lane(self, index: int, block: int, layer: int, plane: int, slot: int) -> Iterator[tuple[Name, slice]]:
        group = self.groups[index]
        name, nbytes = (index, *group.held_apart(layer, plane)), DTYPE_BYTES[group.dtype]
        token = slot if "block" in group.axes else block * group.slots + slot
        for head, dim in product(range(group.heads), range(group.dim)):
            places = {"layer": layer, "plane": plane, "block": block, "token": token, "head": head, "dim": dim}
            offset = 0
            for axis, size in zip(group.axes, self.shapes[name], strict=True):
                offset = offset * size + places[axis]
            yield name, slice(offset * nbytes, (offset + 1) * nbytes)


def loaded_slots(group: GroupCase, blocks: int, skip_tokens: int) -> Iterator[tuple[int, list[int]]]:
    tokens = blocks * group.block_size
    for at in range(blocks):
        if group.state and at != blocks - 1:
            continue
        if group.window and (at + 1) * group.block_size <= tokens - group.window:
            continue
        width = group.block_size // group.units
        slots = [unit for unit in range(group.units) if at * group.block_size + (unit + 1) * width > skip_tokens]
        if slots:
            yield at, slots


SPARE = 3
PATIENCE_S = 20.0
WRONG = (
    "A byte is wrong, though the transfers ended well: `reached` was true too early, or `copy` put fragments in the "
    "wrong place"
)
_SEEDS = itertools.count(1000)


def registry_for(rig: TransportRig) -> PluginRegistry:
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
        return int(next(iter(self.tensors.values())).data_ptr())

    def request(self, seed: int | None = None, request_id: str = "r") -> RequestHashes:
        seed = next(_SEEDS) if seed is None else seed
        request = RequestHashes(self.client.hasher, CHUNK, request_id=request_id)
        request.extend([seed * 1000 + at for at in range(self.chunks * CHUNK)])
        return request

    def source(self, start: int = 0, end: int | None = None, *, seed: int | None = None) -> list[list[int]]:
        return self._blocks(start, end, 0, self._seed if seed is None else seed)

    def target(self, start: int = 0, end: int | None = None) -> list[list[int]]:
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
        return self.store(request, self.source()) if what == "store" else self.load(request, self.target())

    def stored(self, request: RequestHashes | None = None, what: str = "A transfer") -> RequestHashes:
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
        must_succeed(self.load(request, self.target(), skip=skip, event=event), what or "A transfer")
        self.must_have_loaded(of, blocks, skip, what)

    def must_have_loaded(
        self, of: MemoryModel | None = None, blocks: BlockIds | None = None, skip: int = 0, what: str = ""
    ) -> None:
        __tracebackhide__ = True
        self.expect_loaded(of or self.snapshot(), blocks or self.source(), self.target(), skip)
        self.must_be_right(what or WRONG)

    def read_later(self, stream: object | None) -> list[Callable[[], bytes | None]]:
        return [self.rig.read_later(tensor, stream) for tensor in self.tensors.values()]

    def hit(self, request: RequestHashes) -> int:
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
        self.model = MemoryModel(self.groups, self.model.blocks, next(_SEEDS))
        event = None
        for name, image in self.model.images.items():
            event = (self.rig.write_later if later else self.rig.write)(self.tensors[name], bytes(image))
        return event

    def move(self) -> None:
        self.tensors = dict(self._allocated(slab=False))
        self.overwrite()
        self._passed = self.caches = self._caches()

    def snapshot(self) -> MemoryModel:
        return deepcopy(self.model)

    def differences(self) -> list[str]:
        found = []
        for name, tensor in self.tensors.items():
            is_there, expected = self.rig.read(tensor), bytes(self.model.images[name])
            if is_there != expected:
                wrong = [at for at, (one, other) in enumerate(zip(is_there, expected, strict=True)) if one != other]
                found.append(f"tensor {name}: {len(wrong)} of {len(expected)} bytes differ, first at {wrong[0]}")
        return found

    def must_be_right(self, why: str = WRONG) -> None:
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


def must_succeed(future: Future[Any], what: str = "A transfer") -> None:
    __tracebackhide__ = True
    if not (outcome := _outcome(future, what)):
        pytest.fail(f"{what} failed; it must succeed: {outcome}")


def must_work(engine: KitEngine, what: str = "", *, request: RequestHashes | None = None) -> None:
    __tracebackhide__ = True
    engine.must_load(engine.stored(request, what or "A transfer"), what=what)


def must_miss(future: Future[Any], why: str = "A transfer that must miss succeeded") -> None:
    __tracebackhide__ = True
    if outcome := _outcome(future, "A transfer that must miss"):
        pytest.fail(f"{why}: {outcome}")


def must_be_under_way(future: Future[Any]) -> None:
    __tracebackhide__ = True
    if future.wait(0.2):
        pytest.fail("The transfer ended while its copy was paused: it still touches blocks")


def _outcome(future: Future[Any], what: str) -> Any:
    __tracebackhide__ = True
    try:
        return future.result(PATIENCE_S)
    except DeadlineExceeded:
        pytest.fail(f"{what} did not end within {PATIENCE_S:g} s")
    except Exception as error:  # noqa: BLE001  a transfer's future never fails
        pytest.fail(f"{what} raised {type(error).__name__}: a failed transfer must be a miss: {error}")

"""Addresses of copies: those of this project are those of vLLM's own handler, which runs here in host memory, and the
bytes that come back are those that went."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest

from tests.support.lazy import torch

# vLLM's imports take long, and warn.
pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600), pytest.mark.filterwarnings("ignore")]

BLOCKS, PAGES, ROW = 24, (512, 768), 4096


class Event:
    """A device's event in host memory: whatever comes before it has ended."""

    def record(self, _stream: object = None) -> None: ...
    def query(self) -> bool:
        return True

    def synchronize(self) -> None: ...
    def elapsed_time(self, _end: object) -> float:
        return 1.0


class Stream:
    def wait_stream(self, _stream: object) -> None: ...
    def wait_event(self, _event: object) -> None: ...


@pytest.fixture
def in_host_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM's handler as it is, with copies, streams and events of the host."""
    from vllm.v1.kv_offload.cpu import gpu_worker

    def copied(source: Any, target: Any, sizes: Any, **_named: object) -> None:
        for begin, end, nbytes in zip(source.tolist(), target.tolist(), sizes.tolist(), strict=True):
            ctypes.memmove(end, begin, nbytes)

    platform = SimpleNamespace(
        Stream=Stream,
        current_stream=Stream,
        stream=lambda _stream: nullcontext(),
        is_xpu=lambda: False,
        is_rocm=lambda: False,
    )
    monkeypatch.setattr(gpu_worker, "current_platform", platform)
    monkeypatch.setattr(gpu_worker, "_select_swap_blocks_fn", lambda *_arguments, **_named: copied)
    monkeypatch.setattr(gpu_worker.torch, "Event", lambda **_named: Event())
    monkeypatch.setattr(torch.Tensor, "is_cuda", property(lambda _tensor: True), raising=False)


class Memory:
    """The KV memory of a worker with two groups, of which the second has the second tensor only, and an arena."""

    def __init__(self, per_chunk: int, slots: int, slot: int) -> None:
        from vllm.v1.kv_offload.base import CanonicalKVCacheRef, CanonicalKVCaches, CanonicalKVCacheTensor

        from kvf_vllm.offloading.copies import Slot

        made = torch.Generator().manual_seed(per_chunk)
        self.tensors = [torch.randint(-128, 128, (BLOCKS, page), dtype=torch.int8, generator=made) for page in PAGES]
        self.caches = CanonicalKVCaches(
            [CanonicalKVCacheTensor(tensor, page) for tensor, page in zip(self.tensors, PAGES, strict=True)],
            # Of the last layer's pages a part is padding.
            [[CanonicalKVCacheRef(0, 512), CanonicalKVCacheRef(1, 768)], [CanonicalKVCacheRef(1, 700)]],
        )
        self.nbytes = sum(PAGES) * per_chunk
        self.slot = Slot(self.caches, per_chunk, slot * self.nbytes)
        rows = -(-self.nbytes * slots // ROW)
        self.offsets = [at * rows * ROW for at in range(BLOCKS)]
        self.memory = bytearray(rows * ROW * (BLOCKS + 1))
        self.arena = SimpleNamespace(view=memoryview(self.memory), is_served=True)

    def served(self) -> Any:
        return SimpleNamespace(of=lambda _boot: self.arena)


def jobs(per_chunk: int) -> Iterator[tuple[Any, int]]:
    """Blocks of both groups, and how many objects they are: whole chunks, a load that begins within a chunk and ends
    within another, one group alone."""
    from vllm.v1.kv_offload.base import GPULoadStoreSpec

    whole = 2 * per_chunk
    yield (
        GPULoadStoreSpec([*range(2, 2 + whole), *range(12, 12 + per_chunk)], [whole, per_chunk], [0, 3 * per_chunk]),
        3,
    )
    if per_chunk > 1:
        count = whole - 2
        yield GPULoadStoreSpec([*range(1, 1 + count), 20], [count, 1], [1, per_chunk - 1]), 3
    yield GPULoadStoreSpec([*range(per_chunk)], [0, per_chunk], [0, 5 * per_chunk]), 1


@pytest.mark.parametrize("per_chunk", [1, 4])
@pytest.mark.parametrize("slot", [0, 1])
def test_a_gpus_copies_are_those_of_the_cpu(per_chunk: int, slot: int, in_host_memory: None) -> None:
    from kvf_vllm.offloading.gpu import GpuWorker
    from kvf_vllm.offloading.messages import NOWHERE, ArenaPlaces
    from kvf_vllm.offloading.worker import move

    for blocks, objects in jobs(per_chunk):
        for gap in (None, 0, objects - 1):
            ours, theirs = Memory(per_chunk, 2, slot), Memory(per_chunk, 2, slot)
            offsets = ours.offsets[3 : 3 + objects]
            if gap is not None:
                offsets[gap] = NOWHERE
            move(ours.slot.runs(blocks, offsets, storing=True), ours.arena, storing=True)
            worker = GpuWorker(theirs.caches, theirs.slot, theirs.served())
            assert worker.submit_store(1, blocks, ArenaPlaces(1, offsets, b"boot", float("inf")))
            (result,) = worker.get_finished()
            assert result.success
            assert theirs.memory == ours.memory
            if gap is not None:
                continue
            before = [tensor.clone() for tensor in theirs.tensors]
            for memory in (ours, theirs):
                for tensor in memory.tensors:
                    tensor.zero_()
            move(ours.slot.runs(blocks, offsets, storing=False), ours.arena, storing=False)
            worker.submit_load(2, ArenaPlaces(2, offsets, b"boot", float("inf")), blocks)
            assert worker.get_finished()[0].success
            worker.shutdown()
            for mine, their, first in zip(ours.tensors, theirs.tensors, before, strict=True):
                assert torch.equal(mine, their)
                touched = mine.any(dim=1)
                assert torch.equal(mine[touched][:, :512], first[touched][:, :512])


def test_objects_that_are_not_those_of_the_blocks_are_refused() -> None:
    memory = Memory(4, 1, 0)
    for blocks, objects in jobs(4):
        for wrong in (objects - 1, objects + 1):
            with pytest.raises(ValueError, match=f"{wrong} places"):
                memory.slot.runs(blocks, memory.offsets[:wrong], storing=False)


def test_a_load_without_a_place_or_after_its_time_fails_at_once(in_host_memory: None) -> None:
    from kvf_vllm.offloading.gpu import GpuWorker
    from kvf_vllm.offloading.messages import NOWHERE, ArenaPlaces

    memory = Memory(1, 1, 0)
    worker = GpuWorker(memory.caches, memory.slot, memory.served())
    blocks, objects = next(jobs(1))
    for number, places in enumerate(
        (
            ArenaPlaces(1, [NOWHERE] * objects, b"boot", float("inf")),
            ArenaPlaces(2, memory.offsets[:objects], b"boot", 0.0),
        )
    ):
        worker.submit_load(number, places, blocks)
        assert [(each.job_id, each.success) for each in worker.get_finished()] == [(number, False)]


class SharedMemory(Memory):
    """The KV memory of one of `workers` workers in vLLM's canonical layout: of the first tensor each has its part of
    the heads, of the second two workers at a time hold the same."""

    def __init__(self, per_chunk: int, workers: int, rank: int) -> None:
        from vllm.v1.kv_offload.base import (
            CanonicalKVCacheRef,
            CanonicalKVCaches,
            CanonicalKVCacheTensor,
            CanonicalPageMapping,
            CopyRun,
        )

        from kvf_vllm.offloading.copies import Slot

        super().__init__(per_chunk, workers, 0)
        made = torch.Generator().manual_seed(7)
        page, replicas = 1024 // workers, min(workers, 2)
        whole = [torch.randint(-128, 128, (BLOCKS, size), dtype=torch.int8, generator=made) for size in (1024, 768)]
        # Of each of eight rows of a page a worker has a part.
        row, mine = 128, 128 // workers
        rows = whole[0].view(BLOCKS, 8, row)[:, :, rank * mine : (rank + 1) * mine]
        self.tensors = [rows.reshape(BLOCKS, page).clone(), whole[1].clone()]
        split = CanonicalPageMapping(1024, page, (CopyRun(0, rank * mine, mine, 8, mine, row),), 1, 0, True)
        alike = CanonicalPageMapping(768, 768, (CopyRun(0, 0, 768, 1, 768, 768),), replicas, rank % replicas, True)
        self.caches = CanonicalKVCaches(
            [CanonicalKVCacheTensor(each, each.shape[1]) for each in self.tensors],
            [
                [CanonicalKVCacheRef(0, page, split), CanonicalKVCacheRef(1, 768, alike)],
                [CanonicalKVCacheRef(1, 768, alike)],
            ],
        )
        if workers > 2:
            raise ValueError("two workers at most hold the same")
        self.slot = Slot(self.caches, per_chunk, 0, canonical=True)


@pytest.mark.parametrize("per_chunk", [1, 4])
def test_one_worker_loads_what_two_have_stored_in_the_canonical_layout(per_chunk: int, in_host_memory: None) -> None:
    from kvf_vllm.offloading.gpu import GpuWorker
    from kvf_vllm.offloading.messages import ArenaPlaces
    from kvf_vllm.offloading.worker import move

    for blocks, objects in jobs(per_chunk):
        alone, arenas = SharedMemory(per_chunk, 1, 0), []
        offsets = alone.offsets[3 : 3 + objects]
        for by_gpu in (False, True):
            both = [SharedMemory(per_chunk, 2, rank) for rank in range(2)]
            both[1].memory, both[1].arena = both[0].memory, both[0].arena
            for worker in both:
                if by_gpu:
                    gpu = GpuWorker(worker.caches, worker.slot, worker.served())
                    gpu.submit_store(1, blocks, ArenaPlaces(1, offsets, b"boot", float("inf")))
                    assert gpu.get_finished()[0].success
                else:
                    move(worker.slot.runs(blocks, offsets, storing=True), worker.arena, storing=True)
            arenas.append(bytes(both[0].memory))
        assert arenas[0] == arenas[1]
        before = [tensor.clone() for tensor in alone.tensors]
        alone.memory[:] = arenas[0][: len(alone.memory)]
        for tensor in alone.tensors:
            tensor.zero_()
        move(alone.slot.runs(blocks, offsets, storing=False), alone.arena, storing=False)
        for mine, first in zip(alone.tensors, before, strict=True):
            touched = mine.any(dim=1)
            assert torch.equal(mine[touched], first[touched])
        used = sorted({int(each) for each in blocks.block_ids})
        assert sorted(int(each) for each in alone.tensors[1].any(dim=1).nonzero().flatten()) == used


def test_blocks_without_a_canonical_form_are_refused() -> None:
    from kvf_vllm.offloading.copies import Slot
    from kvframework.errors import BadLayout

    with pytest.raises(BadLayout, match="no canonical form"):
        Slot(Memory(1, 1, 0).caches, 1, 0, canonical=True)

"""The shapes of the bench: their names, and the fragments that a copier makes of them."""

from __future__ import annotations

from typing import Any, cast

import pytest

from kvf_dev.testing.accelerator.runtime import DeviceTensor, contiguous
from kvf_layouts.paged import PagedLayout
from kvframework.api.copy_plans import CopyPlanner, PlacedView
from kvframework.api.transport import ArenaRange, GroupBlocks
from kvframework_bench.cuda.workload import CHUNK_TOKENS, FULL, QUICK, SHAPES, CudaShape, fragment_shape

FRAGMENTS = [fragment_shape(size, FULL.sweep_bytes) for size in FULL.sweep_fragments]


def planned(shape: CudaShape) -> tuple[set[int], int, int]:
    """Return the lengths of fragments of one chunk, the bytes of all of them, and those of its object."""
    blocks = 2 * shape.blocks(1)
    dims = shape.dims(blocks)
    tensors: dict[str, Any] = {
        f"layers.{layer}": DeviceTensor(cast("Any", None), (layer + 1) << 40, dims, contiguous(dims), shape.dtype)
        for layer in range(shape.layers)
    }
    layout = PagedLayout(shape.axes)
    declared = layout.describe(tensors, block_size=shape.block_tokens)
    desc = layout.object_desc(declared, CHUNK_TOKENS)
    views = [
        [
            [PlacedView(v.data_ptr(), cast("Any", tuple(s * v.element_size() for s in v.stride()))) for v in plane]
            for plane in group
        ]
        for group in layout.block_views(declared, tensors)
    ]
    planner = CopyPlanner(declared.groups, desc, views)
    every_other = list(range(0, blocks, 2))
    batches = planner.plan(
        [ArenaRange(0, 0, 0, desc.nbytes)], [GroupBlocks(every_other, shape.blocks(1), 0, max(every_other))]
    )
    return {batch.run for batch in batches}, sum(batch.nbytes for batch in batches), desc.nbytes


@pytest.mark.parametrize("shape", FULL.shapes, ids=lambda shape: f"{shape.name}, {shape.block_tokens}")
def test_fragments_are_those_that_a_copier_makes(shape: CudaShape) -> None:
    lengths, moved, object_bytes = planned(shape)
    assert lengths == {shape.fragment_bytes}
    assert moved == object_bytes == shape.nbytes(1)


@pytest.mark.parametrize(("shape", "chunks"), FRAGMENTS, ids=lambda each: str(getattr(each, "name", each)))
def test_the_sweep_has_fragments_of_each_size(shape: CudaShape, chunks: int) -> None:
    size = FULL.sweep_fragments[FRAGMENTS.index((shape, chunks))]
    assert planned(shape)[0] == {size} == {shape.fragment_bytes}
    assert shape.nbytes(chunks) == FULL.sweep_bytes
    assert shape.layers <= 64


def test_the_sweep_goes_from_256_bytes_to_512_kib() -> None:
    assert (FULL.sweep_fragments[0], FULL.sweep_fragments[-1]) == (256, 512 << 10)
    assert set(QUICK.sweep_fragments) <= set(FULL.sweep_fragments)


def test_the_shapes_are_those_they_are_called_after() -> None:
    for name, shape in SHAPES.items():
        bytes_per_token = 131072 if name.startswith("llama") else 61 * 576 * 2
        for chunks in (1, 64):
            for tokens in (16, 64):
                assert shape.with_block(tokens).nbytes(chunks) == chunks * 256 * bytes_per_token
    assert SHAPES["llama-3-8b, plane first"].dims(7) == (2, 7, 16, 8, 128)
    assert SHAPES["llama-3-8b, heads first"].with_block(64).dims(7) == (7, 2, 8, 64, 128)
    assert SHAPES["deepseek-v3"].dims(7) == (7, 16, 576)
    assert [shape.fragment_bytes for shape in SHAPES.values()] == [32768, 32768, 256, 18432]
    assert [shape.piece_bytes for shape in SHAPES.values()] == [32768, 65536, 65536, 18432]


def test_only_what_is_named_is_measured() -> None:
    every = FULL.only(shapes=[], blocks=[], engines=[])
    assert every == FULL
    some = FULL.only(shapes=["llama-3-8b, b", "deep"], blocks=[64], engines=["kernel", "dma"])
    assert [(shape.name, shape.block_tokens) for shape in some.shapes] == [
        ("llama-3-8b, block first", 64),
        ("deepseek-v3", 64),
    ]
    assert some.engines == ("dma", "kernel")


def test_steps_that_fit_neither_here_nor_there_are_left_out() -> None:
    shape = SHAPES["deepseek-v3"]
    sizes = FULL
    need = 4 * shape.nbytes(16) + sizes.reserve
    assert sizes.fitting(shape, device_free=need, host_free=1 << 50) == (1, 4, 16)
    assert sizes.fitting(shape, device_free=1 << 50, host_free=need - 1) == (1, 4)
    assert sizes.fitting(shape, device_free=0, host_free=1 << 50) == ()
    assert sizes.fitting(shape, device_free=1 << 50, host_free=1 << 50) == sizes.chunks


def test_a_slow_step_has_fewer_rounds() -> None:
    assert FULL.rounds_of(1e-6) == FULL.rounds
    assert FULL.rounds_of(0.05) == 7
    assert FULL.rounds_of(10.0) == 3
    assert QUICK.rounds_of(10.0) == 2
